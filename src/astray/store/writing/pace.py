"""Which way of writing is the faster one now: through the page cache, or past it.

Into free memory the kernel copies faster than any disk writes; once that is full, or shared with others, it is slower
than giving the disk the bytes themselves. Neither can be known beforehand, so both are measured where they are used.
"""

from __future__ import annotations


class Pace:
    """The choice. The other way is tried again after a while, with a few bytes."""

    FIRST = 32 << 20  # buffered in any case: most recordings are shorter
    TRIAL = 32 << 20
    AGAIN = 2 << 30, 16 << 30  # bytes until the other way is tried again: at first, and at most
    MEMORY = 64 << 20  # bytes over which a speed is averaged

    def __init__(self) -> None:
        self.direct = False  # whether that is the faster way, as far as is known
        self._possible = True
        self._cost: dict[bool, float] = {}  # seconds for a byte
        self._trying = False  # the other way
        self._left = self.FIRST  # bytes until that changes
        self._interval = self.AGAIN[0]

    def refuse(self) -> None:
        """Say that there is no direct way."""
        self._possible = self.direct = self._trying = False

    def choose(self, nbytes: int) -> bool:
        """The way for the next bytes: whether they go directly."""
        if not self._possible:
            return False
        self._left -= nbytes
        if self._left < 0:
            self._trying = not self._trying
            self._left = self.TRIAL if self._trying else self._interval
            if not self._trying:
                self._interval = min(2 * self._interval, self.AGAIN[1])
        if not self._trying:
            self._follow()
        return self.direct != self._trying

    def took(self, direct: bool, nbytes: int, seconds: float) -> None:
        """Say what some bytes took."""
        weight = min(1.0, nbytes / self.MEMORY)
        cost = seconds / nbytes
        self._cost[direct] = cost * weight + self._cost.get(direct, cost) * (1 - weight)

    def _follow(self) -> None:
        """Go the faster way; when that is another than before, look at both more closely for a while."""
        if self._cost.get(not self.direct, float("inf")) < 0.9 * self._cost.get(self.direct, 0.0):
            self.direct = not self.direct
            self._left = self._interval = self.AGAIN[0]
