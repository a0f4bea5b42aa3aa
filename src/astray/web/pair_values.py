"""The values of one pair in the page: histograms of both sides and of the difference, the worst elements, heat maps.

Two passes over the blocks of both tensors: one for the range of the numbers, the worst elements and the maps, one for
the histograms, which need the range. Of one run alone, its numbers take the role of the difference.
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


class ValueCharts(NamedTuple):
    """Parts of a detail; `heat` is None for a scalar or a sample."""

    histograms: Document | None
    worst: list[Document]
    heat: Document | None


def compare_values(reference: Elements, candidate: Elements) -> ValueCharts:
    """Two tensors of equally many elements. Raises RunError when their values cannot be read."""
    if reference.size != candidate.size:
        raise RunError(f"{reference.size:,} values cannot be laid beside {candidate.size:,}.")
    ranges, difference_range, worst = (ValueRange(), ValueRange()), ValueRange(), WorstElements()
    heat = HeatMap(reference.shape) if reference.kept.sampled < 0 else None
    begin = 0
    for block, left, right in _block_pairs(reference, candidate):
        difference = difference_of(left, right)
        sizes = np.abs(difference)
        for range_, numbers in zip((*ranges, difference_range), (left, right, difference), strict=True):
            range_.add(numbers)
        worst.add(begin, sizes, left, right)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    elements = [
        {"index": reference.index(position), "a": left, "b": right,
         "difference": difference_of(np.array([left]), np.array([right]))[0]}
        for position, left, right in worst.elements()
    ]  # fmt: skip
    return ValueCharts(
        _histograms(reference, candidate, ranges, difference_range),
        elements,
        None if heat is None else heat.document(reference.complex),
    )


def describe_values(values: Elements) -> ValueCharts:
    """One tensor alone: the largest elements instead of the worst, and a map of their sizes."""
    range_, worst = ValueRange(), WorstElements()
    heat = HeatMap(values.shape) if values.kept.sampled < 0 else None
    plan = list(blocks(values.shape))
    begin = 0
    for block, numbers in zip(plan, values.walk([block.size for block in plan]), strict=True):
        sizes = np.abs(numbers)
        sizes[np.isnan(sizes)] = np.inf
        range_.add(numbers)
        worst.add(begin, sizes, numbers)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    elements = [
        {"index": values.index(position), "a": value, "b": None, "difference": None}
        for position, value, _ in worst.elements()
    ]
    return ValueCharts(_histogram(values, range_), elements, None if heat is None else heat.document(values.complex))


def difference_of(reference: Floats, candidate: Floats) -> Floats:
    """candidate − reference; 0 where both are the same NaN or infinity, inf or −inf where only one is not finite.

    The difference of a NaN and a number is infinite, too.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = candidate - reference
    nonfinite = ~np.isfinite(difference)
    if nonfinite.any():
        same = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
        difference[nonfinite & same] = 0.0
        difference[np.isnan(difference)] = np.inf
    return difference


def _block_pairs(reference: Elements, candidate: Elements) -> Iterator[tuple[Block, Floats, Floats]]:
    plan = list(blocks(reference.shape))
    sizes = [block.size for block in plan]
    return zip(plan, reference.walk(sizes), candidate.walk(sizes), strict=True)


def _histograms(
    reference: Elements, candidate: Elements, ranges: tuple[ValueRange, ValueRange], difference_range: ValueRange
) -> Document | None:
    if ranges[0].empty and ranges[1].empty:
        return None
    integers = all(dtypes.find(side.dtype).kind in ("int", "bool") for side in (reference, candidate))
    edges = edges_of(*ranges[0].joined(ranges[1]), integers)
    sides = Histogram(edges), Histogram(edges)
    differences = None
    if not difference_range.empty:
        differences = Histogram(edges_of(difference_range.low, difference_range.high, integers))
    for _, left, right in _block_pairs(reference, candidate):
        sides[0].add(left)
        sides[1].add(right)
        if differences is not None:
            differences.add(difference_of(left, right))
    return {
        "edges": edges,
        "a": sides[0].counts,
        "b": sides[1].counts,
        "difference": None if differences is None else differences.document(),
        "log": is_steep(*sides),
        "nonfinite": {
            "a": ranges[0].nonfinite(),
            "b": ranges[1].nonfinite(),
            "difference": difference_range.nonfinite(),
        },
    }


