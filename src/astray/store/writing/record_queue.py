"""Queues between the program's threads and the writer's, bounded in bytes and in rows.

Appending costs a tenth of a microsecond as long as there is room. When there is none the caller waits, and the time is
added up. Each kind of record has a queue of its own, so that thousands of rows are taken at once. Nothing is taken
before what it refers to: the writer takes in the reverse of the order in which the program puts. In between its thread
waits for a `WakeEvent`.

`StepSegments` cuts what was taken where steps end: a segment never has rows of two steps. The program's thread cuts
when a step is over, the recorder's thread whenever there are many rows or a flush waits. Segments are processed in
their order, each once its measurements are due.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import NamedTuple, TypeVar

import numpy as np

from astray.records import Setup
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.run_format.encoder import MOST_ROWS
from astray.store.run_format.rows import TICKET, Row, RowBuffer, call_rows, tensor_rows
from astray.store.writing.rank_files import Stack

BATCH_ROWS = MOST_ROWS  # so many are written at once
QUEUE_ROWS = 4 * BATCH_ROWS
GROUP_BYTES = 32 << 20  # bytes that get their slots in shards at once
POLL_SECONDS = 1.0  # how often a caller that waits for room checks that the writer's thread is alive
WAKE_BYTES = 1 << 20  # fewer bytes do not wake the writer: one update of a shard's header serves more of them

IDLE_SECONDS = 0.5  # the longest that rows wait
STEP_SECONDS = 0.05  # the longest that rows of a step that is over wait
"""Why they wait at all: a device's measurements arrive just when the program, which has waited for the device too,
begins its next step. It would then wait for the interpreter, and the device for it; a little later the device has work
enough. And a batch of rows for every step of a fast loop is too small."""
HELD_SECONDS = 1.0  # the longest wait for the program to fetch measurements: it may be stuck

Record = TypeVar("Record")


class QueuedRows(NamedTuple):
    """Rows that were taken. What they refer to is among them, was taken before, or is values."""

    stacks: list[Stack]
    calls: RowBuffer
    tensors: RowBuffer


class RecordQueue:
    """The queues. The program's threads put; the writer's thread takes, answers flushes and finally drops the rest."""

    def __init__(self, most_bytes: int) -> None:
        self.wake = WakeEvent()  # there is something to write now
        self.is_consumer_alive: Callable[[], bool] = lambda: True  # whether the thread that takes is alive
        self.waited_seconds = 0.0
        self.stacks: list[Stack] = []
        self.setup: list[Setup] = []
        self.calls = call_rows()
        self.tensors = tensor_rows()
        self._values: list[TensorBytes] = []
        self._new_flushes: list[threading.Event] = []  # flushes not taken yet
        self._taken_flushes: list[threading.Event] = []  # flushes, to be set once what came before them is written
        self._most_bytes = most_bytes
        self._held = 0  # bytes of memory of the values that are not written
        self._new_bytes = 0  # bytes of the values put since they were last taken
        self._open = True
        self._room = threading.Condition()

    def put(self, records: list[Record], record: Record) -> None:
        """Append to one of the lists; wait when it is too long."""
        records.append(record)
        if len(records) >= BATCH_ROWS:
            self.batch_ready(records)

    def put_row(self, rows: RowBuffer, row: Row) -> None:
        """Append a row; wait when there are too many."""
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            self.batch_ready(rows)

    def batch_ready(self, records: Sized) -> None:
        """Wake the writer, since one of the queues holds a batch; wait when it is too long."""
        self.wake.set()
        if len(records) >= QUEUE_ROWS:
            self.wait_for(lambda: len(records) < QUEUE_ROWS)

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
            self._new_bytes += values.size
            is_open = self._open
        if not is_open:
            values.resolve(None)
            return
        self.put(self._values, values)
        if self._new_bytes >= WAKE_BYTES:
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
        self._new_flushes.append(flush)
        self.wake.set()
        return flush

    @property
    def wants_rows_taken(self) -> bool:
        """Whether rows should be taken now: there are many, or a flush waits for them to be written."""
        return bool(self._new_flushes) or max(len(self.calls), len(self.tensors), len(self.stacks)) >= BATCH_ROWS

    @property
    def flushes(self) -> bool:
        """Whether a flush waits for what was taken to be written."""
        return bool(self._taken_flushes)

    def take(self) -> QueuedRows:
        """Take all queued rows, and the flushes that were put after them."""
        self.take_flushes()
        return self.take_rows()

    def take_flushes(self) -> None:
        """Take the flushes that were put so far: `complete_flushes` will set them."""
        self._taken_flushes += _take(self._new_flushes)

    def take_rows(self) -> QueuedRows:
        """Take all queued rows."""
        tensors, calls, stacks = self.tensors.take(), self.calls.take(), _take(self.stacks)
        return QueuedRows(stacks, calls, tensors)

    def take_setup(self) -> list[Setup]:
        """Take the program's settings: all that were put before the rows taken so far are among them, or were taken."""
        return _take(self.setup)

    def take_values(self) -> Iterator[list[TensorBytes]]:
        """Take the queued values, among them those of the rows that were taken, a group at a time."""
        left, self._new_bytes = len(self._values), 0
        while left:
            size = count = 0
            while count < left and size < GROUP_BYTES:
                size += self._values[count].size
                count += 1
            left -= count
            yield _take(self._values, count)

    def make_room(self, size: int = 0, timeout: float = -1) -> bool:
        """Release the threads that wait for room, after values of `size` bytes were taken.

        False when that was not possible within `timeout` seconds: a thread that a signal has interrupted may hold the
        lock, and its handler may wait for the caller.
        """
        if not self._room.acquire(timeout=timeout):
            return False
        self._held -= size
        self._room.notify_all()
        self._room.release()
        return True

    def complete_flushes(self) -> None:
        """Set the flushes that were taken: they are done."""
        for flush in _take(self._taken_flushes):
            flush.set()

    def drop(self) -> None:
        """Drop what is left, and release every thread that waits."""
        with self._room:
            self._open = False
            self._held = 0
            self._room.notify_all()
        self.take()
        for values in _take(self._values):
            values.resolve(None)
        self.complete_flushes()

    def _wait(self, has_room: Callable[[], bool]) -> None:
        start = time.perf_counter()
        # Checked every POLL_SECONDS: a thread that has died for want of memory may not have been able to report it.
        while not self._room.wait_for(lambda: has_room() or not self._open, POLL_SECONDS) and self.is_consumer_alive():
            pass
        self.waited_seconds += time.perf_counter() - start


