"""The moments of a tensor against plain numpy in extended precision, for every dtype and layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from astray.stats import DTYPES, Strided, numpy_moments
from astray.stats import moments as front
from astray.stats.moments import Moments, moments, powers
from pairwise import grid
from stats.arrays import LAYOUTS, decoded, encode, make
from stats.backends import BACKENDS, native_kernels
from stats.plain_moments import CASES, agree


@pytest.fixture(params=BACKENDS, autouse=True, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test once with each backend."""
    if request.param == "native" and native_kernels is None:
        pytest.skip("the native kernels are not built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "_backend", numpy_moments if request.param == "numpy" else native_kernels._native)
        yield


def check(array: np.ndarray, dtype: str) -> Moments:
    result = moments(Strided.from_numpy(array, dtype))
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        values = decoded(array, dtype)
    agree(result, values)
    return result


@grid(
    dtype=DTYPES,
    layout=["contiguous", "permuted", "strided", "backwards", "expanded", "scalar", "empty"],
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_every_dtype_in_every_layout(dtype: str, layout: str) -> None:
    check(LAYOUTS[layout](make(dtype, (40, 50))), dtype)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if DTYPES[name].kind in ("float", "complex")])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_nan_and_infinity_are_counted_and_left_out(dtype: str, layout: str) -> None:
    check(LAYOUTS[layout](make(dtype, (40, 150), special=True)), dtype)


@grid(
    dtype=["float32", "float64", "bfloat16", "int32", "uint8", "float8_e5m2"],
    count=[0, 1, 2, 7, 8, 9, 2047, 2048, 2049, 300_001],
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_sizes_around_the_lanes_blocks_and_chunks(dtype: str, count: int) -> None:
    check(make(dtype, (count,)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern(dtype: str) -> None:
    """Random bytes: numbers of every size, and with most dtypes some that are not finite."""
    data = np.random.default_rng(0).integers(0, 256, 3000 * DTYPES[dtype].itemsize, dtype=np.uint8)
    if dtype == "bool":
        data &= 1
    check(data.view(DTYPES[dtype].storage), dtype)


@pytest.mark.parametrize("count", [100, 5000, 60_000])
@pytest.mark.parametrize(
    ("mean", "std"), [(1000.0, 1e-3), (-1e6, 1e-3), (1.0, 1e-9), (3.0, 1.0), (1e30, 1e28), (1e-30, 1e-32)]
)
def test_a_large_mean_does_not_drown_the_spread(mean: float, std: float, count: int) -> None:
    values = mean + std * np.random.default_rng(0).standard_gamma(2.0, count)
    check(values, "float64")
    check(values.astype(np.float32), "float32")


@pytest.mark.parametrize(
    "values",
    [
        np.concatenate([1000 + np.sin(np.arange(5000)), np.sin(np.arange(300_000))]),
        np.concatenate([np.zeros(5000), 1e3 + 1e-3 * np.sin(np.arange(300_000))]),
        np.linspace(1e6, -1e6, 300_000),
        np.repeat([0.0, 0.0, 1.0], 100_000),
    ],
    ids=["begins elsewhere", "begins with zeros", "slides", "steps"],
)
def test_a_mean_that_moves_along_the_tensor(values: np.ndarray) -> None:
    check(values, "float64")


@pytest.mark.parametrize("size", [1e308, 1e200, 1e100, 1e61, 1e60, 1e-60, 1e-61, 1e-200, 1e-300, 1e-320])
@pytest.mark.parametrize("count", [10, 5000])
def test_fourth_powers_beyond_float64(size: float, count: int) -> None:
    values = np.random.default_rng(0).uniform(-0.5, 1.0, count) * size
    values[3] = math.nan
    found = check(values, "float64")
    finite = values[np.isfinite(values)].astype(np.longdouble)
    if size > 1e-300:  # below, the spread itself has few bits
        assert found.std() == pytest.approx(float(finite.std()), rel=1e-12)
        assert found.std(ddof=1) == pytest.approx(float(finite.std(ddof=1)), rel=1e-12)
        assert found.l2 == pytest.approx(float(np.sqrt((finite**2).sum())), rel=1e-12)
        ordinary = moments(Strided.from_numpy(scaled := values / size))
        assert scaled.size == values.size
        assert (found.skew, found.kurtosis) == pytest.approx((ordinary.skew, ordinary.kurtosis), rel=1e-9)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -3.7, 1e300, 1e-300])
@pytest.mark.parametrize("count", [1, 3, 5000, 300_000])
def test_equal_elements_do_not_spread(value: float, count: int) -> None:
    found = check(np.full(count, value), "float64")
    assert (found.std(), found.min, found.absmax) == (0.0, value, abs(value))
    assert math.copysign(1.0, found.min) == math.copysign(1.0, value + 0.0)
    assert math.isnan(found.skew)
    assert math.isnan(found.kurtosis)


@pytest.mark.parametrize("values", [[], [math.nan] * 3, [math.inf, -math.inf, math.nan], [math.inf] * 3000])
def test_nothing_finite(values: list[float]) -> None:
    for dtype in ("float64", "float32", "bfloat16", "float8_e5m2"):
        found = check(encode(np.array(values), dtype), dtype)
        assert math.isnan(found.std())
        assert found.l2 == 0.0


def test_one_element_has_no_sample_variance() -> None:
    found = moments(Strided.from_numpy(value := np.array(7.0)))
    assert value.shape == ()
    assert (found.var(), found.l2, found.mean) == (0.0, 7.0, 7.0)
    assert math.isnan(found.var(ddof=1))
    assert math.isnan(found.std(ddof=1))


def test_the_derived_measures() -> None:
    values = np.random.default_rng(0).standard_gamma(2.0, 10_000)
    found = moments(Strided.from_numpy(values))
    away = values - values.mean()
    assert found.var() == pytest.approx(values.var(), rel=1e-13)
    assert found.std(ddof=1) == pytest.approx(values.std(ddof=1), rel=1e-13)
    assert found.l2 == pytest.approx(np.linalg.norm(values), rel=1e-13)
    assert found.skew == pytest.approx((away**3).mean() / values.std() ** 3, rel=1e-12)
    assert found.kurtosis == pytest.approx((away**4).mean() / values.std() ** 4 - 3, rel=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 64.0, 65.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "float8_e4m3fn", "complex64"])
