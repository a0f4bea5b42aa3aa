"""How many values of a tensor are below or above a magnitude, from its statistics: bounds that always hold.

Known of the finite values: how many are zero, their extremes, sum, sum of squares. With m of them not zero, M the
largest magnitude and R the sum of squares in units of M², the number c below t = τM obeys

    m − 1 − (R − 1)/τ²  ≤  c  ≤  (m − R)/(1 − τ²)      those not below have at least τ² each, those below at most τ²

and the same with the sum in place of the squares: where all values have one sign it bounds both ways, otherwise from
above only. docs/guides/risk.md derives it. Everything is in units of M, so that no square overflows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SLACK = 4e-6
"""Statistics measured on a GPU are exact to 1e-6 and a sum of squares to 2e-6; bounds are widened by twice that."""

_ROUNDING = 1e-9  # what the arithmetic here may add to a count, which is a whole number


class StatisticColumns(NamedTuple):
    """Statistics of some tensors, each a column. `finite` and `nonzero` are how many values are that."""

    min: Floats
    max: Floats
    mean: Floats
    l2: Floats
    absmax: Floats
    finite: Floats
    nonzero: Floats

    def take(self, rows: npt.NDArray[Any]) -> StatisticColumns:
        """The same at some rows."""
        return StatisticColumns(*(column[rows] for column in self))


class ShareBounds(NamedTuple):
    """At least and at most how large a share of the values that are not zero; 0 where there are none."""

    least: Floats
    most: Floats


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def below(values: StatisticColumns, threshold: Floats | float) -> ShareBounds:
    """The share of non-zero values whose magnitude is below the threshold."""
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
    least, most = np.ceil(least - _ROUNDING * m), np.floor(most + _ROUNDING * m)
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
