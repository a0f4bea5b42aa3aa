"""What a kernel measures of a tensor: a row of ten words, and how such rows become statistics.

Rows lie column by column in an int64 buffer of ten times its capacity, floats by their bits. A row describes a whole
tensor, or the part of it that one program of a kernel has read. It holds the mean and the spread rather than sums, so
that nothing overflows on the way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.stats import Measurements

FIELDS = ("finite", "mean", "spread", "low", "high", "zeros", "nan", "inf", "fingerprint", "first")
"""`finite` counts the elements that the next four describe; `spread` is the norm of their distances from the mean.

`first` is 4 × the index of the first element that is not finite, plus 0, 1 or 2: it is NaN, inf or −inf. So the least
of several is that of them all. It is `NONE`, or anything, where the counts say that everything is finite.
"""

NONE = 2**63 - 1

WIDTH = len(FIELDS)

_BAD = np.array([np.nan, np.inf, -np.inf, 0.0])  # no row has the last

Rows = npt.NDArray[np.int64]
"""Shaped (WIDTH, number of rows)."""


def measurements(rows: Rows) -> Measurements:
    """The statistics and fingerprints of whole tensors."""
    finite, zeros, nan, inf = (rows[FIELDS.index(name)] for name in ("finite", "zeros", "nan", "inf"))
    mean, spread, low, high = (rows[FIELDS.index(name)].view(np.float64) for name in ("mean", "spread", "low", "high"))
    root = np.sqrt(np.maximum(finite, 1).astype(np.float64))
    even = low == high  # the mean is that number then and nothing spreads, whatever rounding says
    mean, spread = np.where(even, low, mean), np.where(even, 0.0, spread)
    with np.errstate(over="ignore", invalid="ignore"):  # a norm beyond float64 is infinite
        moments = np.stack(
            [low, high, mean, spread / root, np.hypot(spread, root * mean), np.maximum(np.maximum(-low, high), 0.0)]
        )
    moments += 0.0  # −0 is reported as 0
    moments[:, finite == 0] = np.nan
    counts = np.stack([zeros, nan, inf, finite + nan + inf])
    first, bad = rows[FIELDS.index("first")], nan + inf > 0
    return Measurements(
        moments,
        counts,
        rows[FIELDS.index("fingerprint")].view(np.uint64),
        np.where(bad, first >> 2, -1),
        np.where(bad, _BAD[first & 3], 0.0),
    )
