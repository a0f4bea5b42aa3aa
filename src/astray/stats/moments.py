"""The first four moments of a tensor, its extremes and counts, for any number of tensors together.

Recordings use `measure`; this is for weights and gradients: sums that can be merged, so that the statistics of a model
come from those of its layers, and those of a layer from its shards. Like `kernels` it uses the native code where that
was built, and numpy otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from astray.stats import kernels, numpy_moments
from astray.stats.numpy_moments import add_up, exponent_of, recentre
from astray.stats.types import Strided

__all__ = ["Moments", "merge", "moments", "powers"]


def _choose_backend() -> ModuleType:
    if kernels.BACKEND == "numpy":
        return numpy_moments
    from astray.stats import _native

    return _native


_backend = _choose_backend()


class Moments(NamedTuple):
    """Statistics of the elements of a tensor, or of several.

    A complex element is two numbers. `count` is all of them; `zeros` and every measure are over the `finite` ones, in
    float64. Where none is finite the sums are 0, as sums of nothing are, and the extremes and the mean are NaN. Two
    NaN are not equal, so neither are two such tuples.
    """

    count: int  # type: ignore[assignment]  # tuples have a method of this name, which is not needed
    finite: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    min: float
    max: float
    absmin: float
    absmax: float
    sum: float
    """Infinite when it is beyond float64, and so is `abssum`; the mean is right even then."""
    abssum: float
    mean: float
    m2: float
    """Σ((x − mean) / 2ᵉ)², e being `exponent`, which is 0 for all but extreme numbers; see there."""
    m3: float
    m4: float
    exponent: int = 0
    """Not 0 where absmax is beyond 2^±200, as only float64 can be: the fourth power of such numbers would leave the
    range of float64. The methods below account for it."""

    def var(self, ddof: int = 0) -> float:
        """Σ(x − mean)² / (n − ddof); NaN where there are no more than ddof numbers."""
        if self.finite <= ddof:
            return math.nan
        return _scaled(self.m2 / (self.finite - ddof), 2 * self.exponent)

    def std(self, ddof: int = 0) -> float:
        """The root of the variance, right even where that is beyond float64."""
        if self.finite <= ddof:
            return math.nan
        return _scaled(math.sqrt(self.m2 / (self.finite - ddof)), self.exponent)

    @property
    def l2(self) -> float:
        """√Σx², right even where the sum is beyond float64."""
        if not self.finite:
            return 0.0
        mean = math.ldexp(self.mean, -self.exponent)
        return _scaled(math.sqrt(self.m2 + self.finite * mean * mean), self.exponent)

    @property
    def skew(self) -> float:
        """The third central moment over that of the spread, m3/m2^1.5 of averages; NaN where nothing spreads."""
        if not self.m2:
            return math.nan
        return math.sqrt(self.finite) * self.m3 / (self.m2 * math.sqrt(self.m2))

    @property
    def kurtosis(self) -> float:
        """The fourth central moment over that of the spread, less the 3 of a normal distribution; NaN as for `skew`."""
        if not self.m2:
            return math.nan
        return self.finite * self.m4 / (self.m2 * self.m2) - 3.0


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def moments(tensor: Strided) -> Moments:
    """Read a tensor once: its moments, extremes and counts.

    >>> import numpy as np
    >>> values = np.array([1.0, 2.0, 6.0, np.nan])
    >>> result = moments(Strided.from_numpy(values))
    >>> result.finite, result.nan, result.mean, result.m2, result.m3, result.m4
    (3, 1, 3.0, 14.0, 18.0, 98.0)
    >>> result.std(ddof=1), result.l2
    (2.6457513110645907, 6.4031242374328485)
    """
    return Moments._make(_backend.moments(tensor))


def powers(tensor: Strided, p: float, unit: float = 1.0) -> float:
    """Σ(|x| / unit)ᵖ over the finite elements, in float64: what the p-norm is made of, and it adds up.

    A large p leaves the range of float64 soon: 1e10 to the 40th is infinite. With the largest magnitude as the unit it
    does not, and the norm is unit · Σ^(1/p). A power of 0 counts what is not 0; a negative one of 0 is infinite.

    >>> import numpy as np
    >>> values = np.array([3e300, -4e300])
    >>> tensor = Strided.from_numpy(values)
    >>> unit = moments(tensor).absmax
    >>> powers(tensor, 2.0), unit * powers(tensor, 2.0, unit) ** (1 / 2)
    (inf, 5e+300)
    """
    if not math.isfinite(p):
        raise ValueError(f"The power must be finite; got {p}. The norm of infinite power is `moments(...).absmax`.")
    if not (math.isfinite(unit) and unit > 0):
        raise ValueError(f"The unit must be a positive number; got {unit}.")
    return _backend.powers(tensor, float(p), float(unit))  # type: ignore[no-any-return]


def merge(parts: Sequence[Moments]) -> Moments:
    """The moments of several tensors, as `moments` would return for all their elements in one.

    The result does not depend on the order of the parts. No parts, and empty ones, count as an empty tensor.

    >>> import numpy as np
    >>> values = np.array([1.0, 2.0, 6.0])
    >>> merge([moments(Strided.from_numpy(part)) for part in (values[:2], values[2:])])[10:16]
    (9.0, 9.0, 3.0, 14.0, 18.0, 98.0)
    """
    counts = [sum(column) for column in zip(*(part[:6] for part in parts), strict=True)] or [0] * 6
    some = [part for part in parts if part.finite]
    if len(some) < 2:
        measures = some[0][6:] if some else (*[math.nan] * 4, 0.0, 0.0, math.nan, 0.0, 0.0, 0.0, 0)
        return Moments._make((*counts, *measures))
    low, high = min(part.min for part in some), max(part.max for part in some)
    absmax = max(part.absmax for part in some)
    exponent = exponent_of(absmax)
    centre, m2, m3, m4 = _merge_moments(some, exponent)
    mean = _scaled(centre, exponent)
    if low == high:
        mean, m2, m3, m4 = low, 0.0, 0.0, 0.0
    total = add_up(part.sum for part in some)
    if not math.isfinite(total):
        total = _scaled(centre * sum(part.finite for part in some), exponent)
    absmin, abssum = min(part.absmin for part in some), add_up(part.abssum for part in some)
    return Moments._make((*counts, low, high, absmin, absmax, total, abssum, mean, m2, m3, m4, exponent))


def _merge_moments(parts: Sequence[Moments], exponent: int) -> tuple[float, float, float, float]:
    """The mean and the central sums of all parts, in units of 2^exponent: each moved to the mean of all, and added."""
    rows = []
    for part in parts:
        unit = part.exponent - exponent
        sums = _scaled(part.m2, 2 * unit), _scaled(part.m3, 3 * unit), _scaled(part.m4, 4 * unit)
        rows.append((float(part.finite), math.ldexp(part.mean, -exponent), *sums))
    count = math.fsum(n for n, *_ in rows)
    mean = math.fsum(n * each for n, each, *_ in rows) / count
    rows = [(n, each - mean, s2, s3, s4) for n, each, s2, s3, s4 in rows]
    drift, m2, m3, m4 = recentre(
        count,
        add_up(n * d for n, d, *_ in rows),
        add_up(s2 + n * d * d for n, d, s2, *_ in rows),
        add_up(s3 + d * (3 * s2 + n * d * d) for n, d, s2, s3, _ in rows),
        add_up(s4 + d * (4 * s3 + d * (6 * s2 + n * d * d)) for n, d, s2, s3, s4 in rows),
    )
    return mean + drift, m2, m3, m4
