"""What a kernel finds of a tensor: a row of nine words, and how such rows become statistics.

Rows lie column by column in an int64 buffer of nine times its capacity, floats by their bits. A row describes a whole
tensor, or the part of it that one program of a kernel has read. It holds the mean and the spread rather than sums, so
that nothing overflows on the way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.stats import Measurements

FIELDS = ("finite", "mean", "spread", "low", "high", "zeros", "nan", "inf", "fingerprint")
"""`finite` counts the elements that the next four are about; `spread` is the norm of their distances from the mean."""

WIDTH = len(FIELDS)

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
    return Measurements(moments, counts, rows[FIELDS.index("fingerprint")].view(np.uint64))
