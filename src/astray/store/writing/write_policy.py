"""How rows get from the queue into the files: as they come, or step by step where a listener is shown each step.

`run_writer.py` says when. A policy takes rows, and writes them once what they refer to is written. Only `segment` and
`has_room` are called by the program's threads.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from astray.records import Blob
from astray.store.deferred import DeferredMeasurements
from astray.store.writing.rank_files import RankFiles, Stack
from astray.store.writing.record_queue import RecordQueue, StepSegment, StepSegments
from astray.store.writing.step_buffer import RowBlock
from astray.store.writing.step_listener import StepListener


class WritePolicy(Protocol):
    """What `RunWriter` calls."""

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not written yet."""

    def end_step(self) -> None:
        """A step is over."""

    def has_room(self) -> bool:
        """Whether so few rows wait that the program may go on."""

    def take(self, rows: bool, closing: bool) -> None:
        """Take the segments that were cut, and with `rows` all queued rows."""

    def write(self) -> None:
        """Write every row taken so far, as far as its bytes and its measurements have arrived."""

    def end(self) -> None:
        """Everything has been taken."""


class Immediate:
    """Rows are taken all at once; writing them waits for their measurements."""

    def __init__(self, files: RankFiles, queue: RecordQueue) -> None:
        self._files = files
        self._queue = queue

    @property
    def waiting_rows(self) -> int:
        return self._files.waiting_rows

    def end_step(self) -> None:
        """Does nothing: rows of several steps may be written together."""

    def has_room(self) -> bool:
        return True  # a queue that is too long makes the thread that appends wait

    def take(self, rows: bool, closing: bool) -> None:  # noqa: ARG002 - PerStep needs it
        if rows:
            self._files.take(*self._queue.take())  # all at once: to take them bit by bit is to copy them

    def write(self) -> None:
        self._files.write_rows()

    def end(self) -> None:
        """Does nothing: all that was taken is written."""


class PerStep:
    """Rows are cut where steps end, and each step is shown before it is written: the program never waits for the disk.

    A step is one batch of its files at least.
    """

    def __init__(
        self, files: RankFiles, queue: RecordQueue, deferred: DeferredMeasurements | None, listener: StepListener
    ) -> None:
        self._files = files
        self._queue = queue
        self._deferred = deferred
        self._listener = listener
        self._segments = StepSegments(queue, deferred, values=False)
        self._stacks: list[Stack] = []
        self._blocks: deque[RowBlock] = deque()
        self.waiting_rows = 0

    def end_step(self) -> None:
        self._segments.cut(rows=True, ends=True)

    def has_room(self) -> bool:
        return self._segments.has_room

    def take(self, rows: bool, closing: bool) -> None:
        if rows:
            self._queue.take_flushes()  # before taking rows, so that all rows before a flush are taken
            self._segments.cut(rows=True)
        while (segment := self._segments.next(closing or self._queue.flushes)) is not None:
            self._show(segment)
            self._segments.done(segment)
            self._queue.make_room()

    def _show(self, segment: StepSegment) -> None:
        memory = self._listener.memory
        memory.stacks.update(segment.rows.stacks)
        self._stacks += segment.rows.stacks
        if segment.size:
            block = RowBlock(segment.step, segment.rows, [], self._deferred)
            self._blocks.append(block)
            self.waiting_rows += segment.size
            memory.add(block)
        if segment.ends:
            self._listener.end_step(segment.step)

    def write(self) -> None:
        stacks, self._stacks = self._stacks, []
        self._files.write_stacks(stacks)
        while self._blocks:
            block = self._blocks[0]
            values = block.values if self._files.keeps_values else []
            if any(one is not None and not one.resolved for one in values):
                return
            self._blocks.popleft()
            self.waiting_rows -= len(block.calls[0]) + len(block.tensors[0])
            if len(block.calls[0]):
                self._files.write_calls(block.calls)
            if len(block.tensors[0]):
                blobs: list[Blob | None] = [None if one is None else one.blob for one in values]
                self._files.tensors.append(block.with_blobs(blobs) if blobs else block.tensors)

    def end(self) -> None:
        self._listener.show_unfinished(self._segments.step)
