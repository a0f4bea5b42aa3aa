"""Statistics from what was measured, the way numpy would give them for the same elements in float64.

A measurement is over finite elements, with the others counted beside them; here the others are put back: NaN makes NaN,
infinity what it makes of a sum, a maximum or a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from astray.state.measurement import Measurement
from astray.stats.moments import Moments

Formula = Callable[[Measurement], float]


def signed(formula: Callable[[Moments], float]) -> Formula:
    """A statistic that depends on signs, so that the magnitudes of complex numbers do not tell it: NaN for those."""
    return lambda found: math.nan if found.magnitudes else formula(found.moments)


def norm_of(found: Measurement, p: float) -> float:
    """(Σ|x|ᵖ)^(1/p); the number of elements other than 0 for p = 0."""
    each = found.moments
    infinite = each.posinf + each.neginf
    if p == 0:
        return float(each.count - each.zeros)
    if not each.count:
        return 0.0
    if each.nan:
        return math.nan
    if math.isinf(p):
        return _abs_max(each) if p > 0 else _abs_min(each)
    if p > 0 and infinite:
        return math.inf
    if p < 0 and each.zeros:
        return 0.0
    if p == 1:
        return each.abssum
    if p == 2:
        return each.l2
    unit, total = found.powers[p]
    if not total:  # only infinities, to a negative power
        return math.inf if infinite else 0.0
    return unit * float(total ** (1 / p))


def _sum(each: Moments) -> float:
    if each.nan or (each.posinf and each.neginf):
        return math.nan
    return math.inf if each.posinf else -math.inf if each.neginf else each.sum


def _mean(each: Moments) -> float:
    total = _sum(each)
    # The mean is right where the sum is beyond float64, and NaN where there is nothing.
    return each.mean if each.finite == each.count else total


def _max(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return math.inf if each.posinf else each.max if each.finite else -math.inf


def _min(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return -math.inf if each.neginf else each.min if each.finite else math.inf


def _abs_max(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return math.inf if each.posinf or each.neginf else each.absmax


def _abs_min(each: Moments) -> float:
    if each.nan or not each.count:
        return math.nan
    return each.absmin if each.finite else math.inf


def _of_finite(formula: Callable[[Moments], float]) -> Callable[[Moments], float]:
    """A statistic of differences from the mean: there are none where an element is not finite."""
    return lambda each: formula(each) if each.finite == each.count else math.nan


FORMULAS: dict[str, Formula] = {
    "max": signed(_max),
    "min": signed(_min),
    "sum": signed(_sum),
    "mean": signed(_mean),
    "var": signed(_of_finite(lambda each: each.var(ddof=1))),
    "std": signed(_of_finite(lambda each: each.std(ddof=1))),
    "skew": signed(_of_finite(lambda each: each.skew)),
    "kurtosis": signed(_of_finite(lambda each: each.kurtosis)),
    "norm1": lambda found: norm_of(found, 1),
    "norm2": lambda found: norm_of(found, 2),
    "norm1_mean": lambda found: norm_of(found, 1) / found.moments.count if found.moments.count else math.nan,
    "abs_max": lambda found: _abs_max(found.moments),
    "abs_min": lambda found: _abs_min(found.moments),
}
