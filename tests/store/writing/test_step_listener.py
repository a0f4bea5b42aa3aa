"""A writer with a listener: each step is shown before it is written, and the run is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astray.records import Call, Tensor
from astray.store import BufferedStep, RankRun, RunInfo, RunWriter, Table, open_run
from astray.store.run_format.rows import PythonRowBuffer
from store.writing.recorded_steps import GOOD, Tickets, record_step

MakeCall = Callable[..., Call]
MakeTensor = Callable[..., Tensor]


@pytest.fixture(params=["native", "python"])
def rows_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr("astray.store.run_format.rows.RowBuffer", PythonRowBuffer)


def as_lists(table: Table) -> dict[str, Any]:
    rows = [table.row(row) for row in range(len(table))]
    return {name: [row[name] for row in rows] for name in table.names}


@pytest.mark.usefixtures("rows_kept")
@pytest.mark.parametrize("values", [False, True])
def test_the_listener_is_given_each_step_and_the_run_is_the_same(tmp_path: Path, info: RunInfo, values: bool) -> None:
    seen: list[tuple[int, bool, list[int]]] = []

    def look(rows: BufferedStep) -> None:
        seen.append((rows.step, rows.whole, rows.numbers("nan").tolist()))

    for name, listener in (("watched", look), ("bare", None)):
        with RunWriter(tmp_path / name, info=info, on_step=listener) as writer:
            for step in range(3):
                record_step(writer, step, values=values, statistics=GOOD._replace(nan=step))
                if writer.listener is not None:
                    assert writer.listener.wait_until_shown(step, 60)
            assert (writer.listener is not None) == (listener is not None)
    assert seen == [(0, True, [0, 0, 0]), (1, True, [1, 1, 1]), (2, True, [2, 2, 2])]
    watched, bare = (open_run(tmp_path / name) for name in ("watched", "bare"))
    assert as_lists(watched.ranks[0].calls) == as_lists(bare.ranks[0].calls)
    assert as_lists(watched.ranks[0].tensors) == as_lists(bare.ranks[0].tensors)
    assert watched.ranks[0].stack(1) == bare.ranks[0].stack(1) != []
    for row in range(9):
        assert np.array_equal(watched.ranks[0].values(row), bare.ranks[0].values(row))


def test_what_is_shown_is_on_disk_after_a_flush(tmp_path: Path, info: RunInfo) -> None:
    with RunWriter(tmp_path / "run", info=info, on_step=lambda rows: None) as writer:
        for step in range(5):
            record_step(writer, step, values=True)
            assert writer.flush()
            rank = open_run(tmp_path / "run").ranks[0]
            assert rank.summary.steps == list(range(step + 1))
            assert len(rank.tensors) == 3 * (step + 1)


def test_values_can_be_read_by_the_listener(tmp_path: Path, info: RunInfo) -> None:
    read: list[Any] = []

    def look(rows: BufferedStep) -> None:
        rank = RankRun(0, rows)
        read.extend(rank.values(row) for row in range(3))

    with RunWriter(tmp_path / "run", info=info, on_step=look) as writer:
        record_step(writer, 1, values=True)
    assert [None if values is None else values.flatten().tolist() for values in read] == [[3.0] * 6, None, [5.0] * 6]


@pytest.mark.usefixtures("rows_kept")
def test_late_measurements_are_there_for_the_listener_and_in_the_run(
    tmp_path: Path, info: RunInfo, tensor: MakeTensor
) -> None:
    deferred = Tickets()
    seen: list[list[int]] = []
    look: Callable[[BufferedStep], None] = lambda rows: seen.append(rows.numbers("nan").tolist())  # noqa: E731
    with RunWriter(tmp_path / "run", info=info, deferred=deferred, on_step=look) as writer:
        assert writer.listener is not None
        for step in range(2):
            writer.tensor_row(tuple(tensor(step, statistics=deferred.ticket(), fingerprint=None)))
            writer.tensor(tensor(step))
            writer.step_done()
        assert writer.listener.wait_until_shown(1, 60)
        assert seen == [[1, 0], [2, 0]]
        deferred.stuck = True  # a graph is being captured: a flush must not wait for that
        writer.tensor_row(tuple(tensor(2, statistics=deferred.ticket(), fingerprint=None)))
        assert writer.flush()
    assert seen[2:] == [[3]]  # what is left is looked at in the end
    assert open_run(tmp_path / "run").ranks[0].tensors["nan"].tolist() == [1, 0, 2, 0, 3]


def test_a_flush_covers_what_its_thread_has_handed_over(
    tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor
) -> None:
    """Steps end meanwhile, in another thread: these take rows out of the queue, too."""
    over = threading.Event()
    with RunWriter(tmp_path / "run", info=info, on_step=lambda rows: None) as writer:

        def steps() -> None:
            while not over.wait(0.001):
                writer.step_done()

        def flushes(first: int) -> None:
            for seq in range(first, first + 10):
                writer.call(call(seq))
                writer.tensor(tensor(seq))
                assert writer.flush()
                assert seq in open_run(tmp_path / "run").ranks[0].tensors["seq"]

        with ThreadPoolExecutor(3) as pool:
            pacing = pool.submit(steps)
            for done in [pool.submit(flushes, 0), pool.submit(flushes, 100)]:
                done.result()
            over.set()
            pacing.result()
    assert len(open_run(tmp_path / "run").ranks[0].tensors) == 20


def test_a_listener_that_fails_is_noted_and_all_is_written(tmp_path: Path, info: RunInfo) -> None:
    def fail(rows: BufferedStep) -> None:
        raise LookupError(f"step {rows.step}")

    with RunWriter(tmp_path / "run", info=info, on_step=fail) as writer:
        record_step(writer, 0)
        record_step(writer, 1)
    assert writer.end is not None
    assert [(one.what, one.why) for one in writer.end.missed] == [
        ("the check of a step", "LookupError: step 0"),
        ("the check of a step", "LookupError: step 1"),
    ]
    assert (writer.end.complete, writer.end.tensors) == (True, 6)


def test_a_listener_that_flushes_is_not_waited_for(tmp_path: Path, info: RunInfo) -> None:
    flushed: list[bool] = []
    with RunWriter(tmp_path / "run", info=info, on_step=lambda rows: flushed.append(writer.flush())) as writer:
        record_step(writer, 0)
    assert flushed == [False]


@pytest.mark.parametrize("kept", ["values", "rows"])
def test_a_full_disk_ends_the_watch_and_not_the_program(
    tmp_path: Path, run_program: Callable[..., str], kept: str
) -> None:
    last, failure, seen = run_program("full_disk.py", tmp_path / "run", 1 << 20, kept, "watched").splitlines()
    assert (last, seen) == ("63", "True")
    assert failure.startswith(f"Recording into {tmp_path / 'run' / 'rank0'} stopped: File too large: files may have ")
    assert failure.endswith(" Nothing is watched from here on.")
    rank = open_run(tmp_path / "run").ranks[0]
    assert len(rank.tensors) >= 1
    for row, has in enumerate(rank.tensors.valid("blob_file").tolist()):
        assert not has or (rank.values(row) == rank.tensors["seq"][row]).all()
