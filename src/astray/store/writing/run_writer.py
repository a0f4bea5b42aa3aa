"""Writes the records of a running program to disk while it runs.

Errors do not reach the program: recording stops, `failure` says why, and what was written before stays readable.
`background_writer.py` is the program's side of it. `RunWriter` says when rows are written; its `WritePolicy` says how
they get from the queue into the files: as they come, or step by step where a listener is shown each step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Blob, Setup
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.run_format.folder import claim, recording_errors, release
from astray.store.run_format.shard_file import TensorBytesReader
from astray.store.run_info import RunInfo
from astray.store.writing.background_writer import QUEUE_BYTES, BackgroundWriter
from astray.store.writing.rank_files import RankFiles, Stack
from astray.store.writing.record_queue import (
    BATCH_ROWS,
    HELD_SECONDS,
    IDLE_SECONDS,
    STEP_SECONDS,
    RecordQueue,
    StepSegment,
    StepSegments,
)
from astray.store.writing.step_buffer import RowBlock
from astray.store.writing.step_listener import StepCallback, StepListener
from astray.store.writing.values_writer import SHARD_BYTES

LISTENER_BYTES = 128 << 20  # what a step may take in memory until it is shown; a larger one is shown in parts


class RunWriter(BackgroundWriter):
    """Writes one rank of a run. Its methods may be called from any thread, and do nothing in a forked child.

    >>> with RunWriter("runs/a", info=RunInfo.of_process()) as writer:
    ...     writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
    ...     writer.tensor(Tensor(0, "output", "0", "float32", (2,), (1,), "cpu", False), np.ones(2, np.float32))

    `world_size` is for when `info` does not say it. `queue_bytes` is how much memory values may take on their way to
    the disk: more lets the program run ahead of a slow disk for longer. `shard_bytes` is the size at which the next
    values file begins. A row may hold a ticket of `deferred` in place of its statistics. `on_step` receives the rows of
    each step, as described in `StepListener`; `listener` says whether that has happened. Raises RunExists or RunError
    when the folder cannot be recorded into.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        info: RunInfo,
        world_size: int | None = None,
        overwrite: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        shard_bytes: int = SHARD_BYTES,
        deferred: DeferredMeasurements | None = None,
        on_step: StepCallback | None = None,
    ) -> None:
        super().__init__(path, rank, queue_bytes, deferred)
        if world_size is not None:
            info = msgspec.structs.replace(info, world_size=world_size)
        folder = claim(self.path, rank, info, overwrite)
        with recording_errors(self.path):
            self._files = RankFiles(folder, shard_bytes, deferred)
        self._files.values.connect(self._queue.wake.set, self._queue.written, self._lost)
        self._step_ended: float | None = None
        self.listener = self._listener(on_step) if on_step is not None else None
        self._policy: WritePolicy = Immediate(self._files, self._queue)
        if self.listener is not None:
            self._policy = PerStep(self._files, self._queue, deferred, self.listener)
        try:
            self._start()
        except RunError:
            self._files.close()
            release(self.path, rank)
            raise

    def setup(self, row: Setup) -> None:
        """Record what something is set to, from a step on. It is written before the calls that follow."""
        if self._open:
            self._queue.setup.append(row)

    def step_done(self) -> None:
        """A step is over, and its rows should reach the file soon."""
        if self._open:
            self._policy.end_step()
            self._start_fetch()
            self._step_ended = self._step_ended or time.monotonic()
            self._queue.wake.set()
            self._queue.wait_for(self._policy.has_room)

    def discard(self) -> None:
        """Close, and remove everything: a recording that could not start leaves no run."""
        self.close()
        release(self.path, self.rank)

    def _work(self) -> None:
        """The writer's thread."""
        try:
            self._write_until_closed()
            self._policy.end()
            self._files.close()
        except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
            self.failure = self._files.abandon(error, self._write)
            if self.listener is not None:
                self.failure += " Nothing is watched from here on."
        finally:
            with contextlib.ExitStack() as ending:  # each of these even if another fails for want of memory
                ending.callback(self._files.values.end_threads)
                if self.listener is not None:
                    ending.callback(self.listener.end)
                ending.callback(self._buffers.close)
                ending.callback(self._queue.drop)
                ending.callback(self._stop)

    def _write_until_closed(self) -> None:
        written = held = time.monotonic()
        closing = is_due = False
        while not closing:
            self._queue.wake.wait(IDLE_SECONDS if is_due else self._due_at(written) - time.monotonic())
            closing = self._closed  # read before taking: what was handed over before closing is still written
            self._files.values.collect()
            if closing or time.monotonic() >= self._due_at(written):
                is_due, self._step_ended = True, None
            self._policy.take(is_due or self._queue.wants_rows_taken, closing)
            for group in self._queue.take_values():
                self._files.take_values(group)
            if self._policy.waiting_rows >= BATCH_ROWS:
                self._write()
            self._queue.make_room()
            if self._queue.flushes or closing:
                self._files.values.drain()
            if self._files.values.has_partial:  # the rest of a large tensor is coming
                closing = False
                continue
            if self._queue.flushes or is_due:
                is_due = False
                self._write()
                self._queue.complete_flushes()
                written = time.monotonic()
                if not self._policy.waiting_rows:
                    held = written
                elif written - held >= HELD_SECONDS and self._deferred is not None:
                    self._deferred.start_fetch(own_thread=True)
                    held = written

    def _due_at(self, written: float) -> float:
        """When rows are written next, if no flush asks for it before."""
        idle = written + IDLE_SECONDS
        return idle if self._step_ended is None else min(idle, self._step_ended + STEP_SECONDS)

    def _write(self) -> None:
        """Write the rows that were taken, and before them the settings that were put until then."""
        self._files.write_setup(self._queue.take_setup())
        self._policy.write()

    def _listener(self, on_step: StepCallback) -> StepListener:
        return StepListener(
            0,
            LISTENER_BYTES,
            on_step,
            deferred=self._deferred,
            note_missing=self._note_missed,
            is_responsive=self._is_responsive,
            read_values=self._read_back,
        )

    def _read_back(self, values: TensorBytes) -> npt.NDArray[np.uint8] | None:
        """The bytes of values that were on their way into a file, for the listener."""
        for group in self._queue.take_values():
            self._files.take_values(group)
        self._files.values.drain()
        try:
            return None if values.blob is None else TensorBytesReader(self._files.folder).read(values.blob)
        except RunError:
            return None

    def _finish(self, ended: str) -> None:
        """Write `end.json`."""
        self.end = self._files.end_record(ended, self.failure, self.waited_seconds, self._all_missed())
        unwritten = self._files.write_end(self.end)
        self.failure = self.failure or unwritten


# -- how rows get into the files ---------------------------------------------------------------------------------------


class WritePolicy(Protocol):
    """Takes rows from the queue, and writes them once what they refer to is written.

    The program's threads call `end_step` and `has_room`, the writer's thread the others.
    """

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