def _histogram(values: Elements, range_: ValueRange) -> Document | None:
    if range_.empty:
        return None
    histogram = Histogram(edges_of(range_.low, range_.high, dtypes.find(values.dtype).kind in ("int", "bool")))
    for numbers in values.walk([block.size for block in blocks(values.shape)]):
        histogram.add(numbers)
    return {
        "edges": histogram.edges,
        "a": histogram.counts,
        "b": None,
        "difference": None,
        "log": is_steep(histogram),
        "nonfinite": {"a": range_.nonfinite(), "b": {}, "difference": {}},
    }


# -- heat maps ---------------------------------------------------------------------------------------------------------


CELLS = 64


class HeatMap:
    """Where in a tensor the difference is: its mean size over all axes but two, as maps of at most 64 × 64 cells.

    Which axis is the batch, the token, the head or the channel is not recorded, but their order is usual: so the pairs
    shown are the last two axes, the first two, and those of heads or tokens with channels.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._maps = [_Map(shape, rows, columns) for rows, columns in axis_pairs(shape)]

    def add(self, block: Block, sizes: Floats) -> None:
        """Adds the magnitudes of the differences in a block; inf where one side is not finite."""
        boxed = sizes.reshape(block.shape)
        for map_ in self._maps:
            map_.add(block, boxed)

    def document(self, complex: bool) -> Document | None:
        """The maps; None where there is nothing to draw."""
        if not self._maps:
            return None
        names = [str(axis) for axis in range(len(self.shape))]
        if complex:
            names[-1] = "real, imaginary"
        axes = [{"name": name, "size": size} for name, size in zip(names, self.shape, strict=True)]
        return {"axes": axes, "views": [map_.document() for map_ in self._maps]}


def axis_pairs(shape: tuple[int, ...]) -> list[tuple[int | None, int]]:
    """The pairs of axes that maps are drawn of, the most useful first; for a single axis None and that axis.

    >>> axis_pairs((8, 128, 512)), axis_pairs((1, 7)), axis_pairs((8, 12, 128, 64))
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


