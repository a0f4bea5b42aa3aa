"""The flight recorder: what it holds and evicts, what `dump` writes, and from where it may be called."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from astray.records import Call, Frame, MissedTensor, Tensor
from astray.store import (
    BufferedStep,
    FlightRecorder,
    RankRun,
    RunData,
    RunInfo,
    RunWriter,
    Snapshot,
    Table,
    open_run,
)
from astray.store.deferred import BytePiece
from astray.store.run_format import disk_io as disk_module
from astray.store.run_format.rows import PythonRowBuffer
from astray.store.writing.record_queue import WakeEvent
from store.writing.recorded_steps import GOOD, Tickets, record_step

MakeCall = Callable[..., Call]
MakeTensor = Callable[..., Tensor]


def flying(info: RunInfo, **settings: Any) -> FlightRecorder:
    return FlightRecorder("unused", info=info, **settings)


def as_lists(table: Table, **replaced: Any) -> dict[str, Any]:
    rows = [table.row(row) for row in range(len(table))]
    return {name: [row[name] for row in rows] for name in table.names} | replaced


def rows_of(run: RunData, steps: set[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both tables at some steps, without where values lie."""
    rank = run.ranks[0]
    calls = np.isin(rank.calls.numbers("step"), list(steps))
    tensors = rank.tensors.take(calls[rank.call_rows])
    return as_lists(rank.calls.take(calls)), as_lists(tensors, blob_file=None, blob_offset=None)


@pytest.fixture(params=["native", "python"])
def rows_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr("astray.store.run_format.rows.RowBuffer", PythonRowBuffer)


@pytest.mark.usefixtures("rows_kept")
def test_a_dump_is_the_end_of_an_ordinary_run(tmp_path: Path, info: RunInfo) -> None:
    flight = flying(info, remember=3)
    with RunWriter(tmp_path / "ordinary", info=info) as writer, flight:
        for step in range(5):
            record_step(writer, step, values=True)
            record_step(flight, step, values=True)
        assert [path.name for path in tmp_path.iterdir()] == ["ordinary"]
        dump = flight.dump(tmp_path / "dump", "because")
    assert (dump.path, dump.failure) == (tmp_path / "dump", None)
    run, ordinary = open_run(tmp_path / "dump"), open_run(tmp_path / "ordinary")
    rank = run.ranks[0]
    assert (run.steps, run.complete, run.problems) == ([2, 3, 4], True, [])
    assert rows_of(run, {2, 3, 4}) == rows_of(ordinary, {2, 3, 4})
    assert rank.call_rows.tolist() == list(range(9))
    assert [None if (kept := rank.values(row)) is None else kept.tolist() for row in range(9)] == [
        [[seq] * 3] * 2 if seq % 2 else None for seq in range(6, 15)
    ]
    assert [rank.stack(id) == ordinary.ranks[0].stack(id) for id in (2, 3, 4, 100)] == [True] * 4
    assert (rank.stack(0), rank.stack(1)) == ([], [])
    end = dump.end
    assert end == rank.end
    assert end is not None
    assert (end.steps, end.calls, end.tensors, end.stacks, end.values, end.value_bytes) == (3, 9, 9, 4, 4, 96)
    assert (end.why, end.missed, end.ended) == ("because", [], "normally")
    known = run.info.flight
    assert known is not None
    assert (known.why, known.rank, known.remember, known.max_bytes) == ("because", 0, 3, 512 << 20)
    assert msgspec.structs.replace(run.info, flight=None) == info


def test_it_goes_on_after_a_dump_and_can_dump_again(tmp_path: Path, info: RunInfo) -> None:
    with flying(info, remember=2) as flight:
        for step in range(3):
            record_step(flight, step, values=True)
        assert flight.dump(tmp_path / "a", "first").failure is None
        record_step(flight, 3, values=True)
        assert flight.dump(tmp_path / "b", "second").failure is None
        again = flight.dump(tmp_path / "b", "third")
    assert again.end is None
    assert again.failure == (
        f"{tmp_path / 'b'} already holds a run (2 steps, 6 calls). Choose another folder, or pass overwrite=True "
        "(--force on the command line)."
    )
    first, second = open_run(tmp_path / "a"), open_run(tmp_path / "b")
    assert (first.steps, second.steps) == ([1, 2], [2, 3])
    assert rows_of(first, {2}) == rows_of(second, {2})
    assert first.values(0, 4).tolist() == second.values(0, 1).tolist() == [[7] * 3] * 2  # held after the first dump
    assert flight.dump(tmp_path / "b", "forced", overwrite=True).failure is None
    assert open_run(tmp_path / "b").ranks[0].end.why == "forced"


