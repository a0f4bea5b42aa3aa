"""Who may record where."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from astray.errors import RunError, RunExists
from astray.record import Call
from astray.store import RunInfo, RunWriter, open_run


def record(path: Path, info: RunInfo, rank: int = 0, *, steps: int = 1, **options: object) -> None:
    with RunWriter(path, rank, info=info, **options) as writer:  # type: ignore[arg-type]
        for step in range(steps):
            writer.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))


def test_a_run_is_not_overwritten_unless_asked(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path / "a", info, steps=12)
    with pytest.raises(RunExists) as caught:
        record(tmp_path / "a", info)
    assert str(caught.value) == (
        f"{tmp_path / 'a'} already holds a run (12 steps, 12 calls). Choose another folder, or pass overwrite=True "
        "(--force on the command line)."
    )
    assert len(open_run(tmp_path / "a").steps) == 12
    record(tmp_path / "a", info, steps=3, overwrite=True)
    assert len(open_run(tmp_path / "a").steps) == 3


def test_a_run_that_cannot_be_read_is_not_overwritten_either(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path, info)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunExists, match=r"already holds a run\. Choose"):
        record(tmp_path, info)


def test_an_empty_folder_and_folders_above_are_fine(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path, info)
    record(tmp_path / "x" / "y", info)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_is_never_touched(tmp_path: Path, info: RunInfo, overwrite: bool) -> None:
    for name in ("thesis.tex", "data.csv", "b", "c", "d"):
        (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match=r"is not empty and holds no run \(b, c, d, data\.csv and 1 more\)"):
        record(tmp_path, info, overwrite=overwrite)
    with pytest.raises(RunError, match=r"thesis\.tex is a file"):
        record(tmp_path / "thesis.tex", info, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_overwriting_removes_what_astray_wrote_and_nothing_else(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path, info)
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "rank0" / "plot.png").write_text("mine")
    record(tmp_path, info, overwrite=True)
    assert (tmp_path / "notes.md").exists()
    assert (tmp_path / "rank0" / "plot.png").exists()
    assert open_run(tmp_path).complete


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_come_in_any_order(tmp_path: Path, info: RunInfo, order: tuple[int, ...]) -> None:
    three = msgspec.structs.replace(info, world_size=3)
    for rank in order:
        record(tmp_path, three, rank)
    assert open_run(tmp_path).complete
    for rank in order:
        with pytest.raises(RunExists):
            record(tmp_path, three, rank)
    for rank in order:
        record(tmp_path, three, rank, overwrite=True, steps=2)
    run = open_run(tmp_path)
    assert run.complete
    assert [len(r.calls) for r in run.ranks.values()] == [2, 2, 2]


def test_fewer_ranks_leave_no_stale_ones(tmp_path: Path, info: RunInfo) -> None:
    for rank in range(3):
        record(tmp_path, info, rank, world_size=3)
    record(tmp_path, info, 0, world_size=1, overwrite=True)
    run = open_run(tmp_path)
    assert list(run.ranks) == [0]
    assert run.complete


def test_a_rank_does_not_join_a_smaller_run(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path, info)
    with pytest.raises(RunExists):
        record(tmp_path, info, 1, world_size=2)
    assert open_run(tmp_path).complete


def test_a_moved_run_still_opens(tmp_path: Path, info: RunInfo, call: Callable[..., Call]) -> None:
    record(tmp_path / "a", info)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert open_run(tmp_path / "b").complete
