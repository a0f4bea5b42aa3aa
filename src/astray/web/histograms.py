"""How the numbers of a tensor are spread: counts in at most 64 bins, added up block by block.

What is not finite is in no bin; it is counted apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.web.wire import Document

Floats = npt.NDArray[np.float64]

BINS = 64
_STEEP = 100
"""From here on between the fullest bin and the emptiest that is not empty, counts are best drawn on a log scale."""


_HALVES = 2.0**52
"""Below this a float64 lies half-way between any two whole numbers. Above, bins are as wide as floats are apart."""


class Extent:
    """The least and the greatest finite number seen, and how many were not finite."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.nan = self.above = self.below = 0

    def add(self, numbers: Floats) -> None:
        low, high = float(numbers.min()), float(numbers.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            self.nan += int(np.isnan(numbers).sum())
            self.above += int((numbers == np.inf).sum())
            self.below += int((numbers == -np.inf).sum())
            finite = numbers[np.isfinite(numbers)]
            if not len(finite):
                return
            low, high = float(finite.min()), float(finite.max())
        self.low, self.high = min(self.low, low), max(self.high, high)

    @property
    def empty(self) -> bool:
        """Whether there was no finite number."""
        return self.low > self.high

    def joined(self, other: Extent) -> tuple[float, float]:
        """The range that holds both."""
        return min(self.low, other.low), max(self.high, other.high)

    def strange(self) -> dict[str, int]:
        """How many were not finite, of each kind that occurs."""
        kinds = (("nan", self.nan), ("inf", self.above), ("-inf", self.below))
        return {name: count for name, count in kinds if count}


def edges_of(low: float, high: float, whole: bool) -> Floats:
    """The edges of the bins for numbers of this range; of a few whole numbers each has a bin of its own.

    Bins are never narrower than the numbers are apart: tensors that differ in a last bit have such a range.
    """
    if whole and high - low < BINS and max(abs(low), abs(high)) < _HALVES:
        return np.arange(low, high + 2) - 0.5
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    least = BINS * float(np.spacing(max(abs(low), abs(high)) / 2)) * 2
    half = max(half, least)
    largest = float(np.finfo(np.float64).max)
    edges = np.linspace(max(middle - half, -largest) / 2, min(middle + half, largest) / 2, BINS + 1) * 2
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # which rounding may have brought inside
    return edges


class Histogram:
    """Counts of numbers between edges."""

    def __init__(self, edges: Floats) -> None:
        self.edges = edges
        self.counts = np.zeros(len(edges) - 1, np.int64)
        with np.errstate(over="ignore"):
            scale = len(self.counts) / (edges[-1] - edges[0])
        self._scale = float(scale) if np.isfinite(scale) else 0.0  # 0 too where the range is beyond float64

    def add(self, numbers: Floats) -> None:
        """Count those that are finite; all of them lie between the edges."""
        finite = np.isfinite(numbers)
        if not finite.all():
            numbers = numbers[finite]
        self.counts += np.bincount(self._bins(numbers), minlength=len(self.counts))

    def _bins(self, numbers: Floats) -> npt.NDArray[np.int64]:
        """The bin of each number. The greatest lies on the last edge, and belongs to the last bin.

        Bins are equally wide, so that dividing finds them, but for numbers beside an edge: those are put right.
        """
        last = len(self.counts) - 1
        if not self._scale:
            return np.clip(np.searchsorted(self.edges, numbers, "right") - 1, 0, last)
        at: npt.NDArray[np.int64] = ((numbers - self.edges[0]) * self._scale).astype(np.int64)
        np.clip(at, 0, last, out=at)
        at -= numbers < self.edges[at]
        at += (numbers >= self.edges[at + 1]) & (at < last)
        return at

    def document(self) -> Document:
        return {"edges": self.edges, "counts": self.counts}


def is_steep(*histograms: Histogram) -> bool:
    """Whether counts are so different that a linear scale would show one bar only."""
    filled = [one.counts[one.counts > 0] for one in histograms]
    return any(len(counts) and counts.max() >= _STEEP * counts.min() for counts in filled)
