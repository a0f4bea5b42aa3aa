"""What was taken from the queue, cut where steps end: a segment never has rows of two steps.

The program's thread cuts when a step is over, the recorder's thread whenever there are many rows or a flush waits.
Segments are processed in their order, each once its measurements are due.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from astray.store.deferred import DeferredMeasurements
from astray.store.run_format.rows import TICKET, call_rows, tensor_rows
from astray.store.run_format.tensor_values import TensorBytes
from astray.store.writing import record_queue as backlog
from astray.store.writing.background_writer import HELD_SECONDS, IDLE_SECONDS, STEP_SECONDS
from astray.store.writing.record_queue import QueuedRows, RecordQueue


class StepSegment(NamedTuple):
    """Rows and values of one step that were taken at once. It may be the last of its step."""

    step: int
    taken: QueuedRows
    values: list[TensorBytes]  # still to be brought into memory
    owned: list[TensorBytes]  # in memory
    ends: bool
    time: float

    @property
    def size(self) -> int:
        """How many rows it has."""
        return len(self.taken.calls) + len(self.taken.tensors)


class StepSegments:
    """The segments that wait. Any thread may `cut`; the rest is for the recorder's thread.

    values: take the values too. `write_policy.py` sets it to False, since it writes them from the queue.
    """

    def __init__(self, queue: RecordQueue, late: DeferredMeasurements | None, *, values: bool = True) -> None:
        self.step = 0  # the step that is not over
        self._backlog = queue
        self._late = late
        self._takes_values = values
        self._waiting: deque[StepSegment] = deque()
        self._cutting = threading.Lock()  # held while a segment is taken and appended, so that they keep their order
        self._given = self._received = 0  # counts of rows

    def __iter__(self) -> Iterator[StepSegment]:
        return iter(list(self._waiting))

    @property
    def are_few(self) -> bool:
        """Whether so few rows wait that the program may go on."""
        return self._given - self._received < backlog.QUEUE_ROWS

    @property
    def put(self) -> int:
        """How many rows the program has handed over so far, in segments or not."""
        return self._given + len(self._backlog.calls) + len(self._backlog.tensors)

    @property
    def received(self) -> int:
        """How many of these are done."""
        return self._received

    def cut(self, *, rows: bool, ends: bool = False, patience: float = -1) -> bool:
        """Take the values that are there, and with `rows` the rows, as a segment. Flushes are left in the queue.

        False when another thread was cutting for longer than `patience` seconds, as for `RecordQueue.make_room`.
        """
        if not self._cutting.acquire(timeout=patience):
            return False
        try:
            taken = self._backlog.take_rows() if rows else QueuedRows([], call_rows(), tensor_rows())
            groups = self._backlog.take_values() if self._takes_values else ()
            values = [one for group in groups for one in group]
            cut = StepSegment(self.step, taken, values, [], ends, time.monotonic())
            if cut.size or values or taken.stacks or ends:
                self._waiting.append(cut)
            self._given += cut.size
            self.step += ends
        finally:
            self._cutting.release()
        return True

    @property
    def patience(self) -> float:
        """Seconds until `next` should be called again, if nothing happens before."""
        return max(0.0, self._waiting[0].time + STEP_SECONDS - time.monotonic()) if self._rests else IDLE_SECONDS

    @property
    def _rests(self) -> bool:
        """Whether the only segment ends the step just over, with measurements of a device: see STEP_SECONDS."""
        if len(self._waiting) != 1 or self._late is None or not self._late.is_used:
            return False
        return self._waiting[0].ends and time.monotonic() - self._waiting[0].time < STEP_SECONDS

    def next(self, urgent: bool) -> StepSegment | None:
        """The first segment, if its measurements are due; when `urgent`, or after HELD_SECONDS, they are made due."""
        if not self._waiting or (self._rests and not urgent):
            return None
        cut = self._waiting[0]
        patient = not urgent and time.monotonic() - cut.time < HELD_SECONDS
        if self._late is not None and not patient and not self._is_due(cut):
            self._late.settle(own_thread=True)
        return self._waiting.popleft() if self._is_due(cut) else None

    def done(self, cut: StepSegment) -> None:
        """A segment is where it should be."""
        self._received += cut.size

    @property
    def unsent(self) -> int:
        """How many rows have measurements that are not due."""
        return sum(cut.size for cut in self if not self._is_due(cut))

    def _is_due(self, cut: StepSegment) -> bool:
        if self._late is None:
            return True
        tickets = np.frombuffer(cut.taken.tensors.tickets(TICKET)[1], np.int64)
        return self._late.due(tickets) == len(tickets)
