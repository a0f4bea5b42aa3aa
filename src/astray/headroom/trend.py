"""Whether something grows steadily from step to step, and how fast: a line through it, if it deserves one.

Steps of a training are not independent: a random walk looks like a trend to the textbook formula. So the number of
observations is reduced by how much each residual resembles the one before, and a rate is given only where even the
lower end of its 99 % interval is above zero and the second half still grows. Many series at once, without a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FEWEST = 6
"""Steps below which no rate is given."""

LEAST_GROWTH = 0.5
"""By so much, in all, a series must have grown: less says nothing about where it will end."""

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
    """The growth of `count` series, given as points in any order. Of several points in a step, the largest counts."""
    known = np.isfinite(value)
    owner, x, y = _one_per_step(series[known], step[known], value[known])
    n = np.bincount(owner, minlength=count)
    x_mean = _sums(owner, x, count) / n
    slope, residual, spread = _line(owner, x, y, count)
    residual[np.abs(residual) < _ROUNDING] = 0.0
    after = owner[1:] == owner[:-1]
    squares = _sums(owner, residual**2, count)
    alike = _sums(owner[1:][after], (residual[1:] * residual[:-1])[after], count) / squares
    alike = np.clip(np.nan_to_num(alike), 0.0, 1.0)  # residuals that alternate are no excuse for a narrower interval
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
