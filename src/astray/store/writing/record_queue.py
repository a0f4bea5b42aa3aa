"""What waits to be written: queues between the program's threads and the writer's, bounded in bytes and in rows.

Appending costs a tenth of a microsecond as long as there is room. When there is none the caller waits, and the time is
added up. Each kind of record has a queue of its own, so that thousands of rows are taken at once. Nothing is taken
before what it refers to: the writer takes in the reverse of the order in which the program puts. In between its thread
waits for a `WakeEvent`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sized
from typing import NamedTuple, TypeVar

from astray.records import Setup
from astray.store.run_format.encoder import MOST_ROWS
from astray.store.run_format.rows import Row, Rows, call_rows, tensor_rows
from astray.store.run_format.tensor_values import TensorBytes
from astray.store.writing.rank_files import Stack

BATCH_ROWS = MOST_ROWS  # so many are written at once
QUEUE_ROWS = 4 * BATCH_ROWS
GROUP_BYTES = 32 << 20  # bytes that get their slots in shards at once
LOOK_SECONDS = 1.0  # how often a caller that waits for room checks that the writer's thread is alive
WAKE_BYTES = 1 << 20  # fewer bytes do not wake the writer: one update of a shard's header serves more of them

Record = TypeVar("Record")


class QueuedRows(NamedTuple):
    """Rows that were taken. What they refer to is among them, was taken before, or is values."""

    stacks: list[Stack]
    calls: Rows
    tensors: Rows


class RecordQueue:
    """The queues. The program's threads put; the writer's thread takes, answers flushes and finally drops the rest."""

    def __init__(self, most_bytes: int) -> None:
        self.wake = WakeEvent()  # there is something to write now
        self.is_served: Callable[[], bool] = lambda: True  # whether the thread that takes is alive
        self.waited_seconds = 0.0
        self.stacks: list[Stack] = []
        self.setup: list[Setup] = []
        self.calls = call_rows()
        self.tensors = tensor_rows()
        self._values: list[TensorBytes] = []
        self._asked: list[threading.Event] = []  # flushes not taken yet
        self._taken: list[threading.Event] = []  # flushes, to be set once what came before them is written
        self._most_bytes = most_bytes
        self._held = 0  # bytes of memory of the values that are not written
        self._fresh = 0  # bytes of the values put since they were last taken
        self._open = True
        self._room = threading.Condition()

    def put(self, lane: list[Record], record: Record) -> None:
        """Append to one of the lists; wait when it is too long."""
        lane.append(record)
        if len(lane) >= BATCH_ROWS:
            self.crowded(lane)

    def put_row(self, lane: Rows, row: Row) -> None:
        """Append a row; wait when there are too many."""
        lane.append(row)
        if len(lane) >= BATCH_ROWS:
            self.crowded(lane)

    def crowded(self, lane: Sized) -> None:
        """Wake the writer, since this queue holds a batch; wait when it is too long."""
        self.wake.set()
        if len(lane) >= QUEUE_ROWS:
            self.wait_for(lambda: len(lane) < QUEUE_ROWS)

    def wait_for(self, has_room: Callable[[], bool]) -> None:
        """Wait until `has_room` is true. It is checked whenever `make_room` is called."""
        if not has_room():
            with self._room:
                self._wait(has_room)

    def put_values(self, values: TensorBytes) -> None:
        """Append values; wait while they are too many bytes. A tensor larger than the limit is admitted alone."""
        size = values.held
        with self._room:
            if self._held and self._held + size > self._most_bytes:
                self.wake.set()
                self._wait(lambda: not self._held or self._held + size <= self._most_bytes)
            self._held += size
            self._fresh += values.size
            is_open = self._open
        if not is_open:
            values.settle(None)
            return
        self.put(self._values, values)
        if self._fresh >= WAKE_BYTES:
            self.wake.set()

    def written(self, size: int) -> None:
        """Values of so many bytes of memory are written."""
        if size:
            with self._room:
                self._held -= size
                self._room.notify_all()

    def waited(self, seconds: float) -> None:
        """Add seconds in which the program waited for another reason of this kind."""
        with self._room:
            self.waited_seconds += seconds

    def put_flush(self) -> threading.Event:
        """Append an event, which is set once everything before it is written."""
        flush = threading.Event()
        self._asked.append(flush)
        self.wake.set()
        return flush

    @property
    def wants_rows_taken(self) -> bool:
        """Whether rows should be taken now: there are many, or a flush waits for them to be written."""
        return bool(self._asked) or max(len(self.calls), len(self.tensors), len(self.stacks)) >= BATCH_ROWS

    @property
    def flushes(self) -> bool:
        """Whether a flush waits for what was taken to be written."""
        return bool(self._taken)

    def take(self) -> QueuedRows:
        """Take all rows that are there now, and the flushes that were asked for behind them."""
        self.hear_flushes()
        return self.take_rows()

    def hear_flushes(self) -> None:
        """Take the flushes that were asked for so far: `answer` will set them."""
        self._taken += _take(self._asked)

    def take_rows(self) -> QueuedRows:
        """Take all rows that are there now."""
        tensors, calls, stacks = self.tensors.take(), self.calls.take(), _take(self.stacks)
        return QueuedRows(stacks, calls, tensors)

    def take_setup(self) -> list[Setup]:
        """Take the program's settings: all that were put before the rows taken so far are among them, or were taken."""
        return _take(self.setup)

    def take_values(self) -> Iterator[list[TensorBytes]]:
        """Take the values that are there now, among them those of the rows that were taken, a group at a time."""
        left, self._fresh = len(self._values), 0
        while left:
            size = count = 0
            while count < left and size < GROUP_BYTES:
                size += self._values[count].size
                count += 1
            left -= count
            yield _take(self._values, count)

    def make_room(self, size: int = 0, patience: float = -1) -> bool:
        """Release the threads that wait for room, after values of `size` bytes were taken.

        False when that was not possible within `patience` seconds: a thread that a signal has interrupted may hold the
        lock, and its handler may wait for the caller.
        """
        if not self._room.acquire(timeout=patience):
            return False
        self._held -= size
        self._room.notify_all()
        self._room.release()
        return True

    def answer(self) -> None:
        """Set the flushes that were taken: they are done."""
        for flush in _take(self._taken):
            flush.set()

    def drop(self) -> None:
        """Drop what is left, and release every thread that waits."""
        with self._room:
            self._open = False
            self._held = 0
            self._room.notify_all()
        self.take()
        for values in _take(self._values):
            values.settle(None)
        self.answer()

    def _wait(self, has_room: Callable[[], bool]) -> None:
        start = time.perf_counter()
        # Checked every LOOK_SECONDS: a thread that has died for want of memory may not have been able to say so.
        while not self._room.wait_for(lambda: has_room() or not self._open, LOOK_SECONDS) and self.is_served():
            pass
        self.waited_seconds += time.perf_counter() - start


def _take(lane: list[Record], count: int | None = None) -> list[Record]:
    """Take the first of a list. Other threads may append meanwhile: each line is one step of the interpreter."""
    count = len(lane) if count is None else count
    taken = lane[:count]
    del lane[:count]
    return taken


class WakeEvent:
    """A `threading.Event` for one waiting thread, which waiting resets, and which a signal handler may set.

    An event has a lock inside: a signal handler that sets it while its own thread is setting it would deadlock. This is
    only a lock, free while the event is set.
    """

    __slots__ = ("_bell",)

    def __init__(self) -> None:
        self._bell = threading.Lock()
        self._bell.acquire()

    def set(self) -> None:
        """Wake the thread that waits."""
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # another thread released it first
                self._bell.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or was since the last wait, and reset it; False after `timeout` seconds."""
        return self._bell.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
