"""`moments` and `powers` in plain numpy: used where the extension could not be built, and in tests to check it.

Same results as `_native`: counts and extremes exactly, sums to 1e-12. Two passes in blocks, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.stats.numpy_kernels import _real, _values
from astray.stats.types import Strided

Floats = npt.NDArray[np.float64]

SAFE = 2.0**-200, 2.0**200
"""Between these the fourth powers of 2⁴⁰ numbers, and of their distances from a mean, stay within float64."""


def exponent_of(absmax: float) -> int:
    """The power of two that brings absmax near 1 where fourth powers need that; else 0."""
    if absmax == 0 or not math.isfinite(absmax) or SAFE[0] <= absmax <= SAFE[1]:
        return 0
    return min(max(math.frexp(absmax)[1] - 1, -1000), 1000)  # 2^-exponent itself must not overflow


def recentre(count: float, s1: float, s2: float, s3: float, s4: float) -> tuple[float, float, float, float]:
    """Move sums of powers about a point to the mean: its distance from the point, and the three central sums."""
    shift = s1 / count
    m2 = s2 - shift * s1
    m3 = s3 - shift * (3.0 * s2 - 2.0 * shift * s1)
    m4 = s4 - shift * (4.0 * s3 - shift * (6.0 * s2 - 3.0 * shift * s1))
    return shift, max(m2, 0.0), m3, max(m4, 0.0)


def moments(tensor: Strided) -> tuple[Any, ...]:
    """See `astray.stats.moments.moments`; the fields of a `Moments`."""
    with np.errstate(all="ignore"):
        nan = posinf = neginf = zeros = 0
        low, high, least, abssums = math.inf, -math.inf, math.inf, [0.0]
        view, dtype = _real(tensor)
        for values in _values(view, dtype):
            nan += int(np.count_nonzero(np.isnan(values)))
            posinf += int(np.count_nonzero(values == math.inf))
            neginf += int(np.count_nonzero(values == -math.inf))
            zeros += int(np.count_nonzero(values == 0))
            finite = values[np.isfinite(values)]
            if finite.size:
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                least = min(least, float(np.abs(finite).min()))
                abssums.append(float(np.abs(finite).sum()))
        count = view.size - nan - posinf - neginf
        counts = view.size, count, nan, posinf, neginf, zeros
        if not count:
            return *counts, *[math.nan] * 4, 0.0, 0.0, math.nan, 0.0, 0.0, 0.0, 0
        low, high = low + 0.0, high + 0.0  # −0 is reported as 0
        exponent = exponent_of(max(-low, high))
        total, mean, m2, m3, m4 = _central(tensor, count, exponent)
        if low == high:
            mean, m2, m3, m4 = low, 0.0, 0.0, 0.0
    return *counts, low, high, least, max(-low, high), total, add_up(abssums), mean, m2, m3, m4, exponent


def _central(tensor: Strided, count: int, exponent: int) -> tuple[float, float, float, float, float]:
    """The sum and the mean; and the central sums, in units of 2^exponent."""
    scale = 2.0**-exponent
    total = math.fsum(float((block * scale).sum()) for block in _finite(tensor))
    mean = total / count
    sums: tuple[list[float], ...] = [], [], [], []
    for block in _finite(tensor):
        distance = block * scale - mean
        square = distance * distance
        for parts, values in zip(sums, (distance, square, square * distance, square * square), strict=True):
            parts.append(float(values.sum()))
    s1, s2, s3, s4 = map(math.fsum, sums)
    drift, m2, m3, m4 = recentre(float(count), s1, s2, s3, s4)
    return float(np.ldexp(total, exponent)), float(np.ldexp(mean + drift, exponent)), m2, m3, m4


def powers(tensor: Strided, p: float, unit: float) -> float:
    """See `astray.stats.moments.powers`."""
    with np.errstate(all="ignore"):
        if p == 0.0:
            return float(sum(int(np.count_nonzero(block)) for block in _finite(tensor)))
        return add_up(float((np.abs(block / unit) ** p).sum()) for block in _finite(tensor))


def _finite(tensor: Strided) -> Iterator[Floats]:
    view, dtype = _real(tensor)
    for values in _values(view, dtype):
        yield values[np.isfinite(values)]


def add_up(parts: Iterable[float]) -> float:
    """Add up without rounding on the way; infinite when that is beyond float64, NaN when it is inf − inf."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf
    except ValueError:  # what it raises for inf − inf
        return math.nan
