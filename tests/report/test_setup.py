"""What was set differently, in the report, its table and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from astray import Comparison, compare
from astray.cli import main
from astray.records import Call, Setup, Statistics, Tensor
from astray.report.html import comparison_as_html
from astray.report.listing import ListingOptions
from astray.report.listing import render as listing
from astray.report.setup import render as table
from astray.report.setup import summary_of
from astray.report.text import render
from astray.store import RunInfo, RunWriter, open_run

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/comparison.schema.json").read_text(encoding="utf-8"))
BASE = [
    Setup(0, "module", f"h.{at}.norm", {"class": "LayerNorm", "eps": 1e-5, "training": True, "inplace": False})
    for at in range(12)
]


def write(path: Path, rows: list[Setup], ranks: int = 1) -> Path:
    for rank in range(ranks):
        with RunWriter(path, rank, info=RunInfo.of_process(world_size=ranks)) as writer:
            for row in rows:
                writer.setup(row)
            writer.call(Call(0, 0, 0, "module", "h.0.norm", "LayerNorm", 0, "forward"))
            numbers = Statistics(0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0, 0, 0, 2)
            writer.tensor(Tensor(0, "output", "out", "float32", (2,), (1,), "cpu", False, numbers, fingerprint=1))
    return path


def compared(folder: Path, rows: list[Setup], **more: Any) -> Comparison:
    return compare(write(folder / "a", BASE, **more), write(folder / "b", [*BASE, *rows], **more))


def eps(*places: int) -> list[Setup]:
    return [Setup(0, "module", f"h.{at}.norm", {"eps": 1e-3}) for at in places]


def test_nothing_is_said_where_nothing_differs(tmp_path: Path) -> None:
    diff = compared(tmp_path, [])
    assert "differently" not in render(diff)
    assert "Nothing was set differently, as far as both runs tell." in table(diff)


def test_it_is_said_first(tmp_path: Path) -> None:
    text = render(compared(tmp_path, eps(3)), width=400)
    sentence = "Set differently: h.3.norm (LayerNorm) has eps 1e-05 in the reference and 0.001 in the candidate."
    assert text.splitlines()[2:5] == [sentence, "", "✓ No divergence: 1 tensor of 1 step agrees (1 identical)."]


def test_at_most_a_few_and_how_to_see_the_rest(tmp_path: Path) -> None:
    rows = [Setup(0, "module", f"h.{at}.norm", {"eps": 0.1 + at}) for at in range(8)]
    rows.append(Setup(0, "module", "h.0.norm", {"inplace": True}))
    diff = compared(tmp_path, rows)
    assert len(diff.setup) == 9
    text = render(diff)
    assert text.count("has eps") == 5
    assert "more         3 more and 1 with no known effect on numbers; --setup lists them all." in text
    assert table(diff).count("eps") == 8


def test_what_has_no_known_effect_is_only_counted(tmp_path: Path) -> None:
    text = render(compared(tmp_path, [Setup(0, "module", "h.0.norm", {"inplace": True})]))
    assert "Set differently: 1 setting with no known effect on numbers; --setup lists them." in text


def test_ranks_are_named_where_it_is_not_so_on_all(tmp_path: Path) -> None:
    diff = compared(tmp_path, eps(3), ranks=2)
    assert diff.setup[0].ranks == (0, 1)
    assert "rank" not in render(diff).split("✓")[0].splitlines()[2]
    write(tmp_path / "c", BASE, ranks=2)
    (tmp_path / "c" / "rank1" / "setup.jsonl").write_bytes((tmp_path / "b" / "rank1" / "setup.jsonl").read_bytes())
    text = render(compare(tmp_path / "a", tmp_path / "c"))
    assert "0.001 in the candidate, on rank 1." in " ".join(text.split())


def test_the_table(tmp_path: Path) -> None:
    rows = [*eps(*range(12)), Setup(0, "torch", "", {"threads": 2})]
    diff = compared(tmp_path, rows)
    lines = table(diff, width=100).splitlines()
    assert lines[2].split() == ["what", "name", "reference", "candidate", "changes", "from"]
    assert lines[3].split() == ["12", "modules", "(LayerNorm)", "eps", "1e-05", "0.001", "results", "start"]
    assert all(len(line) <= 60 for line in table(diff, width=60).splitlines()[2:])


def test_a_run_without_it_is_named_in_the_table_alone(tmp_path: Path) -> None:
    diff = compare(write(tmp_path / "a", []), write(tmp_path / "b", BASE))
    assert "has not recorded what it was set to" in table(diff, width=400)
    assert "recorded what" not in render(diff, width=400)


def test_in_json_and_in_a_notebook(tmp_path: Path) -> None:
    diff = compared(tmp_path, eps(*range(12)))
    content = json.loads(diff.to_json(tmp_path / "diff.json").read_text(encoding="utf-8"))
    Draft202012Validator(SCHEMA).validate(content)
    (found,) = content["setup"]
    assert (found["name"], found["reference"], found["candidate"], found["count"]) == ("eps", 1e-5, 1e-3, 12)
    assert (found["kind"], found["expected_effect"], found["step"]) == ("module", "changes results", None)
    assert len(found["sites"]) == 12
    assert "Set differently" in comparison_as_html(diff)


def test_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    compared(tmp_path, eps(3))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--setup"]) == 0
    printed = capsys.readouterr().out
    assert "module h.3.norm (LayerNorm)" in printed
    assert "No divergence" not in printed
    assert main(["compare", str(tmp_path / "a"), "--replicas", "--setup"]) == 2


def test_a_run_says_what_it_was_set_to(tmp_path: Path) -> None:
    trained = {"weight.requires_grad": True, "bias.requires_grad": True}
    names = {"parameters": ["fc.weight"]}
    rows = [
        Setup(0, "module", "fc", {"class": "Linear", "weight.dtype": "float32", "bias.dtype": "float32", **trained}),
        Setup(0, "optimizer", "AdamW/param_groups.0", {"class": "AdamW", "lr": 1e-3, "betas": [0.9, 0.99], **names}),
        Setup(0, "torch", "", {"threads": 2, "float32_matmul_precision": "high"}),
        Setup(0, "autocast", "<root>", {"autocast": "cpu bfloat16"}),
        Setup(0, "seed", "", {"torch": 7}),
        Setup(1, "optimizer", "AdamW/param_groups.0", {"lr": 1e-4}),
    ]
    assert summary_of(open_run(write(tmp_path / "a", rows))) == (
        "AdamW lr 0.001, betas (0.9, 0.99) · 2 float32 parameters and buffers · autocast cpu bfloat16 · "
        "matmul precision high · 2 threads · seed 7 · in no optimizer: fc.bias"
    )
    assert "  setup      AdamW lr 0.001" in listing(open_run(tmp_path / "a"), ListingOptions())
    assert summary_of(open_run(write(tmp_path / "b", []))) == ""