class _Map:
    """One map: sums of sizes in cells, each of several rows and columns where there are more than 64."""

    def __init__(self, shape: tuple[int, ...], rows: int | None, columns: int) -> None:
        self.axes = (rows, columns)
        self.sizes = (1 if rows is None else shape[rows], shape[columns])
        self.pooled = tuple(-(-size // CELLS) for size in self.sizes)
        self.cells = tuple(-(-size // fold) for size, fold in zip(self.sizes, self.pooled, strict=True))
        others = int(np.prod(shape, dtype=np.int64)) // (self.sizes[0] * self.sizes[1])
        self._elements_per_cell = np.outer(*(self._widths(axis) for axis in (0, 1))) * float(others)
        self._sums = np.zeros(self.cells)

    def _widths(self, axis: int) -> Floats:
        """How many rows or columns each cell has; the last may have fewer."""
        fold, size = self.pooled[axis], self.sizes[axis]
        return np.diff(np.append(np.arange(0, size, fold), size)).astype(np.float64)

    def add(self, block: Block, sizes: Floats) -> None:
        kept = [axis for axis in self.axes if axis is not None]
        with np.errstate(over="ignore"):  # of numbers near the dtype's largest: the cell is infinite
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
            values: list[float] = np.log10(self._sums / self._elements_per_cell).reshape(-1).tolist()
        return {
            "rows": self.axes[0],
            "columns": self.axes[1],
            "shape": self.cells,
            "values": [None if value == -np.inf else round(value, 2) for value in values],
            "pooled": self.pooled,
        }


def _folded(sums: Floats, axis: int, begin: int, fold: int) -> Floats:
    """The sums with each `fold` rows or columns added up, counted from the beginning of the tensor."""
    if fold == 1:
        return sums
    inside = np.arange(-(begin % fold), sums.shape[axis], fold)
    return np.add.reduceat(sums, np.maximum(inside, 0), axis=axis)


# -- histograms --------------------------------------------------------------------------------------------------------


BINS = 64
_STEEP = 100
"""The ratio of the largest to the smallest count that is not 0, from which counts are drawn on a log scale."""


_HALVES = 2.0**52
"""Below this a float64 is half-way between any two whole numbers. Above, bins are as wide as the float spacing."""


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

    def nonfinite(self) -> dict[str, int]:
        """How many were not finite, of each kind that occurs."""
        kinds = (("nan", self.nan), ("inf", self.above), ("-inf", self.below))
        return {name: count for name, count in kinds if count}


def edges_of(low: float, high: float, integers: bool) -> Floats:
    """The edges of the bins for numbers of this range; a few whole numbers have a bin each.

    Bins are never narrower than the spacing of the numbers: tensors that differ in a last bit have such a range.
    """
    if integers and high - low < BINS and max(abs(low), abs(high)) < _HALVES:
        return np.arange(low, high + 2) - 0.5
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    least = BINS * float(np.spacing(max(abs(low), abs(high)) / 2)) * 2
    half = max(half, least)
    largest = float(np.finfo(np.float64).max)
    edges = np.linspace(max(middle - half, -largest) / 2, min(middle + half, largest) / 2, BINS + 1) * 2
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)  # which rounding may have moved inside
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
        """Counts the finite numbers; all of them are between the edges."""
        finite = np.isfinite(numbers)
        if not finite.all():
            numbers = numbers[finite]
        self.counts += np.bincount(self._bins(numbers), minlength=len(self.counts))

    def _bins(self, numbers: Floats) -> npt.NDArray[np.int64]:
        """The bin of each number. The greatest is on the last edge, and belongs to the last bin.

        Bins are equally wide, so they are found by division; for numbers next to an edge the result is corrected.
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
    filled = [histogram.counts[histogram.counts > 0] for histogram in histograms]
    return any(len(counts) and counts.max() >= _STEEP * counts.min() for counts in filled)


# -- the worst elements ------------------------------------------------------------------------------------------------


MOST = 20


class WorstElements:
    """The elements with the largest differences, collected block by block: of equal ones the first. 0 is left out."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._sizes = np.empty(0)
        self._positions = np.empty(0, np.int64)
        self._values = np.empty((0, 2))

    def add(self, begin: int, sizes: Floats, *values: Floats) -> None:
        """Adds the sizes and the values of the elements from position `begin` on."""
        floor = self._sizes[-1] if len(self._sizes) == self._most else 0.0
        if not sizes.size or sizes.max() <= floor:
            return
        at = np.flatnonzero(sizes > floor)
        if len(at) > self._most:  # of those as large as the last, only the first: a stable sort of few decides below
            least = np.partition(sizes[at], len(at) - self._most)[len(at) - self._most]
            at = np.concatenate([at[sizes[at] > least], at[sizes[at] == least][: self._most]])
            at.sort()
        both = np.stack([side[at] for side in (values[0], values[-1])], axis=1)
        self._sizes = np.concatenate([self._sizes, sizes[at]])
        self._positions = np.concatenate([self._positions, at + begin])
        self._values = np.concatenate([self._values, both])
        order = np.argsort(-self._sizes, kind="stable")[: self._most]
        self._sizes, self._positions, self._values = self._sizes[order], self._positions[order], self._values[order]

    def elements(self) -> list[tuple[int, float, float]]:
        """Position and both values of each, the worst first."""
        return [
            (int(position), float(left), float(right))
            for position, (left, right) in zip(self._positions.tolist(), self._values.tolist(), strict=True)
        ]
