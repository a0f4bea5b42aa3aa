"""The queues between the program and the writer: nothing is lost, nor taken before what it refers to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from astray.store.deferred import TensorBytes
from astray.store.run_format.rows import Row, RowBuffer
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


def numbers(rows: RowBuffer) -> list[int]:
    """The first cell of each row."""
    _, (_, found) = rows.encode(0, 0, len(rows), 0) or (0, (b"", b""))
    return np.frombuffer(found, np.int64).tolist()


def values(size: int = 8) -> TensorBytes:
    return TensorBytes(np.zeros(size, np.uint8).data, "v", "uint8", (size,))


@pytest.mark.usefixtures("_hasty")
def test_threads_put_while_one_takes() -> None:
    queue = RecordQueue(1 << 30)
    count, threads = 3000, 4

    def program(thread: int) -> None:
        for number in range(thread * count, (thread + 1) * count):
            queue.put(queue.stacks, Stack(number, []))
            queue.put_row(queue.calls, (number, *CALL))
            queue.put_values(values())
            queue.put_row(queue.tensors, (number, *TENSOR))
            if number % 100 == 0:
                queue.put_flush()

    running = [threading.Thread(target=program, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    stacks: set[int] = set()
    calls: set[int] = set()
    tensors: list[int] = []
    taken_values = 0
    while len(tensors) < count * threads:
        rows = queue.take()
        stacks |= {stack.id for stack in rows.stacks}
        new_calls, new_tensors = numbers(rows.calls), numbers(rows.tensors)
        calls |= {*new_calls}
        tensors += new_tensors
        taken_values += sum(map(len, queue.take_values()))
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
    assert queue.flushes


def test_a_flush_is_answered_for_what_was_put_before_it() -> None:
    queue = RecordQueue(1 << 20)
    queue.put_row(queue.calls, (1, *CALL))
    flush = queue.put_flush()
    assert not queue.flushes
    assert numbers(queue.take().calls) == [1]
    later = queue.put_flush()
    assert queue.flushes
    queue.complete_flushes()
    assert (flush.is_set(), later.is_set(), queue.flushes) == (True, False, False)


def test_values_are_taken_in_groups() -> None:
    queue = RecordQueue(1 << 30)
    for size in (20 << 20, 20 << 20, 1, 40 << 20):
        queue.put_values(values(size))
    groups = queue.take_values()
    assert [v.size for v in next(groups)] == [20 << 20, 20 << 20]
    queue.put_values(values(5))
    assert [[v.size for v in group] for group in groups] == [[1, 40 << 20]]
    assert [[v.size for v in group] for group in queue.take_values()] == [[5]]


def test_what_is_dropped_lets_everybody_go() -> None:
    queue = RecordQueue(100)
    waiting, late = values(80), values(80)
    queue.put_values(waiting)
    queue.put_row(queue.tensors, (0, *TENSOR))
    flush = queue.put_flush()
    blocked = threading.Thread(target=queue.put_values, args=(late,))
    blocked.start()
    queue.drop()
    blocked.join(timeout=30)
    assert not blocked.is_alive()
    assert flush.is_set()
    assert waiting.resolved
    assert late.resolved
    assert tuple(map(len, queue.take())) == (0, 0, 0)
