"""Pictures of states with matplotlib, which is an extra: histograms, distribution functions, heat maps, lines by layer.

Every method returns a matplotlib figure, which no window shows by itself, and writes it to `path` if given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from astray.errors import StateError
from astray.state.describe import described
from astray.state.mapping import StateMapping, blocks
from astray.state.measuring import is_sharded, measure, unite
from astray.state.naming import Pattern, matching

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


POINTS = 2000
"""Points at which a distribution function is computed: more than a picture has columns."""

PIXELS = 256
"""The sides of a heat map; beyond it, a cell shows the mean of the elements in it."""

Path = str | os.PathLike[str]
Floats = npt.NDArray[np.float64]


class Plots(StateMapping):
    """The pictures of a state."""

    def hist(
        self,
        lw: bool = False,
        pattern: Pattern | None = None,
        name: str | None = None,
        *,
        bins: int = 100,
        logx: bool = False,
        logy: bool = False,
        path: Path | None = None,
    ) -> Figure:
        """Histogram of all elements, or of each parameter with `lw`; with `logx`, of magnitudes.

        >>> weight.hist(lw=True, pattern=".*attn.*", path="attention.png")
        """

        def draw(axes: Axes, names: list[str]) -> str:
            binned = distribution(self, names, bins, logx)
            axes.stairs(binned.counts, binned.edges, fill=True)
            return f", {binned.left_out:,} left out" * bool(binned.left_out)

        return self._panels(draw, lw, pattern, name, logx, logy, path)

    def ecdf(
        self,
        lw: bool = False,
        pattern: Pattern | None = None,
        name: str | None = None,
        *,
        logx: bool = False,
        logy: bool = False,
        path: Path | None = None,
    ) -> Figure:
        """The share of elements up to each value; with `logx`, of magnitudes."""

        def draw(axes: Axes, names: list[str]) -> str:
            binned = distribution(self, names, POINTS, logx)
            axes.plot(binned.edges, binned.cumulative)
            return f", {binned.left_out:,} left out" * bool(binned.left_out)

        return self._panels(draw, lw, pattern, name, logx, logy, path)

    def heatmap(
        self,
        lw: bool = False,
        pattern: Pattern | None = None,
        name: str | None = None,
        *,
        vmin: float | None = None,
        vmax: float | None = None,
        log: bool = False,
        path: Path | None = None,
    ) -> Figure:
        """The elements as colours: a matrix for each parameter with `lw`, or all elements in one square."""

        def draw(axes: Axes, names: list[str]) -> str:
            rows, columns = self._sides(names)
            picture = image(numbers(self, names), rows, columns, PIXELS)
            shown = axes.imshow(
                picture,
                norm="log" if log else None,
                vmin=vmin,
                vmax=vmax,
                aspect="auto",
                interpolation="nearest",
                extent=(0, columns, rows, 0),
            )
            assert axes.figure is not None
            axes.figure.colorbar(shown, ax=axes)
            return f", {rows} × {columns}"

        return self._panels(draw, lw, pattern, name, False, False, path)

    def lines(
        self,
        keys: Sequence[str] = ("std", "abs_max"),
        pattern: Pattern | None = None,
        name: str | None = None,
        *,
        group: Pattern | None = None,
        logy: bool = False,
        path: Path | None = None,
    ) -> Figure:
        """Statistics from parameter to parameter, or from group to group, in the order of the model.

        >>> grad.lines(["norm2", "abs_max"], group="layer", logy=True)
        """
        table = described(self, True, pattern, ["name", *keys], None, group)
        figure = _figure()(figsize=(max(6.0, 0.2 * len(table)), 4.0), layout="constrained")
        axes = figure.subplots()
        for key in keys:
            axes.plot(range(len(table)), table[key], marker=".", label=key)
        axes.set_xticks(range(len(table)), [str(label) for label in table["name"]], rotation=90, fontsize=7)
        axes.set_yscale("log" if logy else "linear")
        axes.set_title(name or self.name)
        axes.legend()
        return _saved(figure, path)

    def _panels(
        self,
        draw: Any,
        lw: bool,
        pattern: Pattern | None,
        name: str | None,
        logx: bool,
        logy: bool,
        path: Path | None,
    ) -> Figure:
        """A panel for all, or for each parameter."""
        names = matching(self, pattern)
        panels = {each: [each] for each in names} if lw else {name or self.name: names}
        columns = min(4, math.ceil(math.sqrt(max(len(panels), 1))))
        rows = max(math.ceil(len(panels) / columns), 1)
        figure = _figure()(figsize=(5.0 * columns, 3.5 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, (title, members) in zip(grid, panels.items(), strict=False):
            note = draw(axes, members)
            axes.set_title(f"{title}{note}", fontsize=9)
            if logx:
                axes.set_xscale("log")
                axes.set_xlabel("magnitude")
            if logy:
                axes.set_yscale("log")
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if lw:
            figure.suptitle(name or self.name)
        return _saved(figure, path)

    def _sides(self, names: Sequence[str]) -> tuple[int, int]:
        """A matrix for one parameter as it is, and a square for several."""
        if len(names) == 1:
            shape = (1, 1, *self.spec(names[0]).shape)[-max(2, len(self.spec(names[0]).shape)) :]
            return max(shape[0], 1), max(math.prod(shape[1:]), 1)
        count = sum(self.spec(name).numel for name in names)
        columns = max(math.isqrt(count), 1)
        return max(-(-count // columns), 1), columns


def _figure() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("Plots need matplotlib, which is not installed: pip install 'astray[plot]'") from None
    return Figure


def _saved(figure: Figure, path: Path | None) -> Figure:
    if path is not None:
        figure.savefig(path)
    return figure


# -- distributions, counted a block at a time --------------------------------------------------------------------------


class Distribution(NamedTuple):
    """Counts between edges, and how many elements are not counted: NaN, infinity, and 0 on a logarithmic scale."""

    counts: npt.NDArray[np.int64]
    edges: Floats
    left_out: int

    @property
    def cumulative(self) -> Floats:
        """The share of the counted elements up to each edge, from 0 to 1."""
        total = max(int(self.counts.sum()), 1)
        return np.concatenate([[0.0], np.cumsum(self.counts) / total])


def distribution(state: StateMapping, names: Sequence[str], bins: int, log: bool) -> Distribution:
    """Count the elements of these parameters in equal bins; with `log` their magnitudes, in bins of equal ratio."""
    moments = unite(list(measure(state, names).values())).moments
    low, high = (moments.absmin, moments.absmax) if log else (moments.min, moments.max)
    if log:
        # 0 has no logarithm, and the smallest other magnitude is not known; 16 decades show enough.
        low = low if low > 0 else high * 1e-16
    if not math.isfinite(low) or (log and high == 0):
        return Distribution(np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1), moments.count)
    edges = np.geomspace(low, high, bins + 1) if log and low < high else _edges(low, high, bins)
    counts = np.zeros(bins, np.int64)
    for values in numbers(state, names):
        kept = np.abs(values) if log else values
        counts += np.histogram(kept[np.isfinite(kept)], edges)[0]
    return Distribution(counts, edges, moments.count - int(counts.sum()))


def numbers(state: StateMapping, names: Sequence[str]) -> Iterator[Floats]:
    """The elements of these parameters in order, as float64, a block at a time."""
    for name in names:
        value = state[name]
        if is_sharded(value):
            raise StateError(f"{name!r} is sharded over processes. Plot value.full_tensor() instead.")
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
        position = np.arange(start, start + block.size)
        cell = (position // columns * height // rows) * width + position % columns * width // columns
        sums += np.bincount(cell, block, height * width)
        counts += np.bincount(cell, minlength=height * width)
        start += block.size
    with np.errstate(invalid="ignore"):  # cells of the last row that nothing falls into
        return (sums / counts).reshape(height, width)


def _edges(low: float, high: float, bins: int) -> Floats:
    if low == high:  # as numpy does for one value
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)
