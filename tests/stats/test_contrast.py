"""Every metric against plain numpy in extended precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from astray.stats import DTYPES, Contrast, Strided, kernels
from pairwise import grid
from stats.arrays import decoded, encode, nearby, random_values, ratio_precision
from stats.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("backend")

FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]


def ulp_rank(bits: int, itemsize: int, signed: bool) -> int:
    sign = 1 << (8 * itemsize - 1)
    return bits if not signed or bits < sign else sign - bits


def plain(
    reference: np.ndarray, candidate: np.ndarray, dtypes: tuple[str, str], rtol: float, atol: float
) -> dict[str, Any]:
    """The definitions, in the widest float there is."""
    r64, c64 = (decoded(raw, dtype).reshape(-1) for raw, dtype in zip((reference, candidate), dtypes, strict=True))
    both = np.isfinite(r64) & np.isfinite(c64)
    same_kind = (np.isnan(r64) & np.isnan(c64)) | (r64 == c64)
    mismatch = ~both & ~same_kind
    expected: dict[str, Any] = {
        "count": r64.size,
        "finite": int(both.sum()),
        "different": int(mismatch.sum() + (both & (r64 != c64)).sum()),
        "nan_reference": int(np.isnan(r64).sum()),
        "nan_candidate": int(np.isnan(c64).sum()),
        "inf_reference": int(np.isinf(r64).sum()),
        "inf_candidate": int(np.isinf(c64).sum()),
        "nonfinite_mismatch": int(mismatch.sum()),
        "first_nonfinite_mismatch": int(np.flatnonzero(mismatch)[0]) if mismatch.any() else -1,
    }
    places = np.flatnonzero(both)
    error64, size64 = np.abs(c64[both] - r64[both]), np.abs(r64[both])
    r, c = r64[both].astype(np.longdouble), c64[both].astype(np.longdouble)
    expected |= {
        "within_tolerance": int((error64 <= atol + rtol * size64).sum()),
        "within_1e3": int((error64 <= 1e-3 * size64).sum()),
        "within_5e3": int((error64 <= 5e-3 * size64).sum()),
        "rel_count": int((r != 0).sum()),
    }
    if not r.size:
        return expected
    for side, values in (("reference", r), ("candidate", c)):
        mean = values.mean()
        expected[f"mean_{side}"] = float(mean)
        expected[f"std_{side}"] = float(np.sqrt(((values - mean) ** 2).mean()))
        expected[f"l2_{side}"] = float(np.sqrt((values**2).sum()))
    norms = np.sqrt((r**2).sum()) * np.sqrt((c**2).sum())
    expected |= {
        "dot": float((r * c).sum()),
        "cosine": float((r * c).sum() / norms) if norms else None,
        "sum_abs_error": float(error64.astype(np.longdouble).sum()),
        "l2_error": float(np.sqrt(((c - r) ** 2).sum())),
        "max_abs_error": float(error64.max()),
        "max_abs_index": int(places[error64.argmax()]),
    }
    if (r != 0).any():
        ratio = error64[size64 != 0] / size64[size64 != 0]
        expected |= {
            "max_rel_error": float(ratio.max()),
            "max_rel_index": int(places[size64 != 0][ratio.argmax()]),
            "sum_rel_error": float(ratio.astype(np.longdouble).sum()),
        }
    part = DTYPES[dtypes[0]].part
    if dtypes[0] == dtypes[1] and DTYPES[part].kind == "float":
        size = DTYPES[part].itemsize
        bits = [np.ascontiguousarray(raw).reshape(-1).view(f"u{size}")[both].tolist() for raw in (reference, candidate)]
        signed = part != "float8_e8m0fnu"
        ulps = [abs(ulp_rank(a, size, signed) - ulp_rank(b, size, signed)) for a, b in zip(*bits, strict=True)]
        expected |= {"max_ulp": max(ulps), "mean_ulp": sum(ulps) / len(ulps)}
    return expected


def check(
    reference: np.ndarray,
    candidate: np.ndarray,
    dtypes: tuple[str, str] | str,
    rtol: float = 1e-2,
    atol: float = 1e-3,
) -> Contrast:
    pair = (dtypes, dtypes) if isinstance(dtypes, str) else dtypes
    result = kernels.contrast(
        Strided.from_numpy(reference, pair[0]), Strided.from_numpy(candidate, pair[1]), rtol=rtol, atol=atol
    )
    expected = plain(reference, candidate, pair, rtol, atol)
    sizes = expected.get("l2_reference", 0.0), expected.get("l2_candidate", 0.0)
    # A mean and a dot product may cancel.
    slack = {
        "mean_reference": 1e-13 * sizes[0],
        "mean_candidate": 1e-13 * sizes[1],
        "dot": 1e-13 * sizes[0] * sizes[1],
        "cosine": 1e-13,
    }
    close = {"sum_rel_error": ratio_precision(*pair)}
    for name, value in result._asdict().items():
        wanted = expected.get(name, -1 if name.endswith("index") else None)
        if isinstance(wanted, float) and not name.startswith("max_"):
            assert value == pytest.approx(wanted, rel=close.get(name, 1e-12), abs=slack.get(name, 0.0)), name
        else:
            assert value == wanted, name
            assert type(value) is type(wanted), name
    return result


@grid(
    dtype=FLOATS,
    count=[1, 7, 8, 17, 1024, 3001],
    special=[False, True],
    ids={"special": ["finite", "special"]},
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_every_float(dtype: str, count: int, special: bool) -> None:
    x = random_values(count, 1, special=special)
    y = nearby(x, 2)
    if special:
        y[::13] = random_values(count, 9, special=True)[::13]
    if dtype == "float8_e8m0fnu":
        x, y = np.abs(x), np.abs(y)
    check(encode(x, dtype), encode(y, dtype), dtype)


@pytest.mark.parametrize("dtype", ["complex32", "complex64", "complex128"])
def test_complex_is_compared_by_parts(dtype: str) -> None:
    x = random_values(3000, 1, special=True)
    check(encode(x, dtype), encode(nearby(x, 2), dtype), dtype)


@pytest.mark.parametrize("dtype", [name for name, d in DTYPES.items() if d.kind in ("int", "bool")])
def test_every_integer(dtype: str) -> None:
    rng = np.random.default_rng(0)
    high = 2 if dtype == "bool" else 100
    x = rng.integers(0, high, 3000)
    y = np.where(rng.random(3000) < 0.2, rng.integers(0, high, 3000), x)
    check(encode(x.astype(np.float64), dtype), encode(y.astype(np.float64), dtype), dtype)


@pytest.mark.parametrize(
    "pair",
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("float64", "float32"),
        ("float8_e4m3fn", "float64"),
        ("float32", "int32"),
        ("int64", "float16"),
        ("bool", "float32"),
        ("int8", "uint8"),
        ("complex64", "complex128"),
    ],
    ids="-".join,
)
def test_mixed_dtypes(pair: tuple[str, str]) -> None:
    x = np.abs(random_values(3000, 1))
    if any(DTYPES[name].kind in ("int", "bool") for name in pair):
        x = (x > 1) * 1.0 if "bool" in pair else np.round(x)
    check(encode(x, pair[0]), encode(x if "bool" in pair else np.abs(nearby(x, 2)), pair[1]), pair)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "uint8", "complex64"])
def test_layouts_do_not_count(dtype: str) -> None:
    x = np.abs(np.round(random_values(140 * 150 * 2, 1)))
    one, other = encode(x, dtype), encode(np.abs(nearby(x, 2)), dtype)
    one, other = one[: 140 * 150].reshape(140, 150), other[: 140 * 150].reshape(140, 150)
    expected = check(one, other, dtype)
    wide = np.zeros((280, 150), other.dtype)
    wide[::2] = other
    for a, b in [
        (np.asfortranarray(one), other),
        (one, np.asfortranarray(other)),
        (np.asfortranarray(one), wide[::2]),
        (one.reshape(-1), np.ascontiguousarray(other[::-1, ::-1])[::-1, ::-1]),
        (one.reshape(70, 2, 150), other),
    ]:
        result = kernels.contrast(Strided.from_numpy(a, dtype), Strided.from_numpy(b, dtype), rtol=1e-2, atol=1e-3)
        assert result == expected


@pytest.mark.parametrize("size", [1e30, 1e-40, 3e38])
def test_float32_extremes(size: float) -> None:
    x = (size * np.random.default_rng(0).uniform(-1, 1, 5000)).astype(np.float32)
    check(x, (x * np.float32(0.999)), "float32")


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-310])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_float64_squares_that_overflow_or_vanish(scale: float, offset: float) -> None:
    x = scale * (offset + np.random.default_rng(0).uniform(-1, 1, 5000))
    y = x * (1 + 1e-3 * np.random.default_rng(1).standard_normal(5000))
    x[3], y[4] = np.nan, np.inf
    result = kernels.contrast(Strided.from_numpy(x), Strided.from_numpy(y))
    expected = plain(x, y, ("float64", "float64"), 1e-5, 1e-8)
    for name in (
        "std_reference",
        "l2_reference",
        "std_candidate",
        "l2_candidate",
        "l2_error",
        "cosine",
        "sum_rel_error",
    ):
        # Subnormal results have few bits.
        assert getattr(result, name) == pytest.approx(expected[name], rel=1e-12, abs=5e-324 if scale < 1e-300 else 0), (
            name
        )
    assert result.dot == pytest.approx(expected["dot"], rel=1e-11)


def test_one_side_huge_the_other_tiny() -> None:
    rng = np.random.default_rng(0)
    x, y = 1e200 * rng.standard_normal(3000), 1e-200 * rng.standard_normal(3000)
    check(x, y, "float64")
    check(np.ones(3000), y, "float64")


def test_a_difference_far_below_the_values() -> None:
    x = np.full(3000, 1.0)
    x[7] = 1e-200
    y = x.copy()
    y[7] = 1.5e-200
    assert check(x, y, "float64").l2_error == pytest.approx(0.5e-200, rel=1e-12)


def test_a_difference_beyond_float64_is_infinite() -> None:
    x, y = np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0])
    result = kernels.contrast(Strided.from_numpy(x), Strided.from_numpy(y))
    assert (result.max_abs_error, result.max_abs_index, result.l2_error) == (math.inf, 0, math.inf)
    assert (result.mean_reference, result.l2_reference) == (0.85e308, 1.7e308)
    assert result.dot == -math.inf
    assert result.cosine == -1.0
    assert not any(isinstance(value, float) and math.isnan(value) for value in result)


def test_ties_go_to_the_first() -> None:
    x = np.ones(5000, np.float32)
    y = x.copy()
    y[[1500, 1501, 3000, 4999]] = 2.0
    result = check(x, y, "float32")
    assert (result.max_abs_index, result.max_rel_index) == (1500, 1500)


def test_the_largest_ratio_is_found_among_those_that_float32_cannot_tell_apart() -> None:
    x = np.random.default_rng(0).uniform(1, 2, 6000).astype(np.float32)
    check(x, x * np.float32(1.001), "float32")


@grid(
    tolerance=[(1e-5, 1e-8), (0.0, 1e-3), (1e-3, 0.0), (0.0, 0.0), (-1.0, 1e-3)],
    limit=[1e-3, 5e-3, 1e-5],
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_errors_at_a_limit_are_counted_exactly(limit: float, tolerance: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(9000).astype(np.float32)
    y = (x.astype(np.float64) * (1 + limit)).astype(np.float32)
    y = np.where(rng.random(9000) < 0.3, np.nextafter(y, x), y)
    x[4000:4100], y[4050:4100] = 0.0, -0.0
    check(x, y, "float32", *tolerance)


def test_ratios_beyond_float32() -> None:
    x = np.full(3000, 1e-38, np.float32)
    y = np.full(3000, 1e38, np.float32)
    x[::2], y[::2] = 3e38, -3e38
    check(x, y, "float32")
    check(y, x, "float32")


def test_one_block_differs() -> None:
    x = 1000 + np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    y = x.copy()
    y[5000] += 1
    check(x, y, "float32")
    x[7000] = y[7000] = np.nan
    check(x, y, "float32")


def test_equal_tensors() -> None:
    x = encode(random_values(5000, 3, special=True), "bfloat16")
    result = check(x, x, "bfloat16")
    assert (result.different, result.max_abs_error, result.max_ulp, result.nonfinite_mismatch) == (0, 0.0, 0, 0)
    assert result.cosine == pytest.approx(1.0, abs=1e-15)


def test_the_two_zeros_are_one_place() -> None:
    x, y = np.array([0.0, -0.0, 1.0], np.float32), np.array([-0.0, 0.0, 1.0], np.float32)
    result = check(x, y, "float32")
    assert (result.different, result.max_ulp) == (0, 0)


def test_the_farthest_float64() -> None:
    x, y = np.array([np.finfo(np.float64).max]), np.array([-np.finfo(np.float64).max])
    assert kernels.contrast(Strided.from_numpy(x), Strided.from_numpy(y)).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


def test_kinds_of_nonfinite() -> None:
    x = np.array([np.nan, np.nan, np.inf, np.inf, -np.inf, 1.0, np.inf])
    y = np.array([np.nan, np.inf, np.inf, -np.inf, -np.inf, np.nan, 2.0])
    result = check(x, y, "float64")
    assert (result.nonfinite_mismatch, result.first_nonfinite_mismatch, result.finite) == (4, 1, 0)


def test_integers_beyond_float64_still_differ() -> None:
    x = np.array([2**60, 2**60], np.int64)
    y = np.array([2**60, 2**60 + 1], np.int64)
    result = kernels.contrast(Strided.from_numpy(x), Strided.from_numpy(y))
    assert (result.different, result.max_abs_error) == (1, 0.0)


def test_empty_tensors() -> None:
    check(np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32), "float32")


def test_zero_references_have_no_relative_error() -> None:
    result = check(np.zeros(100), np.ones(100), "float64")
    assert (result.rel_count, result.max_rel_error, result.max_rel_index, result.cosine) == (0, None, -1, None)


def test_several_chunks() -> None:
    x = 1000 + np.random.default_rng(0).standard_normal(600_000).astype(np.float32)
    y = x + np.float32(1e-3)
    x[400_000] = np.nan
    check(x, y, "float32")


def test_different_numbers_of_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6 and 4 elements.*\(2, 3\) and \(4,\)"):
        check(np.zeros((2, 3)), np.zeros(4), "float64")
    with pytest.raises(ValueError, match="complex"):
        check(np.zeros(2, np.complex64), np.zeros(2), ("complex64", "float64"))
