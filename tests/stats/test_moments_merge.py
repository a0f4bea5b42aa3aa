"""Moments of parts, merged: the same as those of the whole, in whatever way it was cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from astray.stats import Strided
from astray.stats.moments import Moments, merge, moments
from stats.plain_moments import CASES, agree


def of(values: np.ndarray) -> Moments:
    return moments(Strided.from_numpy(np.ascontiguousarray(values)))


def cut(values: np.ndarray, *at: int) -> list[Moments]:
    return [of(part.copy()) for part in np.split(values, at)]


@pytest.mark.parametrize("mean", [0.0, 3.0, 1e6])
def test_parts_of_all_sizes(mean: float) -> None:
    values = mean + np.random.default_rng(0).standard_gamma(2.0, 20_000)
    values[17] = math.nan
    values[9000:9010] = [math.inf, -math.inf, 0.0, -0.0, 0.0] * 2
    agree(merge(cut(values, 1, 1, 3, 100, 9005, 19_999)), values)
    agree(merge([merge(cut(values[:500], 100)), merge(cut(values[500:], 7000))]), values)


def test_layers_that_differ_by_far() -> None:
    rng = np.random.default_rng(0)
    layers = [scale * rng.standard_normal(1000) + mean for scale, mean in ((1e-6, 1.0), (1.0, 0.0), (1e3, -1e5))]
    agree(merge([of(layer) for layer in layers]), np.concatenate(layers))


def test_the_order_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    parts = [of(rng.standard_normal(100) * 10.0**k + k) for k in range(12)]
    assert all(merge([parts[i] for i in rng.permutation(12)]) == merge(parts) for _ in range(10))


def test_one_part_is_itself() -> None:
    part, nothing = of(np.random.default_rng(0).standard_normal(100)), of(np.array([math.nan]))
    assert merge([part]) == part
    assert merge([nothing, part, nothing]) == part._replace(count=102, nan=2)


def test_no_parts() -> None:
    for parts in ([], [of(np.array([]))], [of(np.array([math.inf])), of(np.array([math.nan, -math.inf]))]):
        found = merge(parts)
        assert found.finite == 0
        assert (found.count, found.nan, found.posinf, found.neginf) == tuple(
            sum(part[k] for part in parts) for k in (0, 2, 3, 4)
        )
        assert math.isnan(found.mean)
        assert (found.sum, found.l2) == (0.0, 0.0)


def test_equal_parts_do_not_spread() -> None:
    found = merge([of(np.full(n, 0.1)) for n in (3, 7, 1000)])
    assert (found.mean, found.m2, found.m3, found.m4) == (0.1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("sizes", [(1e200, 1e200), (1e200, 1.0), (1e-200, 1e-210), (1e-200, 0.0), (1e308, 1e308)])
def test_parts_beyond_the_range_of_fourth_powers(sizes: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    parts = [size * rng.uniform(-1.0, 0.9, 50) for size in sizes]
    agree(merge([of(part) for part in parts]), np.concatenate(parts))


def test_sums_that_overflow_apart_but_not_together() -> None:
    values = np.array([1.5e308, 1.5e308, -1.5e308, -1.4e308])
    found = merge(cut(values, 2))
    assert found.sum == pytest.approx(1e307, rel=1e-12)
    assert found.mean == pytest.approx(2.5e306, rel=1e-12)
    assert found.abssum == math.inf


def test_sums_that_a_device_could_not_hold_are_not_finite_and_raise_nothing() -> None:
    ordinary = of(np.random.default_rng(0).standard_normal(100))
    parts = [ordinary._replace(m3=sign * math.inf, m4=math.inf) for sign in (1, -1)]
    found = merge(parts)
    assert not math.isfinite(found.m3)
    assert not math.isfinite(found.m4)
    assert found.std() == pytest.approx(ordinary.std(), rel=1e-12)


@CASES
@given(
    values=arrays.arrays(np.float64, st.integers(0, 60), elements=st.floats(width=32)),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_however_it_is_cut(values: np.ndarray, cuts: list[int]) -> None:
    agree(merge(cut(values, *sorted(cuts))), values)
