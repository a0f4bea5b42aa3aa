"""A recording that is written as another tool's files while the program runs.

It takes the place of a `RunWriter`: its thread hands the rows to a `Translator` as they come, cut where steps end, and
has it bring its files up to date now and then, so that a kill takes no more than the last moment.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from astray.interrupts import pass_interrupt
from astray.records import MissedTensor
from astray.stats import sample_positions
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.formats import MakesTranslator, losses
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo, now
from astray.store.writing.background_writer import QUEUE_BYTES, BackgroundWriter
from astray.store.writing.buffer_pool import HeldValues
from astray.store.writing.record_queue import StepSegment, StepSegments
from astray.store.writing.step_buffer import BufferedStep, RowBlock

if TYPE_CHECKING:
    from astray.records import Frame

SYNC_SECONDS = 0.2  # rows wait no longer than this for the files to tell of them
SYNC_SHARE = 10  # unless to bring them up to date takes a tenth of the time or more
SEEN_BYTES = 128 << 20  # of values that were translated and may be met again, in the rows of the next call


Positions = Callable[[int, int], npt.NDArray[np.int64]]
"""Chooses the elements of a sample: of how many, and how many of them."""


def live_writer(make: MakesTranslator, positions: Positions = sample_positions) -> partial[LiveWriter]:
    """What `Recorder(writer=…)` takes to have a recording written by such a translator.

    positions: which elements `keep="sample"` takes, where the other tool's sample is not ours.
    """
    return partial(LiveWriter, make=make, positions=positions)


class LiveWriter(BackgroundWriter):
    """Has the rows of one rank translated. Its methods may be called from any thread.

    The arguments are those of `RunWriter`, `make`, which makes the translator, and `positions`, as `live_writer` has
    it.
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
        make: MakesTranslator,
        positions: Positions = sample_positions,
    ) -> None:
        super().__init__(path, rank, queue_bytes, late)
        self.positions = positions  # type: ignore[assignment]
        self.translator = make(self.path, rank, info, overwrite=overwrite)
        self._queue_bytes = queue_bytes
        self._holding = HeldValues(self._free, self._lost)
        self._cuts = StepSegments(self._backlog, late)
        self._next: StepSegment | None = None  # measured, and perhaps waiting for its values
        self._stacks: dict[int, list[Frame]] = {}
        self._seen = TranslatedValues(self._cuts)
        self._freed = 0  # bytes of the queue that came into memory and are not translated yet
        self._calls = self._tensors = self._values = self._value_bytes = 0
        self._steps: set[int] = set()
        self._start()

    # -- for the program ---------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """Say that a step is over. Waits when the translator is far behind."""
        if self._open:
            self._cuts.cut(rows=True, ends=True)
            self._settle()
            self._backlog.wake.set()
            self._backlog.wait_for(lambda: self._cuts.are_few)

    def discard(self) -> None:
        """Close. What the translator had begun is its own, and stays."""
        self.close()

    def _finish(self, ended: str) -> None:
        missed = [*self._all_missed(), *losses(self.translator.lost, "this format")]
        self.end = self._account(ended, missed)
        try:
            self.translator.close(self.end)
        except Exception as error:  # noqa: BLE001 - the program is not to fail because a disk is full
            pass_interrupt(error)
            self.failure = self.failure or self._sentence(error)
            self.end = self._account(ended, missed)

    def _account(self, ended: str, missed: list[MissedTensor]) -> End:
        return End(
            complete=self.failure is None,
            ended=ended,
            finished=now(),
            failure=self.failure,
            steps=len(self._steps),
            calls=self._calls,
            tensors=self._tensors,
            stacks=len(self._stacks),
            values=self._values,
            value_bytes=self._value_bytes,
            waited_seconds=round(self.waited_seconds, 3),
            missed=missed,
        )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._translate_until_closed()
        except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
            self.failure = self._sentence(error)
        finally:
            self._stop()
            self._seen.clear()
            self._backlog.drop()
            self._rooms.close()

    def _sentence(self, error: Exception) -> str:
        return (
            f"Writing {self.path} stopped: {type(error).__name__}: {error}. The program goes on; what was written "
            "before can be read."
        )

    def _translate_until_closed(self) -> None:
        synced, due = time.monotonic(), 0.0
        closing = False
        while not closing or self._next is not None:
            self._backlog.wake.wait(SYNC_SECONDS)
            closing = self._closed  # read before taking: what was handed over before closing is still taken
            self._backlog.hear_flushes()
            urgent = closing or self._backlog.flushes
            is_time = time.monotonic() - synced >= max(SYNC_SECONDS, due)
            self._cuts.cut(rows=urgent or is_time or self._backlog.wants_rows_taken)
            for cut in self._cuts:  # values need not wait for measurements, as rows do
                self._hold(cut)
            self._holding.collect()
            self._translate(urgent or self._freed > self._queue_bytes // 2)
            if urgent or is_time:
                start = time.monotonic()
                self.translator.sync()
                synced = time.monotonic()
                due = SYNC_SHARE * (synced - start)
            if self._next is None:
                self._backlog.answer()
            self._backlog.make_room()

    def _hold(self, cut: StepSegment) -> None:
        """Bring the values that were taken into memory."""
        for values in cut.values:
            self._holding.begin(values)
            cut.owned.append(values)
        cut.values.clear()

    def _translate(self, urgent: bool) -> None:
        """Hand over what was taken, in its order, as far as its measurements and values are there."""
        while True:
            if self._next is None:
                self._next = self._cuts.next(urgent)
            cut = self._next
            if cut is None:
                return
            self._hold(cut)  # it may have come a moment ago
            if any(values.data is None and not values.settled for values in cut.owned):
                return
            self._next = None
            self._hand_over(cut)
            self._cuts.done(cut)
            self._seen.add(cut.owned)
            freed, self._freed = self._freed, 0
            self._backlog.make_room(freed)

    def _hand_over(self, cut: StepSegment) -> None:
        self._stacks.update(cut.taken.stacks)
        if cut.size:
            piece = RowBlock(cut.step, cut.taken, cut.owned, self._late)
            self.translator.take(cut.step, RankRun(self.rank, BufferedStep(cut.step, [piece], self._stacks, cut.ends)))
            gone = sum(values is not None and values.data is None and values.size > 0 for values in piece.values)
            for _ in range(gone - sum(values.data is None for values in cut.owned)):
                self._lost("they were let go before the call that met them again was written")
            self._steps.add(cut.step)
            self._calls += len(cut.taken.calls)
            self._tensors += len(cut.taken.tensors)
        self._values += len(cut.owned)
        self._value_bytes += sum(values.size for values in cut.owned)
        if cut.ends:
            self.translator.step_over(cut.step)

    def _free(self, size: int) -> None:
        self._freed += size


class TranslatedValues:
    """Values that were translated, held for a while: the same tensor may be met again by the next call.

    The oldest go when there are too many bytes. First the taps are told to read such a tensor anew (`stale`); its bytes
    go once every row has been translated that may refer to it. A tap may have looked just before it was told, so that
    is waited for twice.
    """

    def __init__(self, cuts: StepSegments) -> None:
        self._cuts = cuts
        self._held: deque[TensorBytes] = deque()
        self._nbytes = 0
        self._going: deque[tuple[int, TensorBytes, bool]] = deque()  # from how many rows on

    def add(self, owned: list[TensorBytes]) -> None:
        """Hold these too, and let go of what is too much."""
        self._held += owned
        self._nbytes += sum(values.size for values in owned)
        while self._nbytes > SEEN_BYTES:
            values = self._held.popleft()
            self._nbytes -= values.size
            values.stale = True
            self._going.append((self._cuts.put, values, True))
        while self._going and self._going[0][0] <= self._cuts.received:
            _, values, again = self._going.popleft()
            if again:
                self._going.append((self._cuts.put + 1, values, False))
            else:
                values.settle(None)

    def clear(self) -> None:
        """Let go of all."""
        for values in (*self._held, *(values for _, values, _ in self._going)):
            values.settle(None)
        self._held.clear()
        self._going.clear()
        self._nbytes = 0
