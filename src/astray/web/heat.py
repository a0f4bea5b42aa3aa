"""Where in a tensor the difference sits: its mean size over all axes but two, as maps of at most 64 × 64 cells.

Which axis is the batch, the token, the head or the channel is not recorded, but the order is customary: so the pairs
shown are the last two axes, the first two, and those that cross heads or tokens with channels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.web.elements import Block
from astray.web.wire import Document

Floats = npt.NDArray[np.float64]

CELLS = 64


class Heat:
    """Maps of a tensor of this shape."""

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
        with np.errstate(over="ignore"):  # numbers near the largest: the cell is as hot as can be
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
