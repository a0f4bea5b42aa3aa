"""Into which folders a rank may record, and what is removed from them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from astray.errors import RunError, RunExists
from astray.records import Call
from astray.store import RunInfo, RunWriter, open_run
from astray.store.run_format.folder import move_ranks


def record(path: Path, info: RunInfo, rank: int = 0, *, steps: int = 1, **options: object) -> None:
    with RunWriter(path, rank, info=info, **options) as writer:  # type: ignore[arg-type]
        for step in range(steps):
            writer.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))


def open_files() -> list[str]:
    return sorted(str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir())


def test_a_run_is_not_overwritten_by_default(tmp_path: Path, info: RunInfo) -> None:
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
def test_other_folders_are_never_touched(tmp_path: Path, info: RunInfo, overwrite: bool) -> None:
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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_cannot_be_made_is_reported_in_a_sentence(tmp_path: Path, info: RunInfo, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" / "run"
    with pytest.raises(RunError) as caught:
        record(place, info, overwrite=overwrite)
    assert str(caught.value) == (
        f"{place} cannot be recorded into: Not a directory ({place / 'rank0'}). Choose a folder that can be written to."
    )


@pytest.mark.parametrize("place", ["/proc/astray", "/dev/null/astray"])
def test_nowhere_is_a_raw_error(info: RunInfo, place: str) -> None:
    with pytest.raises(RunError, match="cannot be recorded into"):
        record(Path(place), info)


@pytest.mark.parametrize("name", ["mkdir", "open", "iterdir"])
def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, info: RunInfo, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(RunError, match=r"cannot be recorded into: Read-only file system.*\. Choose a folder"):
        record(tmp_path, info)


@pytest.mark.parametrize("name", ["calls.arrows", "tensors.arrows", "stacks.jsonl"])
def test_files_that_cannot_be_opened_are_reported_and_the_others_closed(
    tmp_path: Path, info: RunInfo, name: str
) -> None:
    (tmp_path / "rank0" / name).mkdir(parents=True)  # in the way
    before = open_files()
    with pytest.raises(RunError, match=rf"cannot be recorded into: .*{name}"):
        record(tmp_path, info, overwrite=True)
    assert open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("astray-writer")]


def test_missing_ranks_are_named_and_the_rest_counted(tmp_path: Path, info: RunInfo) -> None:
    record(tmp_path, info, world_size=100_000_000)
    run = open_run(tmp_path)
    assert not run.complete
    assert [problem.split(":")[0] for problem in run.problems] == [
        "Rank 1 of 100000000 is missing",
        "Rank 2 of 100000000 is missing",
        "Rank 3 of 100000000 is missing",
        "99,999,996 more ranks are missing.",
    ]


def test_a_run_without_an_end_may_still_be_recorded(tmp_path: Path, info: RunInfo) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        writer.flush()
        assert open_run(tmp_path).problems == [
            f"{tmp_path / 'rank0'} has no end.json: it is still being recorded, or the recording was stopped before "
            "it ended."
        ]


def test_a_moved_run_still_opens(tmp_path: Path, info: RunInfo, call: Callable[..., Call]) -> None:
    record(tmp_path / "a", info)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert open_run(tmp_path / "b").complete


def test_ranks_of_children_join_the_run_of_rank_0(tmp_path: Path, info: RunInfo) -> None:
    """As when a program starts its command line again for the other ranks, and is rank 0 itself."""
    run, children = tmp_path / "run", tmp_path / "run.ranks"
    record(run, info)
    record(children, info, rank=1, steps=3)
    (children / "run.json").unlink(missing_ok=True)
    move_ranks(run, children, 2)
    joined = open_run(run)
    assert joined.info.world_size == 2
    assert [len(rank.calls) for rank in joined.ranks.values()] == [1, 3]
    assert not children.exists()
