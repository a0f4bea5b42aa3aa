"""The measures of each place, over all its observations: head-room, its growth, zeros, subnormal numbers, motion.

From statistics alone. Places are in order of their first appearance; docs/guides/risk.md explains every column.
`lost` bounds and estimates the share below a magnitude, `growth` fits a line to head-room over steps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.dtype_limits import limits
from astray.headroom.motion import WeightMotion, motion
from astray.headroom.observations import OF_CALL, OF_TENSOR, Floats, Ints, Observations, StatisticColumns

HORIZON = 10
"""A rate is extrapolated to at most ten times as many steps as it was seen over."""


class PlaceMeasures(NamedTuple):
    """The columns of all places, and the values they were computed from."""

    columns: dict[str, Any]
    values: StatisticColumns  # of every row
    row: Ints  # for each place the row whose rank, step and call are in its columns
    largest_row: Ints  # for each place the row with its largest magnitude
    moving: WeightMotion


def measure(observations: Observations) -> PlaceMeasures:
    """All columns of a table of risks except level and cause."""
    values, at = observations.values(), observations.numbers
    bad = at["nan"] + at["inf"] > 0
    nonfinite = np.bincount(observations.place, weights=bad).astype(np.int64)
    largest_row = _first_of_each(observations, -values.absmax)
    row = np.where(nonfinite > 0, _first_of_each(observations, np.where(bad, at["step"], np.inf)), largest_row)
    words = {name: observations.words[name].take(observations.first) for name in (*OF_CALL, *OF_TENSOR)}
    dtype_limits = [limits(str(name)) for name in words["dtype"]]
    largest, tiny, eps = (
        np.array([getattr(each, name) for each in dtype_limits]) for name in ("largest", "tiny", "eps")
    )
    absmax = np.where(values.finite[largest_row] > 0, values.absmax[largest_row], np.nan)
    small, moving = lost(observations, values, tiny[observations.place]), motion(observations)
    columns: dict[str, Any] = {
        **words,
        **{name: at[name][row] for name in ("rank", "step", "micro", "call")},
        "observations": np.bincount(observations.place),
        "nonfinite": nonfinite,
        "nan": at["nan"][row],
        "inf": at["inf"][row],
        "absmax": absmax,
        "largest": largest,
        **_headroom(absmax, largest),
        **_growth(observations, values.absmax, absmax, largest),
        "zeros": _share_of_zeros(observations, values),
        **small.columns("subnormal"),
        "subnormal_step": at["step"][small.row],
        "half_ulp": eps / 2,
        **moving.columns(),
    }
    return PlaceMeasures(columns, values, row, largest_row, moving)


def _first_of_each(observations: Observations, key: Floats) -> Ints:
    """The row of each place with the smallest key; of several the one in the earliest step, then of the lowest rank."""
    order = np.lexsort((np.arange(len(observations)), observations.numbers["step"], key, observations.place))
    return order[np.searchsorted(observations.place[order], np.arange(len(observations.first)))]


def _headroom(absmax: Floats, largest: Floats) -> dict[str, Floats]:
    """As a factor and in powers of two; null where all numbers are zero."""
    with np.errstate(divide="ignore", over="ignore"):
        nonzero = absmax > 0
        factor = np.where(nonzero, largest / np.where(nonzero, absmax, 1), np.nan)
        bits = np.where(nonzero, np.log2(largest) - np.log2(np.where(nonzero, absmax, 1)), np.nan)
    return {"headroom": factor, "headroom_bits": np.maximum(bits, 0.0)}


def _growth(observations: Observations, absmax: Floats, worst: Floats, largest: Floats) -> dict[str, npt.NDArray[Any]]:
    """How many bits of head-room are lost in each step, and after how many more steps none would be left."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitted = growth(observations.place, observations.numbers["step"], np.log2(absmax), len(observations.first))
        left = np.log2(largest) - np.log2(worst)
        soonest, latest = left / fitted.high, left / fitted.low
    horizon = HORIZON * fitted.span
    return {
        "steps": fitted.steps,
        "growth_bits": fitted.rate,
        "growth_low": fitted.low,
        "growth_high": fitted.high,
        "gone_soonest": np.where(soonest <= horizon, soonest, np.nan),
        "gone_latest": np.where(latest <= horizon, latest, np.nan),
    }


