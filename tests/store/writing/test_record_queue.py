"""The lanes between the program and the writer: nothing is lost, nor taken before what it refers to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from astray.store.deferred import TensorBytes
from astray.store.run_format.rows import Row, Rows
from astray.store.writing.rank_files import Stack
from astray.store.writing.record_queue import RecordQueue


@pytest.fixture
def _hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


CALL: Row = (0, 0, "module", "fc", "Linear", 0, "forward", None, None, None, False)
TENSOR: Row = ("input", "0", "float32", (2,), (1,), "cpu", False, None, None, None, None, None, None)


def numbers(rows: Rows) -> list[int]:
    """The first cell of each row."""
    _, (_, found) = rows.encode(0, 0, len(rows), 0) or (0, (b"", b""))
    return np.frombuffer(found, np.int64).tolist()


def values(size: int = 8) -> TensorBytes:
    return TensorBytes(np.zeros(size, np.uint8).data, "v", "uint8", (size,))


@pytest.mark.usefixtures("_hasty")
def test_threads_put_while_one_takes() -> None:
    backlog = RecordQueue(1 << 30)
    count, threads = 3000, 4

    def program(thread: int) -> None:
        for number in range(thread * count, (thread + 1) * count):
            backlog.put(backlog.stacks, Stack(number, []))
            backlog.put_row(backlog.calls, (number, *CALL))
            backlog.put_values(values())
            backlog.put_row(backlog.tensors, (number, *TENSOR))
            if number % 100 == 0:
                backlog.put_flush()

    running = [threading.Thread(target=program, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    stacks: set[int] = set()
    calls: set[int] = set()
    tensors: list[int] = []
    taken_values = 0
    while len(tensors) < count * threads:
        rows = backlog.take()
        stacks |= {stack.id for stack in rows.stacks}
        new_calls, new_tensors = numbers(rows.calls), numbers(rows.tensors)
        calls |= {*new_calls}
        tensors += new_tensors
        taken_values += sum(map(len, backlog.take_values()))
        assert len(stacks) >= len(calls) >= len(tensors) <= taken_values
        assert {*new_calls} <= stacks
        assert {*new_tensors} <= calls
    for thread in running:
        thread.join()
    assert sorted(tensors) == list(range(count * threads))
    for thread in range(threads):  # each thread's own order is kept
        own = [number for number in tensors if number // count == thread]
        assert own == sorted(own)
    assert taken_values == count * threads
    assert backlog.flushes


def test_a_flush_is_answered_for_what_was_put_before_it() -> None:
    backlog = RecordQueue(1 << 20)
    backlog.put_row(backlog.calls, (1, *CALL))
    flush = backlog.put_flush()
    assert not backlog.flushes
    assert numbers(backlog.take().calls) == [1]
    later = backlog.put_flush()
    assert backlog.flushes
    backlog.complete_flushes()
    assert (flush.is_set(), later.is_set(), backlog.flushes) == (True, False, False)


def test_values_are_taken_in_groups() -> None:
    backlog = RecordQueue(1 << 30)
    for size in (20 << 20, 20 << 20, 1, 40 << 20):
        backlog.put_values(values(size))
    groups = backlog.take_values()
    assert [v.size for v in next(groups)] == [20 << 20, 20 << 20]
    backlog.put_values(values(5))
    assert [[v.size for v in group] for group in groups] == [[1, 40 << 20]]
    assert [[v.size for v in group] for group in backlog.take_values()] == [[5]]


def test_what_is_dropped_lets_everybody_go() -> None:
    backlog = RecordQueue(100)
    waiting, late = values(80), values(80)
    backlog.put_values(waiting)
    backlog.put_row(backlog.tensors, (0, *TENSOR))
    flush = backlog.put_flush()
    blocked = threading.Thread(target=backlog.put_values, args=(late,))
    blocked.start()
    backlog.drop()
    blocked.join(timeout=30)
    assert not blocked.is_alive()
    assert flush.is_set()
    assert waiting.resolved
    assert late.resolved
    assert tuple(map(len, backlog.take())) == (0, 0, 0)
