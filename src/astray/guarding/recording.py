"""The recording that a guard looks at: a recorder that says when a step is over."""

from __future__ import annotations

from collections.abc import Callable

from astray.capture.adapters import Adapter
from astray.capture.recorder import Recorder

CALL_GRADIENTS = "the gradients that pass through calls"
"""What a guard leaves out while nothing is wrong, as the list of what was missed has it."""


class Recording(Recorder):
    """Calls `after_step` at the end of each step, and counts them."""

    after_step: Callable[[], None]
    count = 0

    def read_call_gradients(self, on: bool) -> None:
        """Reads the gradients that pass through calls from the next call on, or those of parameters alone.

        That they are not read stands in the run, once for each time.
        """
        engine = self._engine
        if engine is not None and engine.reads_call_gradients != on:
            engine.reads_call_gradients = on
            if not on:
                engine.missed(CALL_GRADIENTS, "a guard reads those of parameters alone while nothing is wrong")

    def step(self) -> None:
        if self._engine is not None and not self._engine.belongs_here():
            return
        super().step()
        self.count += 1
        self.after_step()

    def is_scaled(self) -> bool:
        """Whether a loss of this step was scaled by a GradScaler."""
        return self._engine is not None and self._engine.scaled

    @property
    def has_just_ended(self) -> bool:
        """Whether a step has ended and nothing was called since."""
        return self.count > 0 and self._engine is not None and not self._engine.has_begun


class Chosen:
    """An adapter in place of a model."""

    def __init__(self, it: Adapter) -> None:
        self.it = it
