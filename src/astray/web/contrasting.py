"""What the values of one pair show: histograms of both sides and of the difference, the worst elements, heat maps.

Two passes over the blocks of both tensors: one for the range of the numbers, the worst and the maps, one for the
histograms, which need the range. Of one run alone, the same of its numbers in place of the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.stats import dtypes
from astray.web.elements import Block, Elements, blocks
from astray.web.wire import Document

Floats = npt.NDArray[np.float64]


class ContrastDocument(NamedTuple):
    """Parts of a detail; `heat` is None for a scalar or a sample."""

    histograms: Document | None
    worst: list[Document]
    heat: Document | None


def contrast(reference: Elements, candidate: Elements) -> ContrastDocument:
    """Two tensors of equally many elements. Raises RunError when their values cannot be read."""
    if reference.size != candidate.size:
        raise RunError(f"{reference.size:,} values cannot be laid beside {candidate.size:,}.")
    extents, gaps, worst = (ValueRange(), ValueRange()), ValueRange(), WorstElements()
    heat = HeatMap(reference.shape) if reference.kept.sampled < 0 else None
    begin = 0
    for block, one, other in _both(reference, candidate):
        gap = difference_of(one, other)
        sizes = np.abs(gap)
        for extent, numbers in zip((*extents, gaps), (one, other, gap), strict=True):
            extent.add(numbers)
        worst.add(begin, sizes, one, other)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    told = [
        {"index": reference.index(place), "a": one, "b": other,
         "difference": difference_of(np.array([one]), np.array([other]))[0]}
        for place, one, other in worst.found()
    ]  # fmt: skip
    return ContrastDocument(
        _histograms(reference, candidate, extents, gaps),
        told,
        None if heat is None else heat.document(reference.complex),
    )


def describe(values: Elements) -> ContrastDocument:
    """One tensor alone: the largest elements in place of the worst, and a map of where it is large."""
    extent, worst = ValueRange(), WorstElements()
    heat = HeatMap(values.shape) if values.kept.sampled < 0 else None
    plan = list(blocks(values.shape))
    begin = 0
    for block, numbers in zip(plan, values.walk([block.size for block in plan]), strict=True):
        sizes = np.abs(numbers)
        sizes[np.isnan(sizes)] = np.inf
        extent.add(numbers)
        worst.add(begin, sizes, numbers)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    told = [{"index": values.index(place), "a": one, "b": None, "difference": None} for place, one, _ in worst.found()]
    return ContrastDocument(_histogram(values, extent), told, None if heat is None else heat.document(values.complex))


def difference_of(reference: Floats, candidate: Floats) -> Floats:
    """candidate − reference; 0 where both are the same NaN or infinity, inf or −inf where only one is not finite.

    An infinite difference is how far a NaN is off, too: there is no number for it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        found = candidate - reference
    strange = ~np.isfinite(found)
    if strange.any():
        same = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
        found[strange & same] = 0.0
        found[np.isnan(found)] = np.inf
    return found


def _both(reference: Elements, candidate: Elements) -> Iterator[tuple[Block, Floats, Floats]]:
    plan = list(blocks(reference.shape))
    sizes = [block.size for block in plan]
    return zip(plan, reference.walk(sizes), candidate.walk(sizes), strict=True)


def _histograms(
    reference: Elements, candidate: Elements, extents: tuple[ValueRange, ValueRange], gaps: ValueRange
) -> Document | None:
    if extents[0].empty and extents[1].empty:
        return None
    whole = all(dtypes.find(side.dtype).kind in ("int", "bool") for side in (reference, candidate))
    edges = edges_of(*extents[0].joined(extents[1]), whole)
    sides = Histogram(edges), Histogram(edges)
    gap = None if gaps.empty else Histogram(edges_of(gaps.low, gaps.high, whole))
    for _, one, other in _both(reference, candidate):
        sides[0].add(one)
        sides[1].add(other)
        if gap is not None:
            gap.add(difference_of(one, other))
    return {
        "edges": edges,
        "a": sides[0].counts,
        "b": sides[1].counts,
        "difference": None if gap is None else gap.document(),
        "log": is_steep(*sides),
        "nonfinite": {"a": extents[0].strange(), "b": extents[1].strange(), "difference": gaps.strange()},
    }


def _histogram(values: Elements, extent: ValueRange) -> Document | None:
    if extent.empty:
        return None
    found = Histogram(edges_of(extent.low, extent.high, dtypes.find(values.dtype).kind in ("int", "bool")))
    for numbers in values.walk([block.size for block in blocks(values.shape)]):
        found.add(numbers)
    return {
        "edges": found.edges,
        "a": found.counts,
        "b": None,
        "difference": None,
        "log": is_steep(found),
        "nonfinite": {"a": extent.strange(), "b": {}, "difference": {}},
    }


# -- heat maps ---------------------------------------------------------------------------------------------------------


CELLS = 64


