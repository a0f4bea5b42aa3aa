"""The slice in which two tensors are furthest apart, and a typical row, against plain numpy in extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.stats import DTYPES, Strided, kernels
from astray.stats.kernels import Slices
from stats.arrays import LAYOUTS, decoded, encode

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(4, 16), (3, 5, 7, 11), (32, 3, 7, 7), (40, 100), (100, 40), (1, 60, 1, 20), (3, 70_000), (70_000, 17)]


def differences(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    finite = np.isfinite(reference) & np.isfinite(candidate)
    return np.where(finite, candidate.astype(np.longdouble) - reference.astype(np.longdouble), 0)


def plain_row(reference: np.ndarray, candidate: np.ndarray) -> float:
    """‖d‖ of the median row; NaN where there are fewer than eight of at least 16 elements."""
    d = differences(reference, candidate)
    width = d.shape[-1]
    if width < 16 or d.size // width < 8:
        return math.nan
    squares = np.sort((d * d).reshape(-1, width).sum(axis=1))
    return float(np.sqrt(squares[len(squares) // 2] * len(squares)))


def plain(reference: np.ndarray, candidate: np.ndarray, rank: int) -> tuple[float, int, int] | None:
    """‖d‖ of every slice, in the widest float there is; complex parts come last."""
    d = differences(reference, candidate)
    found: tuple[float, int, int] | None = None
    for dim in range(rank):
        size = d.shape[dim]
        if size < 2 or d.size // size < 16:
            continue
        norms = np.sqrt((d * d).sum(axis=tuple(axis for axis in range(d.ndim) if axis != dim)) * size)
        if found is None or norms.max() > found[0]:
            found = float(norms.max()), dim, int(norms.argmax())
    return found


def pair(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two tensors, the second of which is further off in one row."""
    rng = np.random.default_rng(seed)
    parts = (*shape, 2) if DTYPES[dtype].kind == "complex" else shape
    one = rng.normal(0, 20, parts)
    other = one + rng.normal(0, 4, parts)
    other[-1] += 10
    sides = (encode(values.reshape(-1), dtype).reshape(shape) for values in (one, other))
    return next(sides), next(sides)


def found(one: np.ndarray, other: np.ndarray, dtype: str) -> Slices | None:
    sides = Strided.from_numpy(one, dtype), Strided.from_numpy(other, dtype)
    return kernels.slice_errors(*sides, kernels.contrast(*sides).max_abs_error or 0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "complex64", "int32"])
def test_as_plain_numpy(shape: tuple[int, ...], dtype: str) -> None:
    one, other = pair(shape, dtype)
    expected = plain(decoded(one, dtype), decoded(other, dtype), len(shape))
    result = found(one, other, dtype)
    assert expected is not None
    assert result is not None
    assert result.furthest == pytest.approx(expected[0], rel=1e-12)
    assert (result.dim, result.index) == expected[1:]
    typical = plain_row(decoded(one, dtype), decoded(other, dtype))
    assert result.typical == pytest.approx(typical, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_the_strides(layout: str) -> None:
    one, other = (LAYOUTS[layout](side) for side in pair((24, 50), "float32"))
    expected = plain(one.astype(np.float64), other.astype(np.float64), one.ndim)
    result = found(one, other, "float32")
    if expected is None:
        assert result is None
        return
    typical = plain_row(one.astype(np.float64), other.astype(np.float64))
    assert result is not None
    assert (result.furthest, result.dim, result.index) == (pytest.approx(expected[0], rel=1e-12), *expected[1:])
    assert result.typical == pytest.approx(typical, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("shape", [(), (1,), (100,), (3, 5), (1, 100), (2, 15), (0, 100)])
def test_slices_have_company_and_at_least_sixteen_elements(shape: tuple[int, ...]) -> None:
    one = np.ones(shape, np.float32)
    assert found(one, one * 2, "float32") is None


def test_only_finite_pairs_count() -> None:
    one, other = pair((8, 40), "float32")
    other[3, 5], one[4, 6], other[4, 7] = np.nan, np.inf, -np.inf
    expected = plain(one.astype(np.float64), other.astype(np.float64), 2)
    result = found(one, other, "float32")
    assert expected is not None
    assert result is not None
    assert (result.furthest, result.dim, result.index) == (pytest.approx(expected[0], rel=1e-12), *expected[1:])
    assert result.typical == pytest.approx(plain_row(one.astype(np.float64), other.astype(np.float64)), rel=1e-12)


def test_a_typical_row_does_not_see_the_few_that_are_far_off() -> None:
    one = np.zeros((64, 32))
    other = np.full((64, 32), 0.01)
    other[:31] = 5.0
    result = found(one, other, "float64")
    assert result is not None
    assert result.typical == pytest.approx(0.01 * math.sqrt(one.size))


@pytest.mark.parametrize("size", [1e300, 1.7e308, 1e-200, 1e-310])
def test_squares_beyond_the_range_of_float64(size: float) -> None:
    one, other = np.zeros((4, 20)), np.zeros((4, 20))
    one[2, :10], other[2, :10] = size, -size
    expected = 2 * np.longdouble(size) * np.sqrt(np.longdouble(10)) * 2
    result = found(one, other, "float64")
    assert result is not None
    assert result.furthest == pytest.approx(float(expected), rel=1e-12)
    assert (result.dim, result.index) == (0, 2)


def test_the_first_one_on_ties() -> None:
    assert found(np.zeros((16, 16)), np.ones((16, 16)), "float64") == Slices(16.0, 0, 0, 16.0)


def test_tensors_of_other_shapes_or_kinds_are_refused() -> None:
    one, other = (Strided.from_numpy(np.zeros(shape)) for shape in ((4, 16), (16, 4)))
    with pytest.raises(ValueError, match="no slices in common"):
        kernels.slice_errors(one, other, 0.0)
    with pytest.raises(ValueError, match="no pairs with a real one"):
        kernels.slice_errors(one, Strided.from_numpy(np.zeros((4, 16), np.complex128)), 0.0)
