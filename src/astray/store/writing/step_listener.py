"""Shows the rows of a flight recorder or a run writer to a callback, such as a guard's, step by step.

A step is shown when it is over, in the recorder's thread. The program may wait for that, and goes on when that thread
is not alive any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from astray.store.deferred import DeferredMeasurements
from astray.store.writing.record_queue import WakeEvent
from astray.store.writing.step_buffer import BufferedStep, ReadValues, RowBlock, StepRingBuffer

POLL_SECONDS = 1.0  # how often a waiting thread checks that the recorder is still alive

StepCallback = Callable[[BufferedStep], None]


class StepListener:
    """The steps that are held, and the callback that is shown each of them.

    remember, most_bytes: how much is held, as for `StepRingBuffer`.
    on_step: receives the rows of each step when it is over; also those of a part of a step that has to be evicted
        before it is over, and what is left when the recording ends.
    note_missing: called with what is missing, and why, when the callback fails.
    is_responsive: whether the recorder's thread is alive, and is not the caller.
    read_values: reads the bytes of values that are not in memory any more.
    """

    def __init__(
        self,
        remember: int,
        most_bytes: int,
        on_step: StepCallback | None,
        *,
        deferred: DeferredMeasurements | None,
        note_missing: Callable[[str, str], None],
        is_responsive: Callable[[], bool],
        read_values: ReadValues | None = None,
    ) -> None:
        self.memory = StepRingBuffer(remember, most_bytes, self._show_evicted)
        self._on_step = on_step
        self._deferred = deferred
        self._note_missing = note_missing
        self._is_responsive = is_responsive
        self._read_values = read_values
        self._shown = 0  # steps that were shown
        self._ended = False
        self._waiting: list[WakeEvent] = []  # of threads that wait for a step to be shown

    # -- for any thread ----------------------------------------------------------------------------------------------

    @property
    def is_asynchronous(self) -> bool:
        """Whether measurements come from a device, for which the program would have to wait."""
        return self._deferred is not None and self._deferred.is_used

    def was_shown(self, step: int) -> bool:
        """Whether a step, counted from 0, is over and was shown."""
        return step < self._shown

    def wait_until_shown(self, step: int, timeout: float | None = None) -> bool:
        """Wait until a step was shown; False when that takes longer than `timeout` seconds, or will never happen."""
        deadline = None if timeout is None else time.monotonic() + timeout
        wake = WakeEvent()
        self._waiting.append(wake)
        while step >= self._shown and not self._ended and self._is_responsive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            wake.wait(POLL_SECONDS if left is None else min(left, POLL_SECONDS))
        self._waiting.remove(wake)
        return step < self._shown

    # -- for the recorder's thread -----------------------------------------------------------------------------------

    def end_step(self, step: int) -> None:
        """Show a step, all of whose rows are in memory."""
        blocks, whole = self.memory.of_step(step), self.memory.is_whole(step)
        self.memory.end_step(step)
        if blocks:
            self._show(step, blocks, whole)
        self._shown = step + 1
        self._wake_waiters()

    def show_unfinished(self, step: int) -> None:
        """Show what was recorded of a step that never ended."""
        if blocks := self.memory.of_step(step):
            self._show(step, blocks, False)

    def end(self) -> None:
        """Nothing will be shown any more."""
        self._ended = True
        self._wake_waiters()

    def _show_evicted(self, block: RowBlock) -> None:
        """Show a block that has to be dropped before its step is over."""
        self._show(block.step, [block], False)

    def _show(self, step: int, blocks: list[RowBlock], whole: bool) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(BufferedStep(step, blocks, self.memory.stacks, whole, self._read_values))
        except Exception as error:  # noqa: BLE001 - the recording goes on
            self._note_missing("the check of a step", f"{type(error).__name__}: {error}")

    def _wake_waiters(self) -> None:
        for wake in list(self._waiting):
            wake.set()
