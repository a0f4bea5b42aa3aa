"""Every statistic against plain numpy in extended precision, for every dtype and layout."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.records import Statistics
from astray.stats import DTYPES, ShardPosition, Strided, kernels
from pairwise import grid
from stats.arrays import LAYOUTS, decoded, encode, make
from stats.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("backend")


def plain(values: np.ndarray) -> Statistics:
    """The definition, in the widest float there is."""
    x = values.reshape(-1).astype(np.longdouble)
    finite = x[np.isfinite(x)]
    bad = np.flatnonzero(~np.isfinite(x))
    first = (int(bad[0]), math.nan if np.isnan(x[bad[0]]) else float(x[bad[0]])) if bad.size else (None, None)
    counts = int((x == 0).sum()), int(np.isnan(x).sum()), int(np.isinf(x).sum()), x.size, *first
    if not finite.size:
        return Statistics(None, None, None, None, None, None, *counts)
    mean = finite.mean()
    measures = (
        finite.min(),
        finite.max(),
        mean,
        np.sqrt(((finite - mean) ** 2).mean()),
        np.sqrt((finite**2).sum()),
        np.abs(finite).max(),
    )
    return Statistics(*map(float, measures), *counts)


def check(array: np.ndarray, dtype: str, values: np.ndarray | None = None) -> Statistics:
    expected = plain(decoded(array, dtype) if values is None else values)
    result = kernels.measure(Strided.from_numpy(array, dtype)).statistics
    assert result is not None
    assert result[6:] == expected[6:]
    if expected.first_bad is not None:  # without a fingerprint memory is walked another way
        alone = kernels.measure(Strided.from_numpy(array, dtype), fingerprint=False).statistics
        assert alone is not None
        assert alone[6:] == expected[6:]
    if expected.min is None:
        assert result == expected
        return result
    assert (result.min, result.max, result.absmax) == (expected.min, expected.max, expected.absmax)
    assert all(type(field) is float for field in result[:6])
    typical = expected.l2 / math.sqrt(max(expected.count - expected.nan - expected.inf, 1))
    assert result.mean == pytest.approx(expected.mean, rel=1e-12, abs=1e-13 * typical)  # a sum may cancel
    assert result.std == pytest.approx(expected.std, rel=1e-12, abs=0.0)
    assert result.l2 == pytest.approx(expected.l2, rel=1e-12, abs=0.0)
    return result


@grid(dtype=DTYPES, layout=LAYOUTS, backend=BACKENDS, fixtures=["backend"])
def test_every_dtype_in_every_layout(dtype: str, layout: str) -> None:
    check(LAYOUTS[layout](make(dtype, (40, 50))), dtype)


@grid(
    dtype=[name for name in DTYPES if DTYPES[name].kind in ("float", "complex")],
    layout=["contiguous", "transposed", "strided", "permuted", "backwards", "expanded column"],
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_nan_and_infinity_are_counted_and_left_out(dtype: str, layout: str) -> None:
    check(LAYOUTS[layout](make(dtype, (40, 150), special=True)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e5m2", "complex64"])
def test_the_first_bad_element_wherever_it_is(dtype: str) -> None:
    """In the last chunk, a middle block or at the start; alone, and before others, in any order of memory."""
    values = encode(np.ones(600_000), dtype).reshape(-1, 500)
    imaginary = dtype == "complex64"
    straight, turned = {}, {}
    for place, value in ((values.size - 1, -math.inf), (values.size // 2, math.inf), (2049, math.nan), (0, -math.inf)):
        values.reshape(-1)[place] = encode(np.array([1.0, value] if imaginary else [value]), dtype)[0]
        straight[place] = turned[place % 500 * len(values) + place // 500] = value
        for array, bad in ((values, straight), (values.T, turned)):
            found = kernels.measure(Strided.from_numpy(array, dtype)).statistics
            assert found is not None
            assert found[10:] == (2 * min(bad) + 1 if imaginary else min(bad), bad[min(bad)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "complex128"])
def test_the_first_bad_element_of_a_shard_counts_in_the_whole(dtype: str) -> None:
    whole = make(dtype, (12, 20))
    whole[2, 19], whole[7, 4], whole[7, 11] = (encode(np.full(2, np.nan), dtype)[0],) * 3
    parts = 2 if DTYPES[dtype].kind == "complex" else 1
    for rows, columns, first in [
        (slice(0, 6), slice(0, 20), (2, 19)),
        (slice(6, 12), slice(0, 10), (7, 4)),
        (slice(6, 12), slice(10, 20), (7, 11)),
        (slice(8, 12), slice(5, 9), None),
    ]:
        shard = ShardPosition((rows.start, columns.start), whole.shape)
        for part in (whole[rows, columns], whole.T.copy().T[rows, columns]):
            found = kernels.measure(Strided.from_numpy(part, dtype), shard=shard).statistics
            assert found is not None
            assert found.first_bad == (None if first is None else parts * (20 * first[0] + first[1]))


@grid(
    dtype=["float32", "float64", "float16", "bfloat16", "int32", "uint8", "float8_e5m2"],
    count=[1, 2, 15, 16, 17, 2047, 2048, 2049, 5000, 300_001],
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_sizes_around_the_lanes_blocks_and_chunks(dtype: str, count: int) -> None:
    check(make(dtype, (count,)), dtype)


@pytest.mark.parametrize("count", [100, 5000, 600_000])
@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 1.0), (1000.0, 1.0), (1e6, 1e-3), (-1e6, 1e-3), (1.0, 1e-9), (1e30, 1e28), (1e-30, 1e-32)]
)
def test_a_large_mean_does_not_drown_the_spread(mean: float, std: float, count: int) -> None:
    values = mean + std * np.random.default_rng(0).standard_normal(count)
    check(values, "float64")
    check(values.astype(np.float32), "float32")


def test_a_mean_that_moves_along_the_tensor() -> None:
    rng = np.random.default_rng(0)
    check(np.concatenate([1000 + rng.standard_normal(5000), rng.standard_normal(500_000)]), "float64")
    check(np.concatenate([np.zeros(5000), 1e6 + 1e-3 * rng.standard_normal(500_000)]), "float64")
    check(np.linspace(1e6, -1e6, 600_000), "float64")


@pytest.mark.parametrize("count", [10, 5000])
@pytest.mark.parametrize("size", [1e200, 1.7e308, 1e-200, 1e-310, 5e-324])
def test_squares_that_overflow_or_vanish(size: float, count: int) -> None:
    values = size * np.random.default_rng(0).uniform(-1, 1, count)
    values[0] = size
    expected_l2 = plain(values).l2
    if expected_l2 is not None and math.isinf(expected_l2):
        statistics = kernels.measure(Strided.from_numpy(values)).statistics
        assert statistics is not None
        assert statistics.l2 == math.inf  # it is beyond float64
        assert statistics.std == pytest.approx(plain(values).std, rel=1e-12)
        return
    # Results that are subnormal themselves have few bits.
    result, expected = kernels.measure(Strided.from_numpy(values)).statistics, plain(values)
    assert result is not None
    for one, other in zip(result[2:5], expected[2:5], strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=5e-324 if size < 1e-300 else 0.0)


def test_huge_values_beside_a_nan_and_a_large_offset() -> None:
    values = 1e200 * (1 + 1e-9 * np.random.default_rng(0).standard_normal(5000))
    values[77] = np.nan
    check(values, "float64")


@pytest.mark.parametrize("size", [1e30, 3e38, 1e-38, 1e-44])
def test_float32_extremes(size: float) -> None:
    check((size * np.random.default_rng(0).uniform(-1, 1, 5000)).astype(np.float32), "float32")


@pytest.mark.parametrize("value", [0.1, -1e6, 0.0, 1e200, 5e-324])
@pytest.mark.parametrize("count", [1, 3000, 300_000])
def test_equal_elements_have_no_spread(value: float, count: int) -> None:
    array = np.full(count, value)
    result = kernels.measure(Strided.from_numpy(array)).statistics
    assert result is not None
    assert (result.mean, result.std, result.min, result.max) == (value, 0.0, value, value)
    assert result.l2 == pytest.approx(abs(value) * math.sqrt(count), rel=1e-12, abs=0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_finite_element_leaves_no_measure(value: float) -> None:
    check(np.full((30, 100), value, np.float32), "float32")
    check(np.full(3, value), "float64")


def test_minus_zero_is_a_zero() -> None:
    result = check(np.array([-0.0, -0.0], np.float32), "float32")
    assert result.zeros == 2
    assert math.copysign(1, result.min or 0.0) == math.copysign(1, result.absmax or 0.0) == 1.0


def test_integers_of_64_bits() -> None:
    check(np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max, 0]), "int64")
    check(np.array([0, np.iinfo(np.uint64).max], np.uint64), "uint64")


def test_a_bool_that_is_not_0_or_1_is_true() -> None:
    raw = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    check(raw, "bool", np.array([0.0, 1.0, 1.0, 1.0]))


def test_only_what_is_requested() -> None:
    array = np.ones(3, np.float32)
    tensor = Strided.from_numpy(array)
    both = kernels.measure(tensor)
    assert kernels.measure(tensor, statistics=False) == both._replace(statistics=None)
    assert kernels.measure(tensor, fingerprint=False) == both._replace(fingerprint=None)


def test_overlapping_windows() -> None:
    base = np.arange(100, dtype=np.float32)
    check(np.lib.stride_tricks.sliding_window_view(base, 10), "float32")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float7"):
        kernels.measure(Strided(0, "float7", (0,), (1,)))


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(ValueError, match="Copy the array"):
        Strided.from_numpy(np.zeros(3, [("a", "f4"), ("b", "u1")])["a"])
    with pytest.raises(ValueError, match="astype"):
        Strided.from_numpy(np.zeros(3, ">f4"))
    with pytest.raises(ValueError, match="cannot be read as bfloat16"):
        Strided.from_numpy(np.zeros(3, np.float32), "bfloat16")
