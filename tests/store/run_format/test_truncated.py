"""Every file of a run cut at many places: a sentence each time, and everything before the cut is still there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from astray.errors import RunError
from astray.records import Call, Frame, Tensor
from astray.store import RunData, RunInfo, RunWriter, open_run

ROWS = 60


@pytest.fixture
def whole(tmp_path: Path, info: RunInfo, call: Callable[..., Call], tensor: Callable[..., Tensor]) -> Path:
    path = tmp_path / "whole"
    with RunWriter(path, info=info) as writer:
        for seq in range(ROWS):
            writer.stack(seq, [Frame("a.py", seq, "f", "x")])
            writer.call(call(seq, stack=seq))
            writer.tensor(tensor(seq, dtype="int64", shape=(20,)), np.full(20, seq))
            if seq % 7 == 0:
                writer.flush()
    return path


def cuts(whole: Path, name: str, count: int = 60) -> list[int]:
    size = (whole / name).stat().st_size
    return sorted({*np.linspace(0, size - 1, count, dtype=int).tolist(), size - 8, size - 4, 4, 8})


def cut(whole: Path, name: str, size: int) -> Path:
    copy = whole.with_name("cut")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    with (copy / name).open("r+b") as file:
        file.truncate(size)
    return copy


def assert_sentence(text: str) -> None:
    assert text.endswith(".")
    assert "\n" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("table", ["calls", "tensors"])
def test_tables(whole: Path, table: str) -> None:
    name = f"rank0/{table}.arrows"
    seen = set()
    for size in cuts(whole, name):
        run = open_run(cut(whole, name, size))
        rows = getattr(run.ranks[0], table)
        assert rows["seq"].tolist() == list(range(len(rows)))
        seen.add(len(rows))
        if len(rows) < ROWS:
            assert not run.complete
            first = run.problems[0]
            assert_sentence(first)
            assert f"{table}.arrows" in first
            assert f"{len(rows)} {table}" in first
        if table == "calls" and len(rows) < ROWS:
            orphans = f"{ROWS - len(rows)} of {ROWS} tensors belong to calls whose rows are not there."
            assert run.problems[-1] == orphans
        assert len(run.table()) == len(run.ranks[0].tensors)
    assert len(seen) > 5  # the cuts fell into different batches


@pytest.mark.parametrize("table", ["calls", "tensors"])
def test_a_table_that_is_not_there(whole: Path, table: str) -> None:
    (whole / "rank0" / f"{table}.arrows").unlink()
    run = open_run(whole)
    assert len(getattr(run.ranks[0], table)) == 0
    assert run.problems[0].endswith(
        f"{table}.arrows cannot be read: No such file or directory. None of its {table} are there."
    )


def test_values(whole: Path) -> None:
    name = "rank0/values-00000.safetensors"
    for size in cuts(whole, name):
        run = open_run(cut(whole, name, size))
        ends = run.ranks[0].tensors["blob_offset"] + run.ranks[0].tensors["blob_bytes"]
        for row, end in enumerate(ends.tolist()):
            if end <= size:
                assert (run.values(0, row) == row).all()
            else:
                with pytest.raises(RunError, match=r"values-00000\.safetensors (ends after|cannot be read)") as caught:
                    run.values(0, row)
                assert_sentence(str(caught.value))


def test_run_json(whole: Path) -> None:
    for size in cuts(whole, "run.json")[:-3]:
        with pytest.raises(RunError, match=r"run\.json \(\d+ bytes\) is not whole JSON: .*\.$"):
            open_run(cut(whole, "run.json", size))


def test_end_json(whole: Path) -> None:
    for size in cuts(whole, "rank0/end.json")[:-3]:
        run = open_run(cut(whole, "rank0/end.json", size))
        assert not run.complete
        assert len(run.ranks[0].tensors) == ROWS
        (problem,) = run.problems
        assert_sentence(problem)
        assert "end.json" in problem


def test_stacks(whole: Path) -> None:
    for size in cuts(whole, "rank0/stacks.jsonl"):
        run: RunData = open_run(cut(whole, "rank0/stacks.jsonl", size))
        found = [len(run.ranks[0].stack(seq)) for seq in range(ROWS)]
        assert found == sorted(found, reverse=True)  # those before the cut
    (whole / "rank0" / "stacks.jsonl").unlink()
    assert open_run(whole).ranks[0].stack(0) == []
