"""What is measured of each place, over all its observations: head-room, its growth, zeros, subnormal numbers, motion.

From statistics alone. Places are in order of their first appearance; docs/guides/risk.md has the columns. `lost` bounds
and estimates how much lies below a magnitude, `growth` fits a line to head-room over steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.dtype_limits import limits
from astray.headroom.motion import WeightMotion, motion
from astray.headroom.observations import OF_CALL, OF_TENSOR, Observations
from astray.headroom.shares import Floats, ShareBounds, StatisticColumns, below, normal_share

Ints = npt.NDArray[np.int64]

HORIZON = 10
"""A rate seen over so many steps is not followed further than ten times as many into the future."""


class PlaceMeasures(NamedTuple):
    """The columns of all places, and what they were made from."""

    columns: dict[str, Any]
    values: StatisticColumns  # of every row
    row: Ints  # for each place the row that its columns name
    largest_row: Ints  # and the one with its largest magnitude
    moving: WeightMotion


def measure(seen: Observations) -> PlaceMeasures:
    """All columns of a table of risks but the judgement."""
    values, at = seen.values(), seen.numbers
    bad = at["nan"] + at["inf"] > 0
    nonfinite = np.bincount(seen.place, weights=bad).astype(np.int64)
    largest_row = _first_of_each(seen, -values.absmax)
    row = np.where(nonfinite > 0, _first_of_each(seen, np.where(bad, at["step"], np.inf)), largest_row)
    words = {name: seen.words[name].take(seen.first) for name in (*OF_CALL, *OF_TENSOR)}
    ends = [limits(str(name)) for name in words["dtype"]]
    largest, tiny, eps = (np.array([getattr(end, name) for end in ends]) for name in ("largest", "tiny", "eps"))
    absmax = np.where(values.finite[largest_row] > 0, values.absmax[largest_row], np.nan)
    small, moving = lost(seen, values, tiny[seen.place]), motion(seen)
    columns: dict[str, Any] = {
        **words,
        **{name: at[name][row] for name in ("rank", "step", "micro", "call")},
        "observations": np.bincount(seen.place),
        "nonfinite": nonfinite,
        "nan": at["nan"][row],
        "inf": at["inf"][row],
        "absmax": absmax,
        "largest": largest,
        **_headroom(absmax, largest),
        **_growth(seen, values.absmax, absmax, largest),
        "zeros": _share_of_zeros(seen, values),
        **small.columns("subnormal"),
        "subnormal_step": at["step"][small.row],
        "half_ulp": eps / 2,
        **moving.columns(),
    }
    return PlaceMeasures(columns, values, row, largest_row, moving)


def _first_of_each(seen: Observations, key: Floats) -> Ints:
    """The row of each place with the smallest key; of several the one in the earliest step, then of the lowest rank."""
    order = np.lexsort((np.arange(len(seen)), seen.numbers["step"], key, seen.place))
    return order[np.searchsorted(seen.place[order], np.arange(len(seen.first)))]


def _headroom(absmax: Floats, largest: Floats) -> dict[str, Floats]:
    """As a factor and in powers of two; null where all numbers are zero."""
    with np.errstate(divide="ignore", over="ignore"):
        some = absmax > 0
        factor = np.where(some, largest / np.where(some, absmax, 1), np.nan)
        bits = np.where(some, np.log2(largest) - np.log2(np.where(some, absmax, 1)), np.nan)
    return {"headroom": factor, "headroom_bits": np.maximum(bits, 0.0)}


def _growth(seen: Observations, absmax: Floats, worst: Floats, largest: Floats) -> dict[str, npt.NDArray[Any]]:
    """How many bits of head-room each step takes, and in how many more steps none would be left."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = growth(seen.place, seen.numbers["step"], np.log2(absmax), len(seen.first))
        left = np.log2(largest) - np.log2(worst)
        soonest, latest = left / found.high, left / found.low
    far = HORIZON * found.span
    return {
        "steps": found.steps,
        "growth_bits": found.rate,
        "growth_low": found.low,
        "growth_high": found.high,
        "gone_soonest": np.where(soonest <= far, soonest, np.nan),
        "gone_latest": np.where(latest <= far, latest, np.nan),
    }


def _share_of_zeros(seen: Observations, values: StatisticColumns) -> Floats:
    """Zeros among all finite values of all observations, exact; null where none is finite."""
    zeros = np.bincount(seen.place, weights=values.finite - values.nonzero)
    finite = np.bincount(seen.place, weights=values.finite)
    return np.where(finite > 0, zeros / np.maximum(finite, 1), np.nan)


# -- shares below a magnitude ------------------------------------------------------------------------------------------


