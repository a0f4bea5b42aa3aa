"""`astray compare` of what is not a run, or not a whole one: one sentence each, and the documented exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from astray.cli import main
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter


def write(path: Path, steps: int = 6) -> None:
    """A run of two ranks that writes a batch for every step."""
    for rank in (0, 1):
        with RunWriter(path, rank, info=RunInfo.of_process(world_size=2)) as writer:
            for step in range(steps):
                writer.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))
                found = measure(Strided.from_numpy(np.full(4, step + 1, np.float32)))
                writer.tensor(Tensor(step, "output", "out", "float32", (4,), (1,), "cpu", False, *found))
                writer.flush()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "a")
    with RunWriter(folder / "empty", info=RunInfo.of_process()):
        pass
    return folder


@pytest.fixture
def home(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: runs `a`, `b` and `empty`."""
    for name in ("a", "empty"):
        shutil.copytree(written / name, tmp_path / name)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence of a comparison that cannot be."""
    assert main(["compare", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("astray compare: ").rstrip()


def test_no_run(home, capsys):
    (home / "other").mkdir()
    assert refused(capsys, "a", "other") == (
        "other is not a run: it is empty. Record one with astray.record or `astray run`."
    )
    (home / "other" / "notes.txt").touch()
    assert refused(capsys, "a", "other") == (
        "other is not a run: it holds notes.txt. Record one with astray.record or `astray run`."
    )
    assert refused(capsys, "nowhere", "b") == "nowhere does not exist. Runs in .: a, b, empty."
    assert refused(capsys, "a", "b/run.json") == (
        "b/run.json is a file; a run is a folder. Give the folder it lies in."
    )
    assert refused(capsys, "a", "b/rank0").endswith(f"The folder above it is one: {home / 'b'}.")


@pytest.mark.parametrize(
    ("words", "side"), [(("a", "empty"), "candidate"), (("empty", "a"), "reference"), (("empty", "empty"), "reference")]
)
def test_a_run_that_recorded_nothing(home, capsys, words, side):
    assert refused(capsys, *words) == (
        f"There is nothing to compare: the {side} empty holds no tensors. What it was asked to record is in "
        "empty/run.json. Record it again."
    )


def test_a_run_of_which_nothing_is_left(home, capsys):
    for rank in (0, 1):
        shutil.rmtree(home / "b" / f"rank{rank}")
    assert refused(capsys, "a", "b") == (
        "There is nothing to compare: the candidate b holds no tensors. Rank 0 of 2 is missing: b/rank0 does not "
        "exist. Record it again."
    )


def test_a_run_of_another_version(home, capsys):
    file = home / "b" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    assert refused(capsys, "a", "b") == (
        "b was written in format version 99; this astray reads up to version 4. Update astray."
    )


def test_a_run_without_its_head(home, capsys):
    (home / "b" / "run.json").unlink()
    assert refused(capsys, "a", "b") == (
        "b has no run.json, so it is not known what ran. Copy it from where the run was recorded."
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            b"sites: {zzz: yyy}",
            "maps nothing: no rule fits a site of the candidate, such as 'fc'. Its names on the left are those of the "
            "candidate. Draft one with: astray map REFERENCE CANDIDATE",
        ),
        (b"", "is empty. It has sections, such as: sites: {h.0: layers.0}"),
        (
            b"site: {a: b}",
            "has a section 'site'; there are sites, patterns, types, functions, tensors, attributes, paths, layouts, "
            "not compared, only in reference, only in candidate. Did you mean 'sites'?",
        ),
        (
            b"sites: {",
            "is not YAML: expected the node content, but found '<stream end>' in line 1. Draft one with: astray map "
            "REFERENCE CANDIDATE",
        ),
        (
            b"a: \xff",
            "is not text: byte 3 is not UTF-8. Draft one with: astray map REFERENCE CANDIDATE",
        ),
        (None, "cannot be read: No such file or directory. Draft one with: astray map REFERENCE CANDIDATE"),
    ],
)
def test_a_mapping_that_is_none(home, capsys, text, sentence):
    if text is not None:
        (home / "map.yaml").write_bytes(text)
    assert refused(capsys, "a", "b", "--map", "map.yaml") == f"The mapping map.yaml {sentence}"


def notes(capsys: pytest.CaptureFixture[str], code: int) -> list[str]:
    """The notes of a comparison that can be, one to a line."""
    assert main(["compare", "a", "b"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return [note.strip() for note in " ".join(out.partition("\nnotes ")[2].split()).split("In the candidate: ") if note]


def test_a_rank_that_is_not_there(home, capsys):
    shutil.rmtree(home / "b" / "rank1")
    assert notes(capsys, 1) == [
        "6 tensors are only in reference, first step 0, forward, fc (Linear), output. Runs have different ranks: "
        "reference 0–1, candidate 0.",
        "Rank 1 of 2 is missing: b/rank1 does not exist.",
    ]


def test_a_run_that_is_still_being_written(home, capsys):
    for rank in (0, 1):
        (home / "b" / f"rank{rank}" / "end.json").unlink()
    assert notes(capsys, 0) == [
        f"b/rank{rank} has no end.json: it is still being recorded, or the recording was stopped before it ended."
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("where", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("table", ["tensors", "calls"])
def test_a_rank_that_is_cut_is_compared_as_far_as_it_goes(home, capsys, table, where):
    file = home / "b" / "rank1" / f"{table}.arrows"
    content = file.read_bytes()
    file.write_bytes(content[: int(where * len(content))])
    told = notes(capsys, 1)
    lost = int(told[0].split()[0])
    assert 1 <= lost <= 6
    assert "only in reference" in told[0]
    if where:
        assert told[1].startswith(f"b/rank1/{table}.arrows is cut: {6 - lost} {table} were read, the last ")
    else:
        assert told[1] == f"b/rank1/{table}.arrows has 0 {table}; 6 were recorded."
    assert len(told) == (2 if table == "tensors" else 3)  # tensors whose calls are lost are told of too


def test_another_framework(home, capsys):
    for name, framework in (("a", "torch"), ("b", "paddle")):
        about = json.loads((home / name / "run.json").read_text())
        (home / name / "run.json").write_text(json.dumps(about | {"framework": framework}))
    said = "Runs are of different frameworks: reference torch, candidate paddle. Where their names differ"
    assert main(["compare", "a", "b"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    (home / "map.yaml").write_text("sites:\n  fc: other\n")
    assert said in refused(capsys, "a", "b", "--map", "map.yaml")
