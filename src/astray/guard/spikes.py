"""A number that is suddenly far larger than it was: of a loss, or of the norm of all gradients.

What is normal is the median of the last values, which one outlier does not move. Until there are some, nothing is
a spike.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 50
LEAST = 8
"""So many values must have been seen before one can stand out."""


class Spikes:
    """Follows one number. A value is a spike when its magnitude is more than `factor` times the usual one."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=WINDOW)

    def usual(self, value: float) -> float | None:
        """The usual magnitude, if this value is a spike; None if it is not. What is not finite is no spike."""
        if not math.isfinite(value):
            return None
        usual = median(self._last) if len(self._last) >= LEAST else math.inf
        if abs(value) > self._factor * usual and usual > 0:
            return usual
        self._last.append(abs(value))
        return None
