"""Runs are recognised and opened; other paths are explained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pytest

from astray.errors import RunError, RunVersionError
from astray.records import Key
from astray.store import RunData, RunInfo, RunWriter, open_run
from astray.store.run_info import FORMAT


def test_the_path_must_be_a_folder_that_holds_a_run(tmp_path: Path, small_run: RunData) -> None:
    with pytest.raises(RunError, match=r"/smal does not exist\. Runs in .*: small\.$"):
        open_run(tmp_path / "smal")
    with pytest.raises(RunError, match=r"/x/y does not exist\.$"):
        open_run(tmp_path / "x" / "y")
    with pytest.raises(RunError, match=r"run\.json is a file; a run is a folder\. Give the folder it lies in\."):
        open_run(small_run.path / "run.json")
    with pytest.raises(RunError, match=r"it holds calls\.arrows, end\.json.* The folder above it is one: .*small\."):
        open_run(small_run.path / "rank0")
    with pytest.raises(RunError, match=r"is not a run: it holds small\. Runs inside it: small\."):
        open_run(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"is not a run: it is empty\. Record one with"):
        open_run(tmp_path / "empty")


def test_a_string_will_do(small_run: RunData) -> None:
    assert open_run(str(small_run.path)).complete


def test_run_json_is_needed(small_run: RunData) -> None:
    (small_run.path / "run.json").unlink()
    with pytest.raises(RunError, match=r"has no run\.json, so it is not known what ran\. Copy it"):
        open_run(small_run.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": FORMAT + 1},
            rf"was written in format version {FORMAT + 1}; this astray reads up to version {FORMAT}\. Update astray\.",
        ),
        ({"format": "one"}, r"does not hold what it should: Expected `int`, got `str` - at `\$\.format`\."),
        ({"world_size": None}, r"does not hold what it should: Expected `int`, got `null` - at `\$\.world_size`\."),
    ],
)
def test_what_run_json_says_is_checked(small_run: RunData, change: dict[str, object], message: str) -> None:
    file = small_run.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(RunVersionError if "written in" in message else RunError, match=message):
        open_run(small_run.path)


def test_fields_of_a_later_astray_are_passed_over(small_run: RunData) -> None:
    file = small_run.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mood": "good"}))
    assert open_run(small_run.path).complete


def test_a_run_of_the_first_format_version_opens(small_run: RunData) -> None:
    file = small_run.path / "rank0" / "tensors.arrows"
    tensors = pyarrow.ipc.open_stream(file.read_bytes()).read_all().drop_columns(["part"])
    with pyarrow.ipc.new_stream(str(file), tensors.schema) as stream:
        stream.write_table(tensors)
    info = small_run.path / "run.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"format": 1}))
    run = open_run(small_run.path)
    assert (run.complete, run.problems) == (True, [])
    assert run.ranks[0].tensors.names == small_run.ranks[0].tensors.names
    assert run.ranks[0].tensors["part"].tolist() == [None] * 8
    assert run.tensor(Key(1, 0, "layers.2", 0, "forward", "output", "0")).tolist() == [[6] * 3] * 2
    assert pyarrow.table(run.table())["part"].to_pylist() == [None] * 8


def test_a_missing_rank_is_a_problem_and_not_an_error(tmp_path: Path, info: RunInfo) -> None:
    for rank in range(3):
        RunWriter(tmp_path, rank, info=info, world_size=3).close()
    shutil.rmtree(tmp_path / "rank1")
    run = open_run(tmp_path)
    assert not run.complete
    assert list(run.ranks) == [0, 2]
    assert run.problems == [f"Rank 1 of 3 is missing: {tmp_path / 'rank1'} does not exist."]


def test_a_rank_left_over_from_an_earlier_launch_is_a_problem(tmp_path: Path) -> None:
    for rank in (0, 1):
        RunWriter(tmp_path / "run", rank=rank, info=RunInfo.of_process(world_size=2)).close()
    later = RunInfo.of_process(world_size=2, created="2999-01-01T00:00:00+00:00")
    RunWriter(tmp_path / "run", rank=0, info=later, overwrite=True).close()
    (problem,) = [problem for problem in open_run(tmp_path / "run").problems if "rank1" in problem]
    assert "is of an earlier launch" in problem


def test_a_run_of_format_3_opens_without_values() -> None:
    """The run was written by the last astray that did not know the column."""
    run = open_run(Path(__file__).parent / "run_format" / "format3")
    assert (run.info.format, run.problems, len(run.ranks[0].tensors)) == (3, [], 212)
    assert not run.ranks[0].tensors.valid("value").any()
    assert set(run.ranks[0].tensors.numbers("value").tolist()) == {-1}
