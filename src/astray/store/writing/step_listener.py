"""Shows the rows of a flight recorder or a run writer to a listener, such as a guard, step by step.

A step is shown when it is over, in the recorder's thread. The program may wait for that, and goes on when the recorder
cannot answer any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from astray.store.deferred import DeferredMeasurements
from astray.store.writing.record_queue import WakeEvent
from astray.store.writing.step_buffer import BufferedStep, KeptBytes, RowBlock, StepRingBuffer

LOOK_SECONDS = 1.0  # how often a waiting thread checks that the recorder can still answer

Listener = Callable[[BufferedStep], None]


class StepListener:
    """The steps that are held, and the listener that is shown each of them.

    remember, most_bytes: how much is held, as for `StepRingBuffer`.
    on_step: given the rows of each step when it is over; also those of a part of a step that has to go before it is
        over, and what is left when the recording ends.
    lack: called with what is missing, and why, when the listener fails.
    can_answer: whether the recorder's thread is alive, and is not the caller.
    kept: gives the bytes of values that are not in memory any more.
    """

    def __init__(
        self,
        remember: int,
        most_bytes: int,
        on_step: Listener | None,
        *,
        late: DeferredMeasurements | None,
        lack: Callable[[str, str], None],
        can_answer: Callable[[], bool],
        kept: KeptBytes | None = None,
    ) -> None:
        self.memory = StepRingBuffer(remember, most_bytes, self._part)
        self._on_step = on_step
        self._late = late
        self._lack = lack
        self._can_answer = can_answer
        self._kept = kept
        self._seen = 0  # steps that were shown
        self._ended = False
        self._waiting: list[WakeEvent] = []  # of threads that wait for a step to be shown

    # -- for any thread ----------------------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether measurements come from a device, for which the program would have to wait."""
        return self._late is not None and self._late.is_used

    def has_seen(self, step: int) -> bool:
        """Whether a step, counted from 0, is over and was shown."""
        return step < self._seen

    def wait_until_seen(self, step: int, timeout: float | None = None) -> bool:
        """Wait until a step was shown; False when that takes longer than `timeout` seconds, or will never happen."""
        late = None if timeout is None else time.monotonic() + timeout
        wake = WakeEvent()
        self._waiting.append(wake)
        while step >= self._seen and not self._ended and self._can_answer():
            left = None if late is None else late - time.monotonic()
            if left is not None and left <= 0:
                break
            wake.wait(LOOK_SECONDS if left is None else min(left, LOOK_SECONDS))
        self._waiting.remove(wake)
        return step < self._seen

    # -- for the recorder's thread -----------------------------------------------------------------------------------

    def step_over(self, step: int) -> None:
        """Show a step, all of whose rows are in memory."""
        pieces, whole = self.memory.of_step(step), self.memory.is_whole(step)
        self.memory.step_over(step)
        if pieces:
            self._show(step, pieces, whole)
        self._seen = step + 1
        self._ring()

    def rest(self, step: int) -> None:
        """Show what there is of a step that will never be over."""
        if pieces := self.memory.of_step(step):
            self._show(step, pieces, False)

    def end(self) -> None:
        """Nothing will be shown any more."""
        self._ended = True
        self._ring()

    def _part(self, piece: RowBlock) -> None:
        """Show a block that has to be dropped before its step is over."""
        self._show(piece.step, [piece], False)

    def _show(self, step: int, pieces: list[RowBlock], whole: bool) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(BufferedStep(step, pieces, self.memory.stacks, whole, self._kept))
        except Exception as error:  # noqa: BLE001 - the recording goes on
            self._lack("the check of a step", f"{type(error).__name__}: {error}")

    def _ring(self) -> None:
        for wake in list(self._waiting):
            wake.set()
