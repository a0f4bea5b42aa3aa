"""Moments by plain numpy in extended precision, and how far others may be from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import settings

from astray.stats.moments import Moments

CASES = settings(max_examples=200, deadline=None, derandomize=True, database=None)
"""The same cases every time, and no file left behind."""


def plain(values: np.ndarray) -> dict[str, Any]:
    """The definition, in the widest float there is; central sums are of the numbers themselves, without an exponent."""
    with np.errstate(invalid="ignore"):
        x = values.reshape(-1).astype(np.longdouble)
    finite = x[np.isfinite(x)]
    found: dict[str, Any] = {
        "count": x.size,
        "finite": finite.size,
        "nan": int(np.isnan(x).sum()),
        "posinf": int((x == math.inf).sum()),
        "neginf": int((x == -math.inf).sum()),
        "zeros": int((x == 0).sum()),
        "sum": finite.sum(),
        "abssum": np.abs(finite).sum(),
    }
    if finite.size:
        found |= {"min": finite.min(), "max": finite.max(), "mean": finite.mean()}
        found |= {"absmin": np.abs(finite).min(), "absmax": np.abs(finite).max()}
        away = finite - finite.mean()
        away -= away.mean()  # the mean of a million has no more than 64 bits either
        square = away * away
        found |= {"m2": square.sum(), "m3": (square * away).sum(), "m4": (square * square).sum()}
    return found


def agree(result: Moments, values: np.ndarray) -> None:
    """Counts and extremes exactly; sums to 1e-12, of what they are made of where it cancels."""
    expected = plain(values)
    for name in ("count", "finite", "nan", "posinf", "neginf", "zeros"):
        assert getattr(result, name) == expected[name], name
        assert type(getattr(result, name)) is int, name
    assert all(type(field) is float for field in result[6:16])
    if not result.finite:
        assert all(math.isnan(getattr(result, name)) for name in ("min", "max", "absmin", "absmax", "mean"))
        assert result[10:12] + result[13:] == (0.0, 0.0, 0.0, 0.0, 0.0, 0)
        return
    for name in ("min", "max", "absmin", "absmax"):
        assert getattr(result, name) == expected[name], name
    n, unit = result.finite, np.ldexp(np.longdouble(1), result.exponent)
    close(result.abssum, expected["abssum"], 0.0)
    close(result.sum, expected["sum"], expected["abssum"])
    close(result.mean, expected["mean"], expected["abssum"] / n)
    if result.min == result.max:
        assert (result.mean, result.m2, result.m3, result.m4) == (result.min, 0.0, 0.0, 0.0)
        return
    spread = np.sqrt(expected["m2"] / n)
    close(result.m2 * unit**2, expected["m2"], 0.0)
    close(result.m3 * unit**3, expected["m3"], n * spread**3)
    close(result.m4 * unit**4, expected["m4"], n * spread**4)


def close(result: Any, expected: Any, parts: Any) -> None:
    if np.isinf(result):  # of what it is: to math.isinf all beyond float64 is infinite
        assert abs(expected) > np.finfo(np.float64).max
        assert np.sign(expected) == np.sign(result)
        return
    assert abs(np.longdouble(result) - expected) <= 1e-12 * max(abs(expected), parts) + 2.0**-1074
