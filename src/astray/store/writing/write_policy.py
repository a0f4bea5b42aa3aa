"""How rows get from the queue into the files: as they come, or step by step where a listener is shown each step.

`run_writer.py` says when. A policy takes rows, and writes them once what they refer to is written. Only `cut` and
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

    def cut(self) -> None:
        """A step is over."""

    def has_room(self) -> bool:
        """Whether so few rows wait that the program may go on."""

    def take(self, rows: bool, closing: bool) -> None:
        """Take the segments that were cut, and with `rows` all rows that are there."""

    def write(self) -> None:
        """Write every row taken so far, as far as its bytes and its measurements are there."""

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

    def cut(self) -> None:
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
        self, files: RankFiles, queue: RecordQueue, late: DeferredMeasurements | None, watch: StepListener
    ) -> None:
        self._files = files
        self._queue = queue
        self._late = late
        self._watch = watch
        self._cuts = StepSegments(queue, late, values=False)
        self._stacks: list[Stack] = []
        self._pieces: deque[RowBlock] = deque()
        self.waiting_rows = 0

    def cut(self) -> None:
        self._cuts.cut(rows=True, ends=True)

    def has_room(self) -> bool:
        return self._cuts.are_few

    def take(self, rows: bool, closing: bool) -> None:
        if rows:
            self._queue.hear_flushes()  # before taking rows, so that all rows before a flush are taken
            self._cuts.cut(rows=True)
        while (cut := self._cuts.next(closing or self._queue.flushes)) is not None:
            self._show(cut)
            self._cuts.done(cut)
            self._queue.make_room()

    def _show(self, cut: StepSegment) -> None:
        memory = self._watch.memory
        memory.stacks.update(cut.taken.stacks)
        self._stacks += cut.taken.stacks
        if cut.size:
            piece = RowBlock(cut.step, cut.taken, [], self._late)
            self._pieces.append(piece)
            self.waiting_rows += cut.size
            memory.add(piece)
        if cut.ends:
            self._watch.step_over(cut.step)

    def write(self) -> None:
        stacks, self._stacks = self._stacks, []
        self._files.write_stacks(stacks)
        while self._pieces:
            piece = self._pieces[0]
            values = piece.values if self._files.keeps_values else []
            if any(one is not None and not one.settled for one in values):
                return
            self._pieces.popleft()
            self.waiting_rows -= len(piece.calls[0]) + len(piece.tensors[0])
            if len(piece.calls[0]):
                self._files.write_calls(piece.calls)
            if len(piece.tensors[0]):
                blobs: list[Blob | None] = [None if one is None else one.blob for one in values]
                self._files.tensors.append(piece.with_blobs(blobs) if blobs else piece.tensors)

    def end(self) -> None:
        self._watch.rest(self._cuts.step)
