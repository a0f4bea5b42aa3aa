"""A run written in another format, step by step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astray.cli import main
from astray.comparison.comparison import compare
from astray.errors import RunError, RunExists
from astray.store import End, RankRun, RunData, RunInfo, open_run
from astray.store.convert import convert, write_as


class Counting:
    """A translator that counts."""

    def __init__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> None:
        self.lost: Counter[str] = Counter()
        self.rank = rank
        self.seen: list[Any] = []

    def take(self, step: int, rows: RankRun) -> None:
        values = [rows.values(row) for row in range(len(rows.tensors))]
        self.seen.append((step, len(rows.calls), [None if one is None else float(one.max()) for one in values]))
        self.lost["a call's hat"] += len(rows.calls)

    def sync(self) -> None:
        raise AssertionError("nothing waits")

    def end_step(self, step: int) -> None:
        self.seen.append(step)

    def close(self, end: End) -> None:
        self.seen.append(end.complete)


def test_steps_come_one_after_another(small_run: RunData, tmp_path: Path) -> None:
    made: list[Counting] = []

    def make(*given: Any, **more: Any) -> Counting:
        made.append(Counting(*given, **more))
        return made[-1]

    progress: list[tuple[int, int]] = []
    done = write_as(small_run, tmp_path / "out", "counting", make, progress=lambda *at: progress.append(at))
    assert made[0].seen == [(0, 4, [0.0, 1.0, 2.0, 3.0]), 0, (1, 4, [4.0, 5.0, 6.0, 7.0]), 1, True]
    assert progress == [(1, 2), (2, 2)]
    assert done == (tmp_path / "out", "counting", 1, 2, 8, 8, Counter({"a call's hat": 8}))
    write_as(small_run, tmp_path / "out", "counting", make, steps=[1])
    assert made[1].seen == [(1, 4, [4.0, 5.0, 6.0, 7.0]), 1, True]


def test_where_it_cannot_write(small_run: RunData, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is the run itself\. Give another place"):
        convert(small_run, small_run.path, "astray", overwrite=True)
    there = tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    with pytest.raises(RunExists, match=r"is there already\. Choose another place, or overwrite it with --force"):
        convert(small_run, there, "astray")
    with pytest.raises(RunError, match="has nothing to convert in the steps asked for"):
        convert(small_run, tmp_path / "new", "astray", steps=[7])
    assert not (tmp_path / "new").exists()


def test_a_run_of_our_own_loses_nothing(small_run: RunData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(small_run.path), str(tmp_path / "copy"), "--to", "astray"]) == 0
    assert capsys.readouterr().out == f"written   {tmp_path / 'copy'}: 2 steps, 1 rank, 8 calls, 8 tensors\n"
    copy = open_run(tmp_path / "copy")
    assert copy.complete
    assert copy.info.framework == "torch"
    assert copy.info.seed == 7
    for rows, others in (
        (small_run.ranks[0].calls, copy.ranks[0].calls),
        (small_run.ranks[0].tensors, copy.ranks[0].tensors),
    ):
        assert rows.names == others.names
        for row in range(len(rows)):
            there = {name: value for name, value in rows.row(row).items() if not name.startswith("blob")}
            assert there == {name: value for name, value in others.row(row).items() if not name.startswith("blob")}
    assert all(np.array_equal(small_run.values(0, row), copy.values(0, row)) for row in range(8))
    assert compare(small_run, copy).counts["identical"] == 8


def test_a_format_that_is_none(small_run: RunData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(small_run.path), str(tmp_path / "x"), "--to", "excel"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("astray convert: 'excel' is not a format that can be written. There are astray, msprobe,")
