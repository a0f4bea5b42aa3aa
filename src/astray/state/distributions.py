"""How the elements of tensors are distributed, counted a block at a time: what plots are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from astray.errors import StateError
from astray.state.base import Base
from astray.state.blocks import blocks
from astray.state.measurement import unite
from astray.state.measuring import measure
from astray.state.sharded import is_shared_out

Floats = npt.NDArray[np.float64]


class Distribution(NamedTuple):
    """Counts between edges, and how many elements have no place there: NaN, infinity, and 0 on a logarithmic scale."""

    counts: npt.NDArray[np.int64]
    edges: Floats
    left_out: int

    @property
    def cumulative(self) -> Floats:
        """The share of the counted elements up to each edge, from 0 to 1."""
        total = max(int(self.counts.sum()), 1)
        return np.concatenate([[0.0], np.cumsum(self.counts) / total])


def distribution(state: Base, names: Sequence[str], bins: int, log: bool) -> Distribution:
    """Count the elements of these parameters in equal bins; with `log` their magnitudes, in bins of equal ratio."""
    found = unite(list(measure(state, names).values())).moments
    low, high = (found.absmin, found.absmax) if log else (found.min, found.max)
    if log:
        # 0 has no logarithm; the smallest magnitude besides it is not known, and 16 decades show all that matters.
        low = low if low > 0 else high * 1e-16
    if not math.isfinite(low) or (log and high == 0):
        return Distribution(np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1), found.count)
    edges = np.geomspace(low, high, bins + 1) if log and low < high else _edges(low, high, bins)
    counts = np.zeros(bins, np.int64)
    for values in numbers(state, names):
        kept = np.abs(values) if log else values
        counts += np.histogram(kept[np.isfinite(kept)], edges)[0]
    return Distribution(counts, edges, found.count - int(counts.sum()))


def numbers(state: Base, names: Sequence[str]) -> Iterator[Floats]:
    """The elements of these parameters in order, as float64, a block at a time."""
    for name in names:
        value = state[name]
        if is_shared_out(value):
            raise StateError(f"{name!r} is shared out among processes. Plot value.full_tensor() instead.")
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        if tensor.is_complex():
            raise StateError(f"{name!r} is complex. Plot its magnitudes: state.abs().")
        for block in blocks(tensor.detach()):
            yield block.to("cpu", torch.float64).numpy()


def image(values: Iterator[Floats], rows: int, columns: int, size: int) -> Floats:
    """The means of elements in the cells of a smaller picture; `size` bounds both of its sides."""
    height, width = min(rows, size), min(columns, size)
    sums, counts = np.zeros(height * width), np.zeros(height * width)
    start = 0
    for block in values:
        place = np.arange(start, start + block.size)
        cell = (place // columns * height // rows) * width + place % columns * width // columns
        sums += np.bincount(cell, block, height * width)
        counts += np.bincount(cell, minlength=height * width)
        start += block.size
    with np.errstate(invalid="ignore"):  # cells of the last row that nothing falls into
        return (sums / counts).reshape(height, width)


def _edges(low: float, high: float, bins: int) -> Floats:
    if low == high:  # as numpy does for one value
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)