def test_any_power(dtype: str, p: float) -> None:
    array = LAYOUTS["strided"](make(dtype, (80, 90), special=DTYPES[dtype].kind != "int"))
    values = decoded(array, dtype).reshape(-1).astype(np.longdouble)
    size = np.abs(values[np.isfinite(values)])
    for unit in (1.0, 3.5):
        expected = (size != 0).sum() if p == 0 else ((size / unit) ** p).sum()
        found = powers(Strided.from_numpy(array, dtype), p, unit)
        assert type(found) is float
        assert found == pytest.approx(float(expected), rel=1e-12)


def test_negative_powers() -> None:
    values = np.array([1.0, -2.0, 4.0, math.nan, math.inf])
    assert powers(Strided.from_numpy(values), -2.0) == 1.0 + 0.25 + 0.0625
    values[0] = 0.0
    assert powers(Strided.from_numpy(values), -2.0) == math.inf


def test_a_unit_keeps_large_powers_in_range() -> None:
    values = np.random.default_rng(0).standard_normal(300_001) * 1e10
    tensor = Strided.from_numpy(values)
    unit = moments(tensor).absmax
    assert powers(tensor, 40.0) == math.inf
    expected = (np.abs(values.astype(np.longdouble)) ** 40).sum() ** (np.longdouble(1) / 40)
    assert unit * powers(tensor, 40.0, unit) ** (1 / 40) == pytest.approx(float(expected), rel=1e-12)


def test_powers_of_nothing_are_zero() -> None:
    for values in (np.array([]), np.array([math.nan, math.inf])):
        assert powers(Strided.from_numpy(values), 3.0) == 0.0


@pytest.mark.parametrize(("p", "unit"), [(math.inf, 1.0), (math.nan, 1.0), (2.0, 0.0), (2.0, -1.0), (2.0, math.inf)])
def test_powers_and_units_must_be_numbers(p: float, unit: float) -> None:
    value = np.ones(3)
    with pytest.raises(ValueError, match="must be"):
        powers(Strided.from_numpy(value), p, unit)


@CASES
@given(
    values=arrays.arrays(
        st.sampled_from([np.float64, np.float32, np.float16, np.int16]), arrays.array_shapes(max_dims=3, max_side=9)
    ),
    data=st.data(),
)
def test_whatever_there_is(values: np.ndarray, data: st.DataObject) -> None:
    view = values.transpose(data.draw(st.permutations(range(values.ndim))))
    view = view[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in view.shape)]
    agree(moments(Strided.from_numpy(view)), view)
