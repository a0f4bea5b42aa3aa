"""A ring buffer of the last steps of a program, written as a run only when `dump` is called.

It takes the place of a `RunWriter`. Its thread shows each step to `on_step` when it is over, writes a snapshot whenever
`dump` is called, and goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from astray.interrupts import pass_interrupt
from astray.process import absolute
from astray.records import MissedTensor, Setup
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.run_info import End, Flight, RunInfo, now, plain
from astray.store.writing.background_writer import QUEUE_BYTES, BackgroundWriter
from astray.store.writing.buffer_pool import ArrivingValues
from astray.store.writing.record_queue import StepSegment, StepSegments, WakeEvent
from astray.store.writing.snapshot import RecordingSummary, Snapshot, snapshot_in_child, write_snapshot
from astray.store.writing.step_buffer import AttachedValues, RowBlock
from astray.store.writing.step_listener import StepCallback, StepListener
from astray.wording import sized

REMEMBER = 5
MOST_BYTES = 512 << 20
DUMP_SECONDS = 60.0
LOCK_SECONDS = 0.2  # the longest wait for a lock that an interrupted thread may hold
MOST_SETUP = 10_000  # rows of settings, before older ones are merged


class FlightRecorder(BackgroundWriter):
    """Holds the last steps of one rank in memory. Its methods may be called from any thread.

    >>> flight = FlightRecorder("runs/a", info=RunInfo.of_process(), remember=3)
    >>> ...
    >>> flight.dump("runs/a-nan", "a NaN in step 12").failure is None
    True

    `remember` is how many steps, besides the one that is not over. `most_bytes` is what they may take; the oldest go
    first. `on_step` receives the rows of each step, as described in `StepListener`; `listener` says whether that has
    happened. `catch` also keeps the values of the tensors of a call that made NaN or infinity, where they are available
    at once. `overwrite` is for dumps, the rest as for `RunWriter`. `path` is not touched: `dump` says where to write.
    In a forked child nothing happens.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        info: RunInfo,
        overwrite: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        deferred: DeferredMeasurements | None = None,
        remember: int = REMEMBER,
        most_bytes: int = MOST_BYTES,
        on_step: StepCallback | None = None,
        catch: bool = False,
    ) -> None:
        super().__init__(path, rank, queue_bytes, deferred)
        self._info = info
        self._overwrite = overwrite
        self.listener = StepListener(
            remember,
            most_bytes,
            on_step,
            deferred=deferred,
            note_missing=self._note_missing,
            is_responsive=self._is_responsive,
        )
        self._memory = self.listener.memory
        self._arriving = ArrivingValues(self._free, self._lose)
        self._segments = StepSegments(self._queue, deferred)  # taken from the queue, and not yet in memory
        self._attached = AttachedValues(2 * (remember + 2)) if catch else None  # at most two calls of a step
        self._owned: list[TensorBytes] = []  # in memory before the rows that refer to them
        self._freed = 0  # bytes of the queue's memory that became free
        self._missing: Counter[tuple[str, str]] = Counter()  # noted by the thread, without the program's lock
        self._setup: list[Setup] = []  # of the whole recording: what was set at its start still holds
        self._requests: deque[_Request] = deque()
        self._dumping = threading.RLock()  # once the thread has ended; a signal may come in the middle
        self._start()

    # -- called by the program ---------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes that are held, without the rows that the recorder's thread has not taken yet."""
        return self._memory.nbytes

    def dump(
        self, path: str | os.PathLike[str], why: str, *, overwrite: bool | None = None, timeout: float = DUMP_SECONDS
    ) -> Snapshot:
        """Write everything that is held as a run at `path`, also of the step that is not over.

        Raises nothing. May be called after the recording has ended, and from `on_step`, a signal handler, an exit
        handler or an exception hook. The recorder's thread writes. Where that takes longer than `timeout` seconds,
        because the disk is slow or a signal came while this thread held a lock, it is written later all the same.
        """
        if not self._is_owner:
            return snapshot_in_child(path)
        request = _Request(absolute(path), why, self._overwrite if overwrite is None else overwrite)
        if threading.current_thread() is self._thread:
            return self._write(request)
        return self._submit(request, timeout)

    def forget(self) -> None:
        """Free everything that is held, once the recording has ended."""
        if self._is_owner and not self._thread.is_alive():
            with self._dumping:
                self._memory.clear()

    # -- called by the engine ----------------------------------------------------------------------------------------

    @property
    def catches(self) -> bool:
        return self._attached is not None

    def attach(self, seq: int, role: str, path: str, fingerprint: int, values: TensorBytes) -> None:
        if self._attached is not None:
            self._attached.add(seq, role, path, fingerprint, values)

    def setup(self, row: Setup) -> None:
        if self._open:
            self._setup.append(row)
            if len(self._setup) >= MOST_SETUP:
                self._setup = compacted(self._setup, self._memory.steps[:1] or [row.step])

    def step_done(self) -> None:
        """A step is over and can be shown. Waits when the recorder's thread is far behind."""
        if self._open:
            self._segments.cut(rows=True, ends=True)
            self._start_fetch()
            self._queue.wake.set()
            self._queue.wait_for(lambda: self._segments.has_room)

    def flush(self) -> bool:
        """Wait until everything handed over before is in memory, and every step that is over has been shown."""
        if not self._open or threading.current_thread() is self._thread:
            return False
        self._submit(_Request(None), None)
        return self.failure is None

    def discard(self) -> None:
        """Close, and free everything that is held."""
        self.close()
        self.forget()

    def _finish(self, ended: str) -> None:
        blocks = self._memory.blocks
        self.end = End(
            complete=self.failure is None,
            ended=ended,
            finished=now(),
            failure=self.failure,
            steps=len(self._memory.steps),
            calls=sum(len(block.calls[0]) for block in blocks),
            tensors=sum(len(block.tensors[0]) for block in blocks),
            waited_seconds=round(self.waited_seconds, 3),
            missed=self._all_missed(),
        )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            closing = False
            while not closing or self._arriving.has_partial:
                self._queue.wake.wait(self._segments.idle_seconds)
                closing = self._closed  # read before taking: what was handed over before closing is still taken
                requests = [self._requests.popleft() for _ in range(len(self._requests))]
                rows = closing or bool(requests) or self._queue.wants_rows_taken
                if not self._segments.cut(rows=rows, timeout=LOCK_SECONDS) and requests:
                    self._note_missing("the rows since the last step", "a signal came while they were handed over")
                for segment in self._segments:  # values need not wait for measurements, as rows do
                    if (
                        segment.step == self._memory.current_step
                    ):  # values of later steps might push out what was not shown yet
                        self._hold(segment)
                self._arriving.collect()
                self._make_room()
                self._receive(urgent=closing or bool(requests))
                for request in requests:
                    self._serve(request)
            self.listener.show_unfinished(self._segments.step)
        except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
            self.failure = (
                f"The flight recorder stopped: {type(error).__name__}: {error}. The program goes on, and what was "
                "recorded before can still be written."
            )
        finally:
            self._stop()
            self._queue.drop()
            self._buffers.close()
            self.listener.end()

    def _hold(self, segment: StepSegment) -> None:
        """Bring the values that were taken into memory."""
        for values in segment.values:
            if not self._memory.reserve(values.size, segment.step):
                limit = sized(self._memory.most_bytes)
                self._arriving.reject(values, f"of one step, no more than {limit} are held in memory")
                continue
            self._arriving.begin(values)
            if values.resolved:  # its bytes are lost
                self._memory.unreserve(values.size, segment.step)
            else:
                segment.owned.append(values)
        segment.values.clear()

    def _receive(self, urgent: bool) -> None:
        """Put into memory what was taken, in its order, as far as its measurements are due."""
        while (segment := self._segments.next(urgent)) is not None:
            self._hold(segment)  # the segment may be new
            self._remember(segment)
            self._segments.done(segment)
            self._make_room()

    def _remember(self, segment: StepSegment) -> None:
        self._memory.stacks.update(segment.rows.stacks)
        self._owned += segment.owned
        if segment.size or (segment.ends and self._owned):
            owned, self._owned = self._owned, []
            self._memory.add(RowBlock(segment.step, segment.rows, owned, self._deferred, self._attached))
        if segment.ends:
            self.listener.end_step(segment.step)

    # A thread of the program that a signal has interrupted may hold any lock that the recorder's thread waits for,
    # while its handler waits for a dump. So the recorder's thread waits LOCK_SECONDS at most, and keeps its own counts.

    def _make_room(self) -> None:
        if self._queue.make_room(self._freed, LOCK_SECONDS):
            self._freed = 0

    def _free(self, size: int) -> None:
        self._freed += size

    def _lose(self, reason: str) -> None:
        self._note_missing("the values of a tensor", reason)

    def _note_missing(self, what: str, why: str) -> None:
        self._missing[plain(what), plain(why)] += 1

    def _all_missed(self) -> list[MissedTensor]:
        missing = [MissedTensor(what, why, count) for (what, why), count in dict(self._missing).items()]
        return [*super()._all_missed(), *missing]

    # -- dumps -------------------------------------------------------------------------------------------------------

    def _submit(self, request: _Request, timeout: float | None) -> Snapshot:
        """Have the thread serve a request; once it has ended, serve it in the calling thread."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._requests.append(request)
        self._queue.wake.set()
        while request.result is None:
            if not self._thread.is_alive():
                with self._dumping:
                    self._serve(request)
            elif deadline is not None and time.monotonic() >= deadline:
                path = request.path or self.path
                return Snapshot(
                    path, None, f"{path} was not written within {timeout:g} s. It will be as soon as it can."
                )
            else:
                request.done.wait(1.0 if deadline is None else min(1.0, deadline - time.monotonic()))
        return request.result

    def _serve(self, request: _Request) -> None:
        if request.result is None:
            request.result = self._write(request, self._segments.rows_unfetched)
            request.done.set()

    def _write(self, request: _Request, rows_unfetched: int = 0) -> Snapshot:
        if request.path is None:
            return Snapshot(self.path, None, None)
        memory, why = self._memory, plain(request.why)
        limits = {"remember": memory.remember, "max_bytes": memory.most_bytes}
        flight = Flight(why=why, rank=self.rank, written=now(), **limits)
        info = msgspec.structs.replace(self._info, flight=flight)
        missed = [*self._all_missed(), *memory.missing()]
        if rows_unfetched:
            missed.append(MissedTensor("a row", "its measurement had not been sent for", rows_unfetched))
        ended = self.end.ended if self.end is not None else "normally"
        summary = RecordingSummary(why, ended, self.failure, self.waited_seconds, missed)
        try:
            return write_snapshot(request.path, self.rank, info, request.overwrite, memory, summary, list(self._setup))
        except Exception as error:  # noqa: BLE001 - the recording goes on, and so does the program
            pass_interrupt(error)
            failure = f"{request.path} could not be written: {type(error).__name__}: {error}."
            return Snapshot(request.path, None, f"{failure} Choose another folder.")


def compacted(rows: list[Setup], held: list[int]) -> list[Setup]:
    """The rows, with one for each subject and site in place of all rows before the first step that is held."""
    before: dict[tuple[str, str], Setup] = {}
    later = []
    for row in rows:
        if row.step > held[0]:
            later.append(row)
            continue
        known = before.get((row.subject, row.site))
        values = {**known.values, **row.values} if known is not None else row.values
        before[row.subject, row.site] = row._replace(values=values)
    return [*before.values(), *later]


class _Request:
    """A request for a dump, or, without a path, for everything before it to be in memory."""

    def __init__(self, path: Path | None, why: str = "", overwrite: bool = False) -> None:
        self.path = path
        self.why = why
        self.overwrite = overwrite
        self.result: Snapshot | None = None
        self.done = WakeEvent()