class HeatMap:
    """Where in a tensor the difference sits: its mean size over all axes but two, as maps of at most 64 × 64 cells.

    Which axis is the batch, the token, the head or the channel is not recorded, but the order is customary: so the
    pairs shown are the last two axes, the first two, and those that cross heads or tokens with channels.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._views = [_View(shape, rows, columns) for rows, columns in pairs_of(shape)]

    def add(self, block: Block, sizes: Floats) -> None:
        """Add the sizes of the elements of a block: not negative, inf where one side is not finite."""
        boxed = sizes.reshape(block.shape)
        for view in self._views:
            view.add(block, boxed)

    def document(self, complex: bool) -> Document | None:
        """The maps; None where there is nothing to draw."""
        if not self._views:
            return None
        names = [str(axis) for axis in range(len(self.shape))]
        if complex:
            names[-1] = "real, imaginary"
        axes = [{"name": name, "size": size} for name, size in zip(names, self.shape, strict=True)]
        return {"axes": axes, "views": [view.document() for view in self._views]}


def pairs_of(shape: tuple[int, ...]) -> list[tuple[int | None, int]]:
    """Which axes are shown against each other, the most telling pair first; of a single one None and that one.

    >>> pairs_of((8, 128, 512)), pairs_of((1, 7)), pairs_of((8, 12, 128, 64))
    ([(1, 2), (0, 1), (0, 2)], [(None, 1)], [(2, 3), (0, 2), (1, 3), (0, 1)])
    """
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if 0 in shape or not axes:
        return []
    if len(axes) == 1:
        return [(None, axes[0])]
    chosen = [(axes[-2], axes[-1]), (axes[0], axes[-2]), (axes[1], axes[-1]), (axes[0], axes[1])]
    if len(axes) == 3:
        chosen[2] = (axes[0], axes[2])
    return [pair for pair in dict.fromkeys(chosen) if pair[0] < pair[1]]


class _View:
    """One map: sums of sizes in cells, which are made of several rows and columns where there are more than 64."""

    def __init__(self, shape: tuple[int, ...], rows: int | None, columns: int) -> None:
        self.axes = (rows, columns)
        self.sizes = (1 if rows is None else shape[rows], shape[columns])
        self.pooled = tuple(-(-size // CELLS) for size in self.sizes)
        self.cells = tuple(-(-size // fold) for size, fold in zip(self.sizes, self.pooled, strict=True))
        others = int(np.prod(shape, dtype=np.int64)) // (self.sizes[0] * self.sizes[1])
        self._each = np.outer(*(self._widths(axis) for axis in (0, 1))) * float(others)
        self._sums = np.zeros(self.cells)

    def _widths(self, axis: int) -> Floats:
        """How many rows or columns each cell has; the last may have fewer."""
        fold, size = self.pooled[axis], self.sizes[axis]
        return np.diff(np.append(np.arange(0, size, fold), size)).astype(np.float64)

    def add(self, block: Block, sizes: Floats) -> None:
        kept = [axis for axis in self.axes if axis is not None]
        with np.errstate(over="ignore"):  # numbers near the largest: the cell is infinite
            summed = sizes.sum(axis=tuple(axis for axis in range(sizes.ndim) if axis not in kept))
        if self.axes[0] is None:
            summed = summed[np.newaxis]
        begin = [0 if axis is None else block.origin[axis] for axis in self.axes]
        for axis in (0, 1):
            summed = _folded(summed, axis, begin[axis], self.pooled[axis])
        at = [first // fold for first, fold in zip(begin, self.pooled, strict=True)]
        self._sums[at[0] : at[0] + summed.shape[0], at[1] : at[1] + summed.shape[1]] += summed

    def document(self) -> Document:
        with np.errstate(divide="ignore"):
            values: list[float] = np.log10(self._sums / self._each).reshape(-1).tolist()
        return {
            "rows": self.axes[0],
            "columns": self.axes[1],
            "shape": self.cells,
            "values": [None if value == -np.inf else round(value, 2) for value in values],
            "pooled": self.pooled,
        }


def _folded(sums: Floats, axis: int, begin: int, fold: int) -> Floats:
    """The sums with so many rows or columns made one, counted from the beginning of the tensor."""
    if fold == 1:
        return sums
    inside = np.arange(-(begin % fold), sums.shape[axis], fold)
    return np.add.reduceat(sums, np.maximum(inside, 0), axis=axis)


# -- histograms --------------------------------------------------------------------------------------------------------


BINS = 64
_STEEP = 100
"""From here on between the fullest bin and the emptiest that is not empty, counts are best drawn on a log scale."""


_HALVES = 2.0**52
"""Below this a float64 lies half-way between any two whole numbers. Above, bins are as wide as floats are apart."""


class ValueRange:
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

    def joined(self, other: ValueRange) -> tuple[float, float]:
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
    """Counts of numbers between edges, added up block by block. What is not finite is in no bin."""

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

        Bins are equally wide, so that dividing finds them, but for numbers beside an edge: those are corrected.
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


# -- the worst elements ------------------------------------------------------------------------------------------------


MOST = 20


class WorstElements:
    """The places with the greatest sizes, found block by block: of equal ones the first. Sizes of 0 are left out."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._sizes = np.empty(0)
        self._places = np.empty(0, np.int64)
        self._values = np.empty((0, 2))

    def add(self, begin: int, sizes: Floats, *values: Floats) -> None:
        """The sizes and the values of the elements from a place on."""
        floor = self._sizes[-1] if len(self._sizes) == self._most else 0.0
        if not sizes.size or sizes.max() <= floor:
            return
        found = np.flatnonzero(sizes > floor)
        if len(found) > self._most:  # of those as large as the last, the first: a stable sort of few decides
            least = np.partition(sizes[found], len(found) - self._most)[len(found) - self._most]
            found = np.concatenate([found[sizes[found] > least], found[sizes[found] == least][: self._most]])
            found.sort()
        both = np.stack([one[found] for one in (values[0], values[-1])], axis=1)
        self._sizes = np.concatenate([self._sizes, sizes[found]])
        self._places = np.concatenate([self._places, found + begin])
        self._values = np.concatenate([self._values, both])
        order = np.argsort(-self._sizes, kind="stable")[: self._most]
        self._sizes, self._places, self._values = self._sizes[order], self._places[order], self._values[order]

    def found(self) -> list[tuple[int, float, float]]:
        """Place and both values of each, the worst first."""
        return [
            (int(place), float(one), float(other))
            for place, (one, other) in zip(self._places.tolist(), self._values.tolist(), strict=True)
        ]