def test_the_unfinished_step_is_written_too(tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor) -> None:
    with flying(info, remember=1) as flight:
        record_step(flight, 0)
        record_step(flight, 1)
        flight.call(call(6, step=2))
        flight.tensor(tensor(6))
        dump = flight.dump(tmp_path / "a", "in the middle")
        flight.tensor(tensor(6, role="input"))
        flight.step_done()
        flight.dump(tmp_path / "b", "at the end")
    assert dump.end is not None
    assert dump.end.missed == [MissedTensor("the rest of step 2", "the step was not over", 1)]
    assert open_run(tmp_path / "a").steps == [1, 2]
    later = open_run(tmp_path / "b")
    assert later.steps == [2]
    assert later.ranks[0].end.missed == []
    assert later.ranks[0].tensors["role"].tolist() == ["output", "input"]


def test_steps_without_rows_push_nothing_out(tmp_path: Path, info: RunInfo) -> None:
    with flying(info, remember=2) as flight:
        for step in range(12):
            if step % 5 == 0:
                record_step(flight, step)
            else:
                flight.step_done()
        assert flight.listener.wait_until_shown(11, 60)
        flight.dump(tmp_path / "run", "why not")
    run = open_run(tmp_path / "run")
    assert run.steps == [5, 10]
    assert run.ranks[0].end.missed == []


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_oldest_steps_go_when_bytes_run_out(tmp_path: Path, info: RunInfo) -> None:
    with flying(info, remember=10) as measured:
        record_step(measured, 0)
        measured.flush()
        one = measured.nbytes
    assert one > 1000
    with flying(info, remember=10, most_bytes=3 * one + one // 2) as flight:
        for step in range(8):
            record_step(flight, step)
            flight.flush()
            assert flight.nbytes <= 3 * one + one // 2
        dump = flight.dump(tmp_path / "run", "full")
    assert open_run(tmp_path / "run").steps == [5, 6, 7]
    assert dump.end is not None
    assert [(missed.what, missed.count) for missed in dump.end.missed] == [("an older step", 5)]
    assert "would have to be remembered" in dump.end.missed[0].why


def test_a_step_larger_than_the_limit_says_what_is_gone(tmp_path: Path, info: RunInfo, call: MakeCall) -> None:
    seen: list[BufferedStep] = []
    with flying(info, most_bytes=1, on_step=seen.append) as flight:
        for seq in range(4):
            flight.call(call(seq, step=0))
            flight.flush()  # each is a piece of its own
        flight.step_done()
        assert flight.listener.wait_until_shown(0, 60)
        dump = flight.dump(tmp_path / "run", "too large")
    run = open_run(tmp_path / "run")
    assert run.ranks[0].calls["seq"].tolist() == [3]
    assert dump.end is not None
    assert dump.end.missed == [MissedTensor("a call of step 0", "more than 1 byte would have to be remembered", 3)]
    assert [rows.calls()[0]["seq"].tolist() for rows in seen] == [[0], [1], [2], [3]]  # nothing was let go unseen
    assert not any(rows.whole for rows in seen)


def test_values_beyond_the_limit_are_named(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    large = 1 << 16
    with flying(info, most_bytes=3 * large - 1) as flight:
        for seq in range(4):
            flight.tensor(tensor(seq, dtype="uint8", shape=(large,)), np.full(large, seq, np.uint8))
        flight.flush()
        assert flight.nbytes < 3 * large
        dump = flight.dump(tmp_path / "run", "large values")
        flight.step_done()
        flight.tensor(tensor(4, dtype="uint8", shape=(large,)), np.full(large, 4, np.uint8))
        flight.tensor(tensor(5, dtype="uint8", shape=(large,)), np.full(large, 5, np.uint8))
        later = flight.dump(tmp_path / "later", "these push the older step out")
    run = open_run(tmp_path / "run")
    assert [None if (kept := run.values(0, row)) is None else int(kept[0]) for row in range(4)] == [0, 1, None, None]
    assert dump.end is not None
    assert dump.end.missed[0] == MissedTensor(
        "the values of a tensor", "of one step, no more than 196.6 kB are held in memory", 2
    )
    assert open_run(tmp_path / "later").ranks[0].tensors["seq"].tolist() == [4, 5]
    assert later.end is not None
    assert MissedTensor("an older step", "more than 196.6 kB would have to be remembered", 1) in later.end.missed


# -- looking at steps --------------------------------------------------------------------------------------------------


def test_the_listener_is_given_each_step(info: RunInfo) -> None:
    seen: list[tuple[int, list[int], str]] = []
    bad = GOOD._replace(nan=2, inf=1)

    def look(rows: BufferedStep) -> None:
        assert rows.whole
        seen.append((rows.step, (rows.numbers("nan") + rows.numbers("inf")).tolist(), threading.current_thread().name))

    with flying(info, on_step=look) as flight:
        assert not flight.listener.was_shown(0)
        for step in range(3):
            record_step(flight, step, statistics=bad if step == 1 else GOOD)
            assert flight.listener.wait_until_shown(step, 60)
            assert flight.listener.was_shown(step)
        assert not flight.listener.wait_until_shown(3, 0.01)
    assert not flight.listener.wait_until_shown(3)  # it will never be
    name = "astray-writer-rank0"
    assert seen == [(0, [0, 0, 0], name), (1, [3, 3, 3], name), (2, [0, 0, 0], name)]


def test_a_step_reads_like_a_rank_of_a_run(tmp_path: Path, info: RunInfo) -> None:
    seen: list[RankRun] = []
    with flying(info, on_step=lambda rows: seen.append(RankRun(0, rows))) as flight:
        record_step(flight, 0, values=True)
        flight.flush()
        flight.dump(tmp_path / "run", "to compare")
        (step,), run = seen, open_run(tmp_path / "run")
        written = run.ranks[0]
        places = {"blob_file": None, "blob_offset": None, "blob_bytes": None}
        assert as_lists(step.calls) == as_lists(written.calls)
        assert as_lists(step.tensors, **places) == as_lists(written.tensors, **places)
        assert step.call_rows.tolist() == [0, 1, 2]
        assert step.stack(100) == [Frame("train.py", 3, "<module>", "train()")]
        assert step.values(0) is None
        assert step.values(1).tolist() == written.values(1).tolist()
        assert step.problems == []


def test_a_listener_that_fails_is_noted(tmp_path: Path, info: RunInfo) -> None:
    def look(rows: BufferedStep) -> None:
        raise KeyError(rows.step)

    with flying(info, on_step=look) as flight:
        record_step(flight, 0)
        record_step(flight, 1)
        assert flight.listener.wait_until_shown(1, 60)
        dump = flight.dump(tmp_path / "run", "all the same")
    assert dump.end is not None
    assert dump.end.missed == [
        MissedTensor("the check of a step", "KeyError: 0", 1),
        MissedTensor("the check of a step", "KeyError: 1", 1),
    ]
    assert open_run(tmp_path / "run").steps == [0, 1]


def test_a_recorder_that_remembers_nothing_still_shows_each_step(tmp_path: Path, info: RunInfo) -> None:
    seen: list[int] = []
    with flying(info, remember=0, on_step=lambda rows: seen.append(len(rows.numbers("nan")))) as flight:
        record_step(flight, 0)
        record_step(flight, 1)
        assert flight.listener.wait_until_shown(1, 60)
        assert flight.nbytes == 0
        dump = flight.dump(tmp_path / "run", "nothing")
    assert seen == [3, 3]
    assert dump.end is not None
    assert (dump.end.tensors, dump.end.missed) == (0, [])


def test_what_is_left_at_the_end_is_shown(info: RunInfo, call: MakeCall) -> None:
    seen: list[tuple[int, bool]] = []
    with flying(info, on_step=lambda rows: seen.append((rows.step, rows.whole))) as flight:
        record_step(flight, 0)
        flight.call(call(3, step=1))
    assert seen == [(0, True), (1, False)]


def test_a_step_measured_by_a_device_rests_until_the_next_is_over(
    info: RunInfo, tensor: MakeTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astray.store.writing.record_queue.STEP_SECONDS", 3600.0)
    deferred, seen = Tickets(), []
    with flying(info, deferred=deferred, on_step=lambda rows: seen.append(rows.step)) as flight:
        for step in range(2):
            flight.tensor_row(tuple(tensor(step, statistics=deferred.ticket(), fingerprint=None)))
            flight.step_done()
            assert not flight.listener.wait_until_shown(step, 0.05)
            assert flight.listener.wait_until_shown(step - 1, 60)
        flight.flush()  # a flush forces it
        assert seen == [0, 1]


def test_a_step_measured_by_a_device_does_not_rest_for_long(info: RunInfo, tensor: MakeTensor) -> None:
    deferred = Tickets()
    with flying(info, deferred=deferred, on_step=lambda rows: None) as flight:
        flight.tensor_row(tuple(tensor(0, statistics=deferred.ticket(), fingerprint=None)))
        flight.step_done()
        assert flight.listener.wait_until_shown(0, 60)


@pytest.mark.usefixtures("rows_kept")
def test_late_measurements_are_there_for_the_listener(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    deferred = Tickets()
    seen: list[list[int]] = []
    with flying(info, deferred=deferred, on_step=lambda rows: seen.append(rows.numbers("nan").tolist())) as flight:
        for step in range(3):
            for seq in (2 * step, 2 * step + 1):
                flight.tensor_row(tuple(tensor(seq, statistics=deferred.ticket(), fingerprint=None)))
            flight.tensor(tensor(2 * step))
            flight.step_done()
        assert flight.listener.wait_until_shown(2, 60)
        assert seen == [[1, 2, 0], [3, 4, 0], [5, 6, 0]]
        flight.tensor_row(tuple(tensor(6, statistics=deferred.ticket(), fingerprint=None)))
        assert flight.dump(tmp_path / "run", "late").failure is None
        deferred.stuck = True
        flight.tensor_row(tuple(tensor(6, statistics=deferred.ticket(), fingerprint=None)))
        dump = flight.dump(tmp_path / "stuck", "a graph is being captured")
    tensors = open_run(tmp_path / "run").ranks[0].tensors
    assert tensors["nan"].tolist() == [1, 2, 0, 3, 4, 0, 5, 6, 0, 7]
    assert tensors["fingerprint"].tolist()[:2] == [1, 2]
    assert dump.end is not None
    assert MissedTensor("a row", "its measurement had not been sent for", 1) in dump.end.missed
    assert len(open_run(tmp_path / "stuck").ranks[0].tensors) == 10
    assert seen[3:] == [[7, 8]]


# -- values ------------------------------------------------------------------------------------------------------------


class Device:
    """A source that gives its bytes in two pieces, the second only after a while; or fails before that."""

    held = 4

    def __init__(self, data: bytes, fails: bool = False) -> None:
        self.nbytes = len(data)
        self.calls: list[str] = []
        self._data, self._fails = memoryview(data), fails

    def pieces(self) -> Iterator[BytePiece | None]:
        yield self._piece(self._data[:3])
        yield None
        if self._fails:
            raise RuntimeError("the device is gone")
        yield self._piece(self._data[3:])

    def _piece(self, data: memoryview) -> BytePiece:
        return BytePiece(data, lambda: self.calls.append("ready"), lambda: self.calls.append("release"))

    def finish(self, on_piece: Callable[[], None]) -> None:
        on_piece()

    def release(self) -> None:
        self.calls.append("done")


def test_values_of_every_make_are_held_and_written(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    with flying(info, remember=2) as flight:
        whole, broken = Device(b"abcdefgh"), Device(b"12345678", fails=True)
        small, large = flight.take_buffer(8), flight.take_buffer(1 << 17)
        small.array[:] = 7
        large.array[:] = 9
        row = tensor(0, dtype="uint8", shape=(8,))
        shared = flight.values(whole, "0.output.0", "uint8", (8,))
        for seq, values in enumerate((shared, broken, small, b"ABCDEFGH", shared)):
            flight.tensor(row._replace(seq=seq), values)
        flight.tensor(tensor(5, dtype="uint8", shape=(1 << 17,)), large)
        flight.tensor(tensor(6, dtype="uint8", shape=(100,)), np.arange(4, dtype=np.uint8), sampled=4)
        flight.tensor(tensor(7, dtype="uint8", shape=(4, 3)), np.arange(6, dtype=np.uint8), part="1:3")
        flight.step_done()
        for attempt in ("a", "b"):
            assert flight.dump(tmp_path / attempt, "values").failure is None
    for attempt in ("a", "b"):
        run = open_run(tmp_path / attempt)
        kept = [run.values(0, row) for row in range(8)]
        assert [None if found is None else found.tobytes()[:8] for found in kept] == [
            b"abcdefgh", None, b"\7" * 8, b"ABCDEFGH", b"abcdefgh", b"\t" * 8, bytes(range(4)), bytes(range(6)),
        ]  # fmt: skip
        assert run.ranks[0].tensors["part"].tolist() == [None] * 7 + ["1:3"]
        assert run.ranks[0].tensors["sampled"].tolist() == [-1] * 6 + [4, -1]
        assert run.ranks[0].end.values == 6
        with safe_open(tmp_path / attempt / "rank0" / "values-00000.safetensors", "np") as file:
            assert file.get_tensor("0.output.0").tobytes() == b"abcdefgh"
        assert [missed.why for missed in run.ranks[0].end.missed] == [
            "RuntimeError: the device is gone", "they went with an older step, or are not here yet",
        ]  # fmt: skip
    assert whole.calls == ["ready", "release", "ready", "release", "done"]
    assert broken.calls == ["ready", "release", "done"]


def test_memory_of_steps_that_went_is_used_again(info: RunInfo, tensor: MakeTensor) -> None:
    size = 1 << 17
    with flying(info, remember=1) as flight:
        for seq in range(4):
            buffer = flight.take_buffer(size)
            buffer.array[:] = seq
            flight.tensor(tensor(seq, dtype="uint8", shape=(size,)), buffer)
            flight.step_done()
            flight.flush()
            assert size < flight.nbytes < 2 * size
        used = {buffer.array.ctypes.data for buffer in (flight.take_buffer(size), flight.take_buffer(size))}
        assert buffer.array.ctypes.data not in used
    flight.forget()
    assert flight.nbytes == 0


# -- threads, ends, ranks ----------------------------------------------------------------------------------------------


def test_threads_hand_over_rows_at_once(tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor) -> None:
    def work(start: int) -> None:
        for seq in range(start, start + 500):
            flight.call(call(seq))
            flight.tensor(tensor(seq, dtype="int64", shape=(50,)), np.full(50, seq))
            flight.missed("x", "y")

    with flying(info, queue_bytes=1 << 16, remember=1000) as flight:
        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            flight.step_done()
            time.sleep(0.005)
        dump = flight.dump(tmp_path / "run", "threads")
    assert dump.failure is None
    rank = open_run(tmp_path / "run").ranks[0]
    sequence = rank.tensors["seq"]
    assert len(sequence) == len(rank.calls) == 4000
    for start in range(0, 8000, 1000):  # each thread's own order is kept
        assert sequence[sequence // 1000 == start // 1000].tolist() == list(range(start, start + 500))
    assert all((rank.values(row) == sequence[row]).all() for row in range(4000))
    assert MissedTensor("x", "y", 4000) in rank.end.missed


def test_a_listener_may_dump(tmp_path: Path, info: RunInfo) -> None:
    def look(rows: BufferedStep) -> None:
        if rows.step == 3:
            dumps.append(flight.dump(tmp_path / "run", "step 3"))

    dumps: list[Snapshot] = []
    with flying(info, remember=2, on_step=look) as flight:
        for step in range(6):
            record_step(flight, step)
    assert [dump.failure for dump in dumps] == [None]
    run = open_run(tmp_path / "run")
    assert run.steps == [2, 3]
    assert run.ranks[0].end.missed == []


def test_a_dump_is_possible_after_the_end(tmp_path: Path, info: RunInfo) -> None:
    flight = flying(info)
    record_step(flight, 0)
    with pytest.raises(ValueError, match="NaN"), flight:
        raise ValueError("loss is NaN")
    record_step(flight, 1)  # nothing takes it any more
    assert flight.dump(tmp_path / "run", "an exception").failure is None
    run = open_run(tmp_path / "run")
    assert (run.steps, run.complete) == ([0], True)
    assert run.problems == [f"The program recorded in {tmp_path / 'run' / 'rank0'} ended with ValueError: loss is NaN."]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("astray-writer")]


def test_a_dump_that_takes_too_long_is_written_later(tmp_path: Path, info: RunInfo) -> None:
    busy, free = threading.Event(), threading.Event()

    def look(rows: BufferedStep) -> None:
        busy.set()
        free.wait()

    with flying(info, on_step=look) as flight:
        record_step(flight, 0)
        busy.wait()
        dump = flight.dump(tmp_path / "run", "in a hurry", timeout=0.01)
        free.set()
    assert dump.failure == f"{tmp_path / 'run'} was not written within 0.01 s. It will be as soon as it can."
    assert open_run(tmp_path / "run").complete


def test_a_thread_that_a_signal_has_interrupted_may_hold_any_lock(
    tmp_path: Path, info: RunInfo, call: MakeCall
) -> None:
    with flying(info) as flight:
        record_step(flight, 0, values=True)
        flight.call(call(3, step=1))
        with flight._lock, flight._segments._cutting, flight._queue._room:  # where the handler of a signal may find us
            dump = flight.dump(tmp_path / "a", "SIGTERM")
        later = flight.dump(tmp_path / "b", "after the handler")
    assert dump.failure is None
    assert dump.end is not None
    assert dump.end.missed == [
        MissedTensor("the rows since the last step", "a signal came while they were handed over", 1)
    ]
    assert open_run(tmp_path / "a").steps == [0]
    assert later.failure is None
    assert open_run(tmp_path / "b").steps == [0, 1]


def test_a_bell_keeps_one_ring() -> None:
    wake = WakeEvent()
    assert not wake.wait(0)
    wake.set()
    wake.set()
    assert wake.wait()
    assert not wake.wait(0)


def test_values_are_written_where_no_thread_can_be_started(
    tmp_path: Path, info: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flying(info) as flight:
        record_step(flight, 0, values=True)

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(disk_module.threading, "Thread", Refused)
    assert flight.dump(tmp_path / "run", "the interpreter ends").failure is None
    assert open_run(tmp_path / "run").values(0, 1).tolist() == [[1] * 3] * 2


@pytest.mark.parametrize(
    ("way", "why", "problem"),
    [
        ("exit handler after", "the program ended", None),
        ("exit handler before", "the program ended", "ended without closing the recording."),
        ("exception hook", "ValueError: loss is NaN", "ended with ValueError: loss is NaN."),
        ("SIGTERM", "SIGTERM", None),
    ],
)
def test_from_where_it_may_be_called(
    tmp_path: Path, program: Callable[..., subprocess.Popen[str]], way: str, why: str, problem: str | None
) -> None:
    with program("flight.py", tmp_path / "run", way) as process:
        assert process.communicate(timeout=60)[0] == "None\n"
    run = open_run(tmp_path / "run")
    assert (run.steps, run.complete) == ([0, 1, 2, 3], True)
    assert run.ranks[0].end.why == why
    assert all((run.values(0, row) == row).all() for row in range(4))
    assert [text.endswith(str(problem)) for text in run.problems] == [True] * (problem is not None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_forked_children_write_nothing(tmp_path: Path, run_program: Callable[..., str]) -> None:
    child, parent = run_program("flight.py", tmp_path / "run", "forks").splitlines()
    assert child == f"{tmp_path / 'run'} was not written: this is a forked child, and the rows are its parent's."
    assert parent == "None"
    run = open_run(tmp_path / "run")
    assert (run.steps, run.complete, run.ranks[0].end.why) == ([0, 1, 2, 3, 4], True, "the parent")


def test_a_full_disk_is_a_sentence_and_the_program_goes_on(tmp_path: Path, run_program: Callable[..., str]) -> None:
    failure, again = run_program("flight.py", tmp_path / "run", "full disk").splitlines()
    assert failure.startswith(f"Recording into {tmp_path / 'run' / 'rank0'} stopped: File too large: files may have ")
    assert "(raise that with `ulimit -f unlimited`). The program goes on" in failure
    assert again == "None"
    run = open_run(tmp_path / "run")
    assert (run.complete, run.problems[0]) == (False, failure)
    assert open_run(tmp_path / "run-again").steps == list(range(1, 65))


@pytest.mark.parametrize("attempt", range(6))
def test_killed_while_it_writes(tmp_path: Path, program: Callable[..., subprocess.Popen[str]], attempt: int) -> None:
    with program("flight.py", tmp_path, "endless") as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0, 0.2))
        process.kill()
        last = max(int(line) for line in ["0\n", *process.stdout] if line.endswith("\n"))
    for number in range(last):
        assert open_run(tmp_path / str(number)).complete
    if not (tmp_path / str(last) / "run.json").exists():
        return  # it had not begun
    rank = open_run(tmp_path / str(last)).ranks.get(0)
    for row in range(0 if rank is None else len(rank.tensors)):
        assert (rank.values(row) == rank.tensors["seq"][row]).all()


def test_ranks_write_one_run_in_any_order(tmp_path: Path) -> None:
    info = RunInfo.of_process(world_size=2)
    one, zero = (FlightRecorder("unused", rank, info=info) for rank in (1, 0))
    for flight in (one, zero):
        record_step(flight, 0)
    assert one.dump(tmp_path / "run", "a NaN on rank 1").failure is None
    alone = open_run(tmp_path / "run")
    assert alone.problems == [f"Rank 0 of 2 is missing: {tmp_path / 'run' / 'rank0'} does not exist."]
    assert zero.dump(tmp_path / "run", "rank 1 said so").failure is None
    one.close()
    zero.close()
    run = open_run(tmp_path / "run")
    assert (run.complete, run.problems, list(run.ranks)) == (True, [], [0, 1])
    assert run.info.flight is not None
    assert (run.info.flight.why, run.info.flight.rank) == ("a NaN on rank 1", 1)
    assert [rank.end.why for rank in run.ranks.values()] == ["rank 1 said so", "a NaN on rank 1"]


def test_ranks_write_one_run_at_the_same_moment(tmp_path: Path) -> None:
    info = RunInfo.of_process(world_size=8)
    flights = [FlightRecorder("unused", rank, info=info) for rank in range(8)]
    for flight in flights:
        record_step(flight, 0)
    for attempt in range(10):
        with ThreadPoolExecutor(8) as ranks:
            dumps = list(ranks.map(FlightRecorder.dump, flights, [tmp_path / str(attempt)] * 8, ["now"] * 8))
        assert [dump.failure for dump in dumps] == [None] * 8
        run = open_run(tmp_path / str(attempt))
        assert (run.complete, run.problems) == (True, [])
        assert sorted(path.name for path in run.path.iterdir()) == [*(f"rank{rank}" for rank in range(8)), "run.json"]
    for flight in flights:
        flight.close()


def test_a_run_of_another_launch_is_left_alone(tmp_path: Path, info: RunInfo) -> None:
    earlier = msgspec.structs.replace(info, world_size=2)
    later = msgspec.structs.replace(earlier, created="9999-01-01T00:00:00+00:00")
    RunWriter(tmp_path / "ordinary", info=earlier).close()
    with FlightRecorder("unused", 0, info=earlier) as flight:
        assert flight.dump(tmp_path / "flight", "long ago").failure is None
    with FlightRecorder("unused", 1, info=later) as flight:
        for name in ("ordinary", "flight"):
            failure = flight.dump(tmp_path / name, "now").failure
            assert failure is not None
            assert failure.startswith(f"{tmp_path / name} already holds a run")
            assert not (tmp_path / name / "rank1").exists()
        assert "ValueError: embedded null byte" in str(flight.dump("a\0b", "now").failure)
        (tmp_path / "else").mkdir()
        (tmp_path / "else" / "notes.txt").touch()
        assert "holds no run (notes.txt)" in str(flight.dump(tmp_path / "else", "now").failure)
