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
from astray.store.formats import TranslatorFactory, lost_as_missed
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo, now
from astray.store.writing.background_writer import QUEUE_BYTES, BackgroundWriter
from astray.store.writing.buffer_pool import ArrivingValues
from astray.store.writing.record_queue import StepSegment, StepSegments
from astray.store.writing.step_buffer import BufferedStep, RowBlock

if TYPE_CHECKING:
    from astray.records import Frame

SYNC_SECONDS = 0.2  # rows wait no longer than this to be in the files
SYNC_SHARE = 10  # unless to bring them up to date takes a tenth of the time or more
SEEN_BYTES = 128 << 20  # of values that were translated and may be met again, in the rows of the next call


Positions = Callable[[int, int], npt.NDArray[np.int64]]
"""Chooses the elements of a sample: of how many, and how many of them."""


def live_writer(make: TranslatorFactory, positions: Positions = sample_positions) -> partial[LiveWriter]:
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
        deferred: DeferredMeasurements | None = None,
        make: TranslatorFactory,
        positions: Positions = sample_positions,
    ) -> None:
        super().__init__(path, rank, queue_bytes, deferred)
        self.positions = positions  # type: ignore[assignment]
        self.translator = make(self.path, rank, info, overwrite=overwrite)
        self._queue_bytes = queue_bytes
        self._arriving = ArrivingValues(self._free, self._lost)
        self._segments = StepSegments(self._queue, deferred)
        self._next: StepSegment | None = None  # measured, and perhaps waiting for its values
        self._stacks: dict[int, list[Frame]] = {}
        self._seen = TranslatedValues(self._segments)
        self._freed = 0  # bytes of the queue that came into memory and are not translated yet
        self._calls = self._tensors = self._values = self._value_bytes = 0
        self._steps: set[int] = set()
        self._start()

    # -- for the program ---------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """Say that a step is over. Waits when the translator is far behind."""
        if self._open:
            self._segments.cut(rows=True, ends=True)
            self._start_fetch()
            self._queue.wake.set()
            self._queue.wait_for(lambda: self._segments.has_room)

    def discard(self) -> None:
        """Close. What the translator had begun is its own, and stays."""
        self.close()

    def _finish(self, ended: str) -> None:
        missed = [*self._all_missed(), *lost_as_missed(self.translator.lost, "this format")]
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
            self._queue.drop()
            self._buffers.close()

    def _sentence(self, error: Exception) -> str:
        return (
            f"Writing {self.path} stopped: {type(error).__name__}: {error}. The program goes on; what was written "
            "before can be read."
        )

    def _translate_until_closed(self) -> None:
        synced, due = time.monotonic(), 0.0
        closing = False
        while not closing or self._next is not None:
            self._queue.wake.wait(SYNC_SECONDS)
            closing = self._closed  # read before taking: what was handed over before closing is still taken
            self._queue.take_flushes()
            urgent = closing or self._queue.flushes
            is_time = time.monotonic() - synced >= max(SYNC_SECONDS, due)
            self._segments.cut(rows=urgent or is_time or self._queue.wants_rows_taken)
            for segment in self._segments:  # values need not wait for measurements, as rows do
                self._hold(segment)
            self._arriving.collect()
            self._translate(urgent or self._freed > self._queue_bytes // 2)
            if urgent or is_time:
                start = time.monotonic()
                self.translator.sync()
                synced = time.monotonic()
                due = SYNC_SHARE * (synced - start)
            if self._next is None:
                self._queue.complete_flushes()
            self._queue.make_room()

    def _hold(self, segment: StepSegment) -> None:
        """Bring the values that were taken into memory."""
        for values in segment.values:
            self._arriving.begin(values)
            segment.owned.append(values)
        segment.values.clear()

    def _translate(self, urgent: bool) -> None:
        """Hand over what was taken, in its order, as far as its measurements and values are there."""
        while True:
            if self._next is None:
                self._next = self._segments.next(urgent)
            segment = self._next
            if segment is None:
                return
            self._hold(segment)  # it may have come a moment ago
            if any(values.data is None and not values.resolved for values in segment.owned):
                return
            self._next = None
            self._hand_over(segment)
            self._segments.done(segment)
            self._seen.add(segment.owned)
            freed, self._freed = self._freed, 0
            self._queue.make_room(freed)

    def _hand_over(self, segment: StepSegment) -> None:
        self._stacks.update(segment.rows.stacks)
        if segment.size:
            block = RowBlock(segment.step, segment.rows, segment.owned, self._deferred)
            self.translator.take(
                segment.step, RankRun(self.rank, BufferedStep(segment.step, [block], self._stacks, segment.ends))
            )
            gone = sum(values is not None and values.data is None and values.size > 0 for values in block.values)
            for _ in range(gone - sum(values.data is None for values in segment.owned)):
                self._lost("they were let go before the call that met them again was written")
            self._steps.add(segment.step)
            self._calls += len(segment.rows.calls)
            self._tensors += len(segment.rows.tensors)
        self._values += len(segment.owned)
        self._value_bytes += sum(values.size for values in segment.owned)
        if segment.ends:
            self.translator.end_step(segment.step)

    def _free(self, size: int) -> None:
        self._freed += size


class TranslatedValues:
    """Values that were translated, held for a while: the same tensor may be met again by the next call.

    The oldest go when there are too many bytes. First the taps are told to read such a tensor anew (`stale`); its bytes
    go once every row has been translated that may refer to it. A tap may have looked just before it was told, so that
    is waited for twice.
    """

    def __init__(self, segments: StepSegments) -> None:
        self._segments = segments
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
            self._going.append((self._segments.rows_put, values, True))
        while self._going and self._going[0][0] <= self._segments.rows_done:
            _, values, again = self._going.popleft()
            if again:
                self._going.append((self._segments.rows_put + 1, values, False))
            else:
                values.resolve(None)

    def clear(self) -> None:
        """Let go of all."""
        for values in (*self._held, *(values for _, values, _ in self._going)):
            values.resolve(None)
        self._held.clear()
        self._going.clear()
        self._nbytes = 0
