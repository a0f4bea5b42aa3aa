"""Names in a recording are untrusted: whatever they hold, a terminal shows it and does not obey it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from astray.cli import main
from astray.comparison.pair.mapping import read_mapping
from astray.records import Call, Frame, Setup, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter, open_run

EVIL = "x\r\x1b[2K\x1b[31m✓ No divergence\x1b[0m\n\x07\u202eevil\u2066\u200b\u2028\x9b2J"
"""Goes to the line's start, clears it, lies, begins a line, rings, turns the writing round, hides, clears once more."""

OURS = re.compile(r"\x1b\[(?:0|1|2|3[123](?:;1)?)m")


def record(path: Path, factor: float = 1.0, spoilt: bool = False, suffix: str = "") -> str:
    """A run of two steps and two ranks in which every text is evil."""
    info = RunInfo.of_process(
        framework=EVIL, versions={EVIL: EVIL}, command=[EVIL], devices=[EVIL], world_size=2, settings={EVIL: EVIL}
    )
    for rank in range(2):
        writer = RunWriter(path, rank=rank, info=info)
        writer.setup(Setup(0, "module", EVIL, {"class": EVIL, EVIL: EVIL, "factor": factor, "say": f"{EVIL}{factor}"}))
        writer.setup(Setup(0, "optimizer", EVIL, {"class": EVIL, "lr": factor}))
        writer.stack(0, [Frame(EVIL, 7, EVIL, EVIL), Frame(f"{EVIL}.py", 9, EVIL, EVIL)])
        for seq in range(4):
            args = json.dumps({EVIL: {EVIL: factor}})
            site = f"{'h' * seq}{EVIL}{suffix}"
            writer.call(Call(seq, seq // 2, 0, "module", site, EVIL, 0, "forward", stack=0, args=args))
            for role, path_ in (("input", EVIL), ("output", "out")):
                array = np.arange(6, dtype=np.float32) + np.float32(factor * seq + rank if role == "output" else 0)
                if spoilt and role == "output":
                    array[2] = np.nan
                found = measure(Strided.from_numpy(array))
                numbers = (found.statistics, found.fingerprint)
                tensor = Tensor(seq, role, path_, "float32", (6,), (1,), EVIL, False, *numbers, note=EVIL)
                writer.tensor(tensor, array)
        writer.missed(EVIL, EVIL, 2)
        writer.close(ended=EVIL)
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    return {
        "good": record(tmp_path / "good"),
        "bad": record(tmp_path / "bad", 2.0),
        "spoilt": record(tmp_path / "spoilt", spoilt=True),
        "renamed": record(tmp_path / "renamed", suffix=f".{EVIL}"),
        "out": str(tmp_path / "out"),
        "away": str(tmp_path / EVIL),
    }


COMMANDS = [
    "compare good bad",
    "compare good bad --setup",
    "compare good bad --top 0",
    "compare good bad --filter site~x",
    "compare good renamed",
    "compare good renamed --by order",
    "compare good spoilt",
    "compare good --replicas",
    "compare good away",
    "show good",
    "show good --match x",
    "show spoilt",
    "show spoilt --alarms",
    "show good --risk",
    "show good --risk --as float16",
    "show away",
    "map good renamed",
    "map good bad",
    "convert good out --to msprobe",
    "convert good out --to torch_npu",
    "convert good out --to saving_hook",
    "convert good out --to hooktools",
    "convert good out --to astray",
]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_text_of_a_run_reaches_the_terminal_raw(
    command: str,
    colour: bool,
    runs: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    code = main([runs.get(word, word) for word in command.split()])
    said = "".join(capsys.readouterr())
    assert said
    assert "Traceback" not in said
    assert code in (0, 1, 2)
    plain = OURS.sub("", said) if colour else said
    assert [sign for sign in plain if not sign.isprintable() and sign != "\n"] == []
    assert not [line for line in plain.split("\n") if line.startswith(("evil", "\\x07"))]


def test_reports_have_no_raw_text_either(runs: dict[str, str]) -> None:
    import astray

    said = [str(astray.compare(runs["good"], runs["bad"])), str(astray.open(runs["spoilt"]).alarms())]
    assert all(sign.isprintable() or sign == "\n" for text in said for sign in text)


def test_colours_that_a_name_brings_along_are_not_ours(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["compare", runs["good"], runs["bad"]])
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out  # the report's own red is bold
    assert "\\x1b[31m" in out


def test_a_draft_of_names_with_escapes_is_read_back(runs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    assert main(["map", runs["good"], runs["renamed"], "-o", str(file)]) == 0
    mapping = read_mapping(file)
    sites = open_run(runs["good"]).ranks[0].calls.coded("site").values
    renamed = open_run(runs["renamed"]).ranks[0].calls.coded("site").values
    assert [mapping.site(site) for site in renamed[:2]] == sites[:2]  # those of the first step
