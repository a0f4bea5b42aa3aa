"""A recording that stays in memory: the last steps of a program, written as a run only when there is a reason to.

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
from astray.store.writing.buffer_pool import HeldValues
from astray.store.writing.record_queue import StepSegment, StepSegments, WakeEvent
from astray.store.writing.snapshot import Snapshot, SnapshotAccount, in_child, write_dump
from astray.store.writing.step_buffer import Attached, RowBlock
from astray.store.writing.step_listener import Listener, StepListener
from astray.wording import sized

REMEMBER = 5
MOST_BYTES = 512 << 20
DUMP_SECONDS = 60.0
PATIENCE = 0.2
MOST_SETUP = 10_000  # rows of settings, before older ones are summed up


class FlightRecorder(BackgroundWriter):
    """Holds the last steps of one rank in memory. Its methods may be called from any thread.

    >>> flight = FlightRecorder("runs/a", info=RunInfo.here(), remember=3)
    >>> ...
    >>> flight.dump("runs/a-nan", "a NaN in step 12").failure is None
    True

    `remember` is how many steps, besides the one that is not over. `most_bytes` is what they may take; the oldest go
    first. `on_step` is given the rows of each step, as `StepListener` has it; `watch` tells whether that has happened.
    `catch` also keeps the values of the tensors of a call that made NaN or infinity, where they are available at once.
    `overwrite` is for dumps, the rest as for `RunWriter`. `path` is not touched: `dump` says where to write. In a
    forked child nothing happens.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        info: RunInfo,
        overwrite: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        late: DeferredMeasurements | None = None,
        remember: int = REMEMBER,
        most_bytes: int = MOST_BYTES,
        on_step: Listener | None = None,
        catch: bool = False,
    ) -> None:
        super().__init__(path, rank, queue_bytes, late)
        self._info = info
        self._overwrite = overwrite
        self.watch = StepListener(
            remember, most_bytes, on_step, late=late, lack=self._lack, can_answer=self._can_answer
        )
        self._memory = self.watch.memory
        self._holding = HeldValues(self._free, self._lose)
        self._cuts = StepSegments(self._backlog, late)  # taken from the queue, and not yet in memory
        self._attached = Attached(2 * (remember + 2)) if catch else None  # at most two calls of a step
        self._owned: list[TensorBytes] = []  # in memory before the rows that refer to them
        self._freed = 0  # bytes of the queue that came into memory
        self._lacking: Counter[tuple[str, str]] = Counter()  # what the thread has missed
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
        if not self._is_here:
            return in_child(path)
        request = _Request(absolute(path), why, self._overwrite if overwrite is None else overwrite)
        if threading.current_thread() is self._thread:
            return self._write(request)
        return self._ask(request, timeout)

    def forget(self) -> None:
        """Free everything that is held, once the recording has ended."""
        if self._is_here and not self._thread.is_alive():
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
                self._setup = summed_up(self._setup, self._memory.steps[:1] or [row.step])

    def step_done(self) -> None:
        """A step is over and can be shown. Waits when the recorder's thread is far behind."""
        if self._open:
            self._cuts.cut(rows=True, ends=True)
            self._settle()
            self._backlog.wake.set()
            self._backlog.wait_for(lambda: self._cuts.are_few)

    def flush(self) -> bool:
        """Wait until everything handed over before is in memory, and every step that is over has been shown."""
        if not self._open or threading.current_thread() is self._thread:
            return False
        self._ask(_Request(None), None)
        return self.failure is None

    def discard(self) -> None:
        """Close, and free everything that is held."""
        self.close()
        self.forget()

    def _finish(self, ended: str) -> None:
        pieces = self._memory.pieces
        self.end = End(
            complete=self.failure is None,
            ended=ended,
            finished=now(),
            failure=self.failure,
            steps=len(self._memory.steps),
            calls=sum(len(piece.calls[0]) for piece in pieces),
            tensors=sum(len(piece.tensors[0]) for piece in pieces),
            waited_seconds=round(self.waited_seconds, 3),
            missed=self._all_missed(),
        )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            closing = False
            while not closing or self._holding.is_growing:
                self._backlog.wake.wait(self._cuts.patience)
                closing = self._closed  # read before taking: what was handed over before closing is still taken
                requests = [self._requests.popleft() for _ in range(len(self._requests))]
                rows = closing or bool(requests) or self._backlog.wants_rows_taken
                if not self._cuts.cut(rows=rows, patience=PATIENCE) and requests:
                    self._lack("the rows since the last step", "a signal came while they were handed over")
                for cut in self._cuts:  # values need not wait for measurements, as rows do
                    if cut.step == self._memory.over:  # values of later steps might push out what was not shown yet
                        self._hold(cut)
                self._holding.collect()
                self._make_room()
                self._receive(urgent=closing or bool(requests))
                for request in requests:
                    self._answer(request)
            self.watch.rest(self._cuts.step)
        except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
            self.failure = (
                f"The flight recorder stopped: {type(error).__name__}: {error}. The program goes on, and what was "
                "recorded before can still be written."
            )
        finally:
            self._stop()
            self._backlog.drop()
            self._rooms.close()
            self.watch.end()

    def _hold(self, cut: StepSegment) -> None:
        """Bring the values that were taken into memory."""
        for values in cut.values:
            if not self._memory.reserve(values.size, cut.step):
                limit = sized(self._memory.most_bytes)
                self._holding.refuse(values, f"of one step, no more than {limit} are held in memory")
                continue
            self._holding.begin(values)
            if values.settled:  # its bytes are lost
                self._memory.give_back(values.size, cut.step)
            else:
                cut.owned.append(values)
        cut.values.clear()

    def _receive(self, urgent: bool) -> None:
        """Put into memory what was taken, in its order, as far as its measurements are due."""
        while (cut := self._cuts.next(urgent)) is not None:
            self._hold(cut)  # the segment may be new
            self._remember(cut)
            self._cuts.done(cut)
            self._make_room()

    def _remember(self, cut: StepSegment) -> None:
        self._memory.stacks.update(cut.taken.stacks)
        self._owned += cut.owned
        if cut.size or (cut.ends and self._owned):
            owned, self._owned = self._owned, []
            self._memory.add(RowBlock(cut.step, cut.taken, owned, self._late, self._attached))
        if cut.ends:
            self.watch.step_over(cut.step)

    # A thread of the program that a signal has interrupted may hold any lock that the recorder's thread waits for,
    # while its handler waits for a dump. So the recorder's thread waits PATIENCE at most, and keeps its own counts.

    def _make_room(self) -> None:
        if self._backlog.make_room(self._freed, PATIENCE):
            self._freed = 0

    def _free(self, size: int) -> None:
        self._freed += size

    def _lose(self, reason: str) -> None:
        self._lack("the values of a tensor", reason)

    def _lack(self, what: str, why: str) -> None:
        self._lacking[plain(what), plain(why)] += 1

    def _all_missed(self) -> list[MissedTensor]:
        lacking = [MissedTensor(what, why, count) for (what, why), count in dict(self._lacking).items()]
        return [*super()._all_missed(), *lacking]

    # -- dumps -------------------------------------------------------------------------------------------------------

    def _ask(self, request: _Request, timeout: float | None) -> Snapshot:
        """Have the thread answer; once it has ended, answer in the calling thread."""
        late = None if timeout is None else time.monotonic() + timeout
        self._requests.append(request)
        self._backlog.wake.set()
        while request.result is None:
            if not self._thread.is_alive():
                with self._dumping:
                    self._answer(request)
            elif late is not None and time.monotonic() >= late:
                path = request.path or self.path
                return Snapshot(
                    path, None, f"{path} was not written within {timeout:g} s. It will be as soon as it can."
                )
            else:
                request.answered.wait(1.0 if late is None else min(1.0, late - time.monotonic()))
        return request.result

    def _answer(self, request: _Request) -> None:
        if request.result is None:
            request.result = self._write(request, self._cuts.unsent)
            request.answered.set()

    def _write(self, request: _Request, unsent: int = 0) -> Snapshot:
        if request.path is None:
            return Snapshot(self.path, None, None)
        memory, why = self._memory, plain(request.why)
        limits = {"remember": memory.remember, "max_bytes": memory.most_bytes}
        flight = Flight(why=why, rank=self.rank, written=now(), **limits)
        info = msgspec.structs.replace(self._info, flight=flight)
        missed = [*self._all_missed(), *memory.missing()]
        if unsent:
            missed.append(MissedTensor("a row", "its measurement had not been sent for", unsent))
        ended = self.end.ended if self.end is not None else "normally"
        account = SnapshotAccount(why, ended, self.failure, self.waited_seconds, missed)
        try:
            return write_dump(request.path, self.rank, info, request.overwrite, memory, account, list(self._setup))
        except Exception as error:  # noqa: BLE001 - the recording goes on, and so does the program
            pass_interrupt(error)
            failure = f"{request.path} could not be written: {type(error).__name__}: {error}."
            return Snapshot(request.path, None, f"{failure} Choose another folder.")


def summed_up(rows: list[Setup], held: list[int]) -> list[Setup]:
    """The rows, with one for each thing in place of all rows before the first step that is held."""
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
    """Asks the thread for a dump, or, without a path, for everything before it to be in memory."""

    def __init__(self, path: Path | None, why: str = "", overwrite: bool = False) -> None:
        self.path = path
        self.why = why
        self.overwrite = overwrite
        self.result: Snapshot | None = None
        self.answered = WakeEvent()
