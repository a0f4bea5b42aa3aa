"""Numbers that are suddenly far larger than they were: losses, and the norm of all gradients.

What is normal is the median of the last values, which one outlier does not move. Until there are some, nothing is
a spike.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.store import BufferedStep, RankRun, Table

WINDOW = 50
LEAST = 8
"""Values that must have been seen before one can stand out."""


class SpikeDetector:
    """Follows one number. A value is a spike when its magnitude is more than `factor` times the usual one."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=WINDOW)

    def usual(self, value: float) -> float | None:
        """The usual magnitude, if this value is a spike; None if it is not, or is not finite."""
        if not math.isfinite(value):
            return None
        usual = median(self._last) if len(self._last) >= LEAST else math.inf
        if abs(value) > self._factor * usual and usual > 0:
            return usual
        self._last.append(abs(value))
        return None


class SpikeMonitor:
    """Follows the norm of all gradients, the scalar results of outermost modules, and losses given to it.

    Gives a sentence for each value that stands out.
    """

    def __init__(self, factor: float) -> None:
        self._numbers: defaultdict[str, SpikeDetector] = defaultdict(lambda: SpikeDetector(factor))

    def look(self, rows: BufferedStep) -> list[str]:
        """Looks at the rows of a step, losses first."""
        run = RankRun(0, rows)
        if (run.call_rows < 0).any():  # a part of a step, and not its first
            return []
        of = run.calls, run.tensors, run.call_rows
        found = [said for name, value in _scalars(*of) for said in self.loss(value, rows.step, name)]
        norm = _gradient_norm(*of) if rows.whole else None
        usual = None if norm is None else self._numbers["gradients"].usual(norm)
        if norm is not None and usual is not None:
            found.append(
                f"The gradients of step {rows.step} have a norm of {norm:.4g}, {norm / usual:,.0f} times the usual "
                f"{usual:.4g}. Look at the batch of that step, at the loss, and at what clips the gradients."
            )
        return found

    def loss(self, value: float, step: int, name: str = "The loss") -> list[str]:
        """Looks at one value of a loss."""
        usual = self._numbers[name].usual(value)
        if usual is None:
            return []
        return [
            f"{name} of step {step} is {value:.4g}, {abs(value) / usual:,.0f} times the usual {usual:.4g}. Look at the "
            "batch of that step, and at the learning rate."
        ]


def _gradient_norm(calls: Table, tensors: Table, call: npt.NDArray[Any]) -> float | None:
    """The norm of the gradients of all parameters as they were last; None without any, or when it is not finite."""
    kind, path = calls.coded("kind"), tensors.coded("path")
    at = np.flatnonzero((kind.codes[call] == kind.code("parameter")) & (path.codes == path.code("grad")))
    if tensors.numbers("nan")[at].any() or tensors.numbers("inf")[at].any():
        return None
    site = calls.coded("site").codes[call[at]]
    last = dict(zip(site.tolist(), tensors.numbers("l2")[at].tolist(), strict=True))
    return math.hypot(*last.values()) if last else None


def _scalars(calls: Table, tensors: Table, call: npt.NDArray[Any]) -> Iterator[tuple[str, float]]:
    """The results of outermost modules that are a single number, each with a name."""
    kind, phase, role = calls.coded("kind"), calls.coded("phase"), tensors.coded("role")
    outermost = (kind.codes == kind.code("module")) & (phase.codes == phase.code("forward")) & ~calls.valid("parent")
    single = (tensors.numbers("count") == 1) & (role.codes == role.code("output"))
    for row in np.flatnonzero(single & outermost[call]).tolist():
        path = tensors["path"][row]
        part = "" if path == "out" else f" ({path})"
        yield f"The output of {calls['site'][call[row]]}{part}", float(tensors.numbers("mean")[row])
