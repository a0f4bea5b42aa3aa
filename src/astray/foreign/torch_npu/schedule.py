"""Which steps are dumped: `schedule` says which, and `step_schedule` counts them as the program tells it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from astray.errors import UsageError

Schedule = Callable[[int], bool]


def schedule(begin: int = 0, end: int = sys.maxsize, stride: int = 1) -> Schedule:
    """The steps from `begin` to `end`, both of them included, and every `stride`-th of these.

    >>> [step for step in range(12) if schedule(4, 10, 2)(step)]
    [4, 6, 8, 10]
    """
    if begin < 0 or end < begin or stride < 1:
        raise UsageError(
            f"schedule({begin}, {end}, {stride}) has no step in it. It takes begin ≥ 0, end ≥ begin and stride ≥ 1."
        )
    return range(begin, end + 1, stride).__contains__


def every_step(step: int) -> bool:  # noqa: ARG001 - as a schedule has it
    """The schedule of those who give none."""
    return True


class StepSchedule:
    """Counts steps. Whoever wants to know is told of each: `step_schedule` is the one that programs use."""

    def __init__(self) -> None:
        self.step_num = 0
        self.listeners: list[Callable[[int], None]] = []

    def step(self) -> None:
        """A step is over."""
        self._go_to(self.step_num + 1)

    def reset_step(self) -> None:
        """Counting begins anew, as at the start of an epoch."""
        self._go_to(0)

    def _go_to(self, step: int) -> None:
        self.step_num = step
        for listener in self.listeners:
            listener(step)


step_schedule = StepSchedule()