def _take(records: list[Record], count: int | None = None) -> list[Record]:
    """Take the first of a list. Other threads may append meanwhile: each line is one step of the interpreter."""
    count = len(records) if count is None else count
    taken = records[:count]
    del records[:count]
    return taken


class WakeEvent:
    """A `threading.Event` for one waiting thread, which waiting resets, and which a signal handler may set.

    An event has a lock inside: a signal handler that sets it while its own thread is setting it would deadlock. This is
    only a lock, free while the event is set.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits."""
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread released it first
                self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or was since the last wait, and reset it; False after `timeout` seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


# -- the queue, cut where steps end ------------------------------------------------------------------------------------


class StepSegment(NamedTuple):
    """Rows and values of one step that were taken at once. It may be the last of its step."""

    step: int
    rows: QueuedRows
    values: list[TensorBytes]  # still to be brought into memory
    owned: list[TensorBytes]  # in memory
    ends: bool
    time: float

    @property
    def size(self) -> int:
        """How many rows it has."""
        return len(self.rows.calls) + len(self.rows.tensors)


class StepSegments:
    """The segments that wait. Any thread may `cut`; the rest is for the recorder's thread.

    values: take the values too. `PerStep` sets it to False, since it writes them from the queue.
    """

    def __init__(self, queue: RecordQueue, deferred: DeferredMeasurements | None, *, values: bool = True) -> None:
        self.step = 0  # the step that is not over
        self._queue = queue
        self._deferred = deferred
        self._takes_values = values
        self._waiting: deque[StepSegment] = deque()
        self._cutting = threading.Lock()  # held while a segment is taken and appended, so that they keep their order
        self._rows_cut = self._rows_done = 0

    def __iter__(self) -> Iterator[StepSegment]:
        return iter(list(self._waiting))

    @property
    def has_room(self) -> bool:
        """Whether so few rows wait that the program may go on."""
        return self._rows_cut - self._rows_done < QUEUE_ROWS

    @property
    def rows_put(self) -> int:
        """How many rows the program has handed over so far, in segments or not."""
        return self._rows_cut + len(self._queue.calls) + len(self._queue.tensors)

    @property
    def rows_done(self) -> int:
        """How many of these are done."""
        return self._rows_done

    def cut(self, *, rows: bool, ends: bool = False, timeout: float = -1) -> bool:
        """Take the queued values, and with `rows` the rows, as a segment. Flushes are left in the queue.

        False when another thread was cutting for longer than `timeout` seconds, as for `RecordQueue.make_room`.
        """
        if not self._cutting.acquire(timeout=timeout):
            return False
        try:
            queued = self._queue.take_rows() if rows else QueuedRows([], call_rows(), tensor_rows())
            groups = self._queue.take_values() if self._takes_values else ()
            values = [each for group in groups for each in group]
            segment = StepSegment(self.step, queued, values, [], ends, time.monotonic())
            if segment.size or values or queued.stacks or ends:
                self._waiting.append(segment)
            self._rows_cut += segment.size
            self.step += ends
        finally:
            self._cutting.release()
        return True

    @property
    def idle_seconds(self) -> float:
        """Seconds until `next` should be called again, if nothing happens before."""
        return max(0.0, self._waiting[0].time + STEP_SECONDS - time.monotonic()) if self._should_rest else IDLE_SECONDS

    @property
    def _should_rest(self) -> bool:
        """Whether the only segment ends the step just over, with measurements of a device: see STEP_SECONDS."""
        if len(self._waiting) != 1 or self._deferred is None or not self._deferred.is_used:
            return False
        return self._waiting[0].ends and time.monotonic() - self._waiting[0].time < STEP_SECONDS

    def next(self, urgent: bool) -> StepSegment | None:
        """The first segment, if its measurements are due; when `urgent`, or after HELD_SECONDS, they are made due."""
        if not self._waiting or (self._should_rest and not urgent):
            return None
        segment = self._waiting[0]
        overdue = urgent or time.monotonic() - segment.time >= HELD_SECONDS
        if self._deferred is not None and overdue and not self._is_due(segment):
            self._deferred.start_fetch(own_thread=True)
        return self._waiting.popleft() if self._is_due(segment) else None

    def done(self, segment: StepSegment) -> None:
        """A segment is where it should be."""
        self._rows_done += segment.size

    @property
    def rows_unfetched(self) -> int:
        """How many rows have measurements that are not due."""
        return sum(segment.size for segment in self if not self._is_due(segment))

    def _is_due(self, segment: StepSegment) -> bool:
        if self._deferred is None:
            return True
        tickets = np.frombuffer(segment.rows.tensors.tickets(TICKET)[1], np.int64)
        return self._deferred.due(tickets) == len(tickets)