def _share_of_zeros(observations: Observations, values: StatisticColumns) -> Floats:
    """The share of zeros among all finite values of all observations, exact; NaN where none is finite."""
    zeros = np.bincount(observations.place, weights=values.finite - values.nonzero)
    finite = np.bincount(observations.place, weights=values.finite)
    return np.where(finite > 0, zeros / np.maximum(finite, 1), np.nan)


# -- shares below a magnitude ------------------------------------------------------------------------------------------


SLACK = 4e-6
"""Statistics measured on a GPU are exact to 1e-6 and a sum of squares to 2e-6; bounds are widened by twice that."""

_COUNT_ROUNDING = 1e-9  # what the arithmetic here may add to a count, which is a whole number


class ShareBelow(NamedTuple):
    """The share of non-zero values below a magnitude, in the row of each place that has most of them."""

    bounds: ShareBounds
    normal: Floats  # if they were normally distributed, within the bounds
    row: npt.NDArray[np.int64]

    def columns(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Three columns of a table."""
        return {f"{name}_least": self.bounds.least, f"{name}_most": self.bounds.most, f"{name}_normal": self.normal}


def lost(observations: Observations, values: StatisticColumns, threshold: Floats | float) -> ShareBelow:
    """The share below a threshold (one for all, or one per row), in the row of each place where it is largest.

    The largest by its lower bound, then by the size of the threshold relative to the values.
    """
    thresholds = np.broadcast_to(np.asarray(threshold, np.float64), values.absmax.shape)
    bounds = below(values, thresholds)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.nan_to_num(thresholds / values.l2 * np.sqrt(values.nonzero), posinf=0.0)
    order = np.lexsort((-relative, -bounds.least, observations.place))
    row = order[np.searchsorted(observations.place[order], np.arange(len(observations.first)))]
    chosen = ShareBounds(bounds.least[row], bounds.most[row])
    return ShareBelow(chosen, np.clip(normal_share(values.take(row), thresholds[row]), *chosen), row)


class ShareBounds(NamedTuple):
    """At least and at most how large a share of the values that are not zero; 0 where there are none."""

    least: Floats
    most: Floats


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def below(values: StatisticColumns, threshold: Floats | float) -> ShareBounds:
    """The share of non-zero values whose magnitude is below the threshold: bounds that always hold.

    Known of the finite values: how many are zero, their extremes, sum, sum of squares. With m of them not zero, M the
    largest magnitude and R the sum of squares in units of M², the number c below t = τM obeys

        m − 1 − (R − 1)/τ²  ≤  c  ≤  (m − R)/(1 − τ²)      those not below have at least τ² each, those below at most τ²

    and the same with the sum in place of the squares: where all values have one sign it bounds both ways, otherwise
    from above only. docs/guides/risk.md derives it. Everything is in units of M, so that no square overflows.
    """
    scale = np.where(values.absmax > 0, values.absmax, 1.0)
    m, tau = values.nonzero, np.asarray(threshold / scale, np.float64)
    squares = (values.l2 / scale) ** 2
    total = np.abs(values.mean) / scale * values.finite
    # The error of the sum, which is relative to the size of all values.
    off = SLACK * np.sqrt(squares * values.finite)
    one_sign = (values.min >= 0) | (values.max <= 0)
    lesser = np.minimum(np.abs(values.min), np.abs(values.max)) / scale  # the extreme on the other side, or the nearest

    # Sums that contradict the extremes, or are missing, as in files of other tools, give no bounds.
    sound = (squares >= 1 - SLACK) & (squares <= m * (1 + SLACK))
    adds_up = sound & (total <= m + off) & (~one_sign | (total >= 1 - off))

    least = np.where(sound, m - 1 - (squares * (1 + SLACK) - 1) / tau**2, 0)
    least = np.where(one_sign & adds_up, np.maximum(least, m - 1 - (total + off - 1) / tau), least)
    least = np.where(~one_sign & (lesser < tau), np.maximum(least, 1), least)  # all values of that sign are below

    most = m - 1 - (~one_sign & (lesser >= tau))  # the extremes themselves are not below
    most = np.where(sound, np.fmin(most, (m - squares * (1 - SLACK)) / (1 - tau**2)), most)
    most = np.where(adds_up, np.fmin(most, (m - total + off) / (1 - tau)), most)
    least, most = np.ceil(least - _COUNT_ROUNDING * m), np.floor(most + _COUNT_ROUNDING * m)
    least, most = np.where(tau <= 0, 0, least), np.where(tau <= 0, 0, most)

    nearest = one_sign & (lesser >= tau) & (values.nonzero == values.finite)  # the smallest magnitude is known
    everything, nothing = tau > 1, nearest | (m <= 0)
    least = np.where(everything, m, np.where(nothing, 0, np.clip(least, 0, m)))
    most = np.where(everything, m, np.where(nothing, 0, np.clip(most, least, m)))
    some = np.maximum(m, 1)
    return ShareBounds(np.where(m > 0, least, 0) / some, np.where(m > 0, most, 0) / some)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def at_least(values: StatisticColumns, threshold: Floats | float) -> ShareBounds:
    """The share of non-zero values whose magnitude is the threshold or more: those that are not below it."""
    less = below(values, threshold)
    some = values.nonzero > 0
    return ShareBounds(np.where(some, 1 - less.most, 0), np.where(some, 1 - less.least, 0))


def normal_share(values: StatisticColumns, threshold: Floats | float) -> Floats:
    """The share of non-zero values below the threshold if they are normally distributed: an estimate, not a bound.

    Mean and spread are those of the non-zero values, which the statistics give exactly. For few rows: it
    goes row by row.
    """
    thresholds = np.broadcast_to(threshold, values.absmax.shape)
    rows = zip(*(column.tolist() for column in (*values, thresholds)), strict=True)
    return np.array([_normal(mean * n / m, l2, m, t) if m else 0.0 for _, _, mean, l2, _, n, m, t in rows], np.float64)


def _normal(mean: float, l2: float, count: float, t: float) -> float:
    rms = l2 / math.sqrt(count)
    level = mean / rms if rms else 1.0
    spread = rms * math.sqrt(max(0.0, 1 - level * level))  # a power raises where a product is infinite
    if spread <= 1e-12 * rms:  # one value, many times
        return float(abs(mean) < t)
    if t < 1e-4 * spread:  # where the difference of two erf would be rounding only
        off = mean / spread
        return t / spread * math.sqrt(2 / math.pi) * math.exp(-off * off / 2)
    low, high = ((sign * t - mean) / (spread * math.sqrt(2)) for sign in (-1, 1))
    return (math.erf(high) - math.erf(low)) / 2


# -- growth over steps -------------------------------------------------------------------------------------------------


FEWEST = 6
"""Fewer steps than this give no rate."""

LEAST_GROWTH = 0.5
"""Powers of two that a series must have grown in all: less does not show where it will end."""

_Z = 2.5758293035489004  # leaves half a percent of a normal distribution on either side
_ROUNDING = 1e-9  # residuals of a perfect line, which may correlate with each other
_FEWEST_FREE = 3  # degrees of freedom; fewer leave an interval too wide to be useful


class Growth(NamedTuple):
    """For each series: its number of steps, their span, its rate per step and a 99 % interval of the rate.

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

    Steps of a training are not independent: by the textbook formula a random walk looks like a trend. So the number of
    observations is reduced by the correlation of each residual with the one before, and a rate is given only where the
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
    correlation = _sums(owner[1:][after], (residual[1:] * residual[:-1])[after], count) / squares
    correlation = np.clip(np.nan_to_num(correlation), 0.0, 1.0)  # residuals that alternate do not narrow the interval
    free = n * (1 - correlation) / (1 + correlation) - 2
    error = np.sqrt(squares / free / spread) * student(free)
    late = x >= x_mean[owner]
    late_slope, _, _ = _line(owner[late], x[late], y[late], count)
    span = _range(owner, x, count)
    steady = (n >= FEWEST) & (free >= _FEWEST_FREE) & (slope - error > 0)
    steady &= (late_slope >= slope / 2) & (slope * span >= LEAST_GROWTH)
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
    """Least squares: the slope of each series, the residual of each point, the sum of squares of x about its mean."""
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
    span = np.zeros(count)
    if len(owner):
        edges = np.flatnonzero(np.append(True, np.diff(owner) != 0))
        last = np.append(edges[1:], len(owner)) - 1
        span[owner[edges]] = x[last] - x[edges]
    return span