class ShareBelow(NamedTuple):
    """The share of non-zero values below a magnitude, in the row of each place that has most of them."""

    bounds: ShareBounds
    normal: Floats  # if they were normally distributed, within the bounds
    row: npt.NDArray[np.int64]

    def columns(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Three columns of a table."""
        return {f"{name}_least": self.bounds.least, f"{name}_most": self.bounds.most, f"{name}_normal": self.normal}


def lost(seen: Observations, values: StatisticColumns, threshold: Floats | float) -> ShareBelow:
    """How much lies below a threshold (one for all, or one per row) where it is most: by lower bound, then by size."""
    thresholds = np.broadcast_to(np.asarray(threshold, np.float64), values.absmax.shape)
    bounds = below(values, thresholds)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.nan_to_num(thresholds / values.l2 * np.sqrt(values.nonzero), posinf=0.0)
    order = np.lexsort((-relative, -bounds.least, seen.place))
    row = order[np.searchsorted(seen.place[order], np.arange(len(seen.first)))]
    here = ShareBounds(bounds.least[row], bounds.most[row])
    return ShareBelow(here, np.clip(normal_share(values.take(row), thresholds[row]), *here), row)


# -- growth over steps -------------------------------------------------------------------------------------------------


FEWEST = 6
"""Steps below which no rate is given."""

LEAST_GROWTH = 0.5
"""Powers of two that a series must have grown in all: less says nothing about where it will end."""

_Z = 2.5758293035489004  # leaves half a percent of a normal distribution on either side
_ROUNDING = 1e-9  # what remains of a perfect line, and may well resemble what remained before
_FEWEST_FREE = 3  # degrees of freedom; fewer leave an interval too wide to speak of


class Growth(NamedTuple):
    """For each series: how many steps it has and from which to which, its rate per step and a 99 % interval of it.

    The rate is NaN where it does not grow steadily, and so is the interval.
    """

    steps: Ints
    span: Floats
    rate: Floats
    low: Floats
    high: Floats


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def growth(series: Ints, step: Ints, value: Floats, count: int) -> Growth:
    """The growth of `count` series, given as points in any order. Of several points in a step, the largest counts.

    Steps of a training are not independent: to the textbook formula a random walk looks like a trend. So the number of
    observations is reduced by how much each residual resembles the one before, and a rate is given only where even the
    lower end of its 99 % interval is above zero and the second half still grows.
    """
    known = np.isfinite(value)
    owner, x, y = _one_per_step(series[known], step[known], value[known])
    n = np.bincount(owner, minlength=count)
    x_mean = _sums(owner, x, count) / n
    slope, residual, spread = _line(owner, x, y, count)
    residual[np.abs(residual) < _ROUNDING] = 0.0
    after = owner[1:] == owner[:-1]
    squares = _sums(owner, residual**2, count)
    alike = _sums(owner[1:][after], (residual[1:] * residual[:-1])[after], count) / squares
    alike = np.clip(np.nan_to_num(alike), 0.0, 1.0)  # residuals that alternate do not narrow the interval
    free = n * (1 - alike) / (1 + alike) - 2
    error = np.sqrt(squares / free / spread) * student(free)
    late = x >= x_mean[owner]
    still, _, _ = _line(owner[late], x[late], y[late], count)
    span = _range(owner, x, count)
    steady = (n >= FEWEST) & (free >= _FEWEST_FREE) & (slope - error > 0)
    steady &= (still >= slope / 2) & (slope * span >= LEAST_GROWTH)
    return Growth(n, span, *(np.where(steady, rate, np.nan) for rate in (slope, slope - error, slope + error)))


def student(free: Floats) -> Floats:
    """The quantile of Student's t that leaves half a percent above it, by its expansion; within 4 % from 3 on.

    >>> [round(float(t), 2) for t in student(np.array([3.0, 10.0, 1e9]))]
    [5.65, 3.17, 2.58]
    """
    z = _Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return np.asarray(z + first / free + second / free**2 + third / free**3, np.float64)


def _one_per_step(series: Ints, step: Ints, value: Floats) -> tuple[Ints, Floats, Floats]:
    """The largest value of each series in each step, in order of both."""
    if not len(series):
        return series, step.astype(np.float64), value
    order = np.lexsort((step, series))
    series, step, value = series[order], step[order], value[order]
    starts = np.flatnonzero(np.append(True, (np.diff(series) != 0) | (np.diff(step) != 0)))
    return series[starts], step[starts].astype(np.float64), np.maximum.reduceat(value, starts)


def _line(owner: Ints, x: Floats, y: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """Least squares: the slope of each series, what remains of each point, and the squares of x about its mean."""
    n = np.bincount(owner, minlength=count)
    x = x - (_sums(owner, x, count) / n)[owner]
    y = y - (_sums(owner, y, count) / n)[owner]
    spread = _sums(owner, x * x, count)
    slope = _sums(owner, x * y, count) / spread
    return slope, y - slope[owner] * x, spread


def _sums(owner: Ints, values: npt.NDArray[Any], count: int) -> Floats:
    return np.bincount(owner, weights=values, minlength=count).astype(np.float64)


def _range(owner: Ints, x: Floats, count: int) -> Floats:
    """From the first to the last x of each series, which are sorted."""
    found = np.zeros(count)
    if len(owner):
        edges = np.flatnonzero(np.append(True, np.diff(owner) != 0))
        last = np.append(edges[1:], len(owner)) - 1
        found[owner[edges]] = x[last] - x[edges]
    return found
