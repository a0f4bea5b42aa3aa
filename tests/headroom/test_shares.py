"""Bounds of shares, against plain numpy counts of the very values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.headroom.measures import at_least, below, normal_share
from astray.headroom.observations import StatisticColumns

RANDOM = np.random.default_rng(7)


def statistics(*arrays: np.ndarray) -> StatisticColumns:
    """What a recording would keep of some arrays."""
    rows = []
    for array in arrays:
        x = np.asarray(array, np.float64).reshape(-1)
        biggest = np.abs(x).max()
        l2 = biggest * np.sqrt(((x / (biggest or 1)) ** 2).sum())  # in units of the largest: no square overflows
        rows.append((x.min(), x.max(), x.mean(), l2, biggest, x.size, np.count_nonzero(x)))
    return StatisticColumns(*(np.array(column, np.float64) for column in zip(*rows, strict=True)))


def families(size: int) -> dict[str, np.ndarray]:
    normal = RANDOM.normal(size=size)
    return {
        "normal": normal,
        "shifted": normal + 3,
        "heavy": RANDOM.standard_t(1.5, size=size),
        "lognormal": np.exp(3 * normal),
        "relu": np.maximum(normal, 0),
        "sparse": normal * (RANDOM.random(size) < 0.1),
        "softmax": np.exp(5 * normal) / np.exp(5 * normal).sum(),
        "constant": np.full(size, -2.5),
        "two values": np.where(RANDOM.random(size) < 0.3, 1e-6, 1.0),
        "outlier": np.append(normal * 1e-6, 1.0),
        "one": normal[:1],
        "zeros": np.zeros(size),
        "negative": -np.abs(normal),
        "tiny": normal * 1e-300,
        "huge": normal * 1e300,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 50, 5000])
def test_the_truth_is_always_within_the_bounds(size: int) -> None:
    for name, array in families(size).items():
        found = statistics(array)
        nonzero = array[array != 0]
        for threshold in [*np.quantile(np.abs(array), [0, 0.01, 0.3, 0.9, 1]), np.abs(array).max() * 1.01, 1e-6, 1.0]:
            truth = np.count_nonzero(np.abs(nonzero) < threshold) / max(1, len(nonzero))
            least, most = below(found, float(threshold))
            assert least[0] <= truth <= most[0], (name, threshold)
            upper = np.count_nonzero(np.abs(nonzero) >= threshold) / max(1, len(nonzero))
            least, most = at_least(found, float(threshold))
            assert least[0] - 1e-12 <= upper <= most[0] + 1e-12, (name, threshold)


@pytest.mark.parametrize(
    ("array", "threshold", "least", "most"),
    [
        ([1e-9, -2e-9, 0.0], 1e-8, 1, 1),  # all are below
        ([3.0, 4.0, 5.0], 2.0, 0, 0),  # all of one sign: the smallest is known
        ([-3.0, -4.0, -5.0], 3.0, 0, 0),
        ([0.0, 0.0], 1.0, 0, 0),  # nothing is not zero
        ([1.0, 1.0, 1.0, -1.0], 0.5, 0, 0),  # the sum of squares leaves no room
        ([1.0, 1e-9, 1e-9, 1e-9], 1e-3, 0.75, 0.75),  # and here it leaves no other choice
        ([1.0, -1e-9, 0.0, 0.0], 1e-3, 0.5, 0.5),  # the other extreme is below, and the only one
    ],
)
def test_what_is_exact(array: list[float], threshold: float, least: float, most: float) -> None:
    found = below(statistics(np.array(array)), threshold)
    assert (found.least[0], found.most[0]) == (least, most)


@pytest.mark.parametrize("lost", [{"l2": 0.0}, {"mean": 0.0}, {"l2": 1e9}, {"mean": 0.0, "l2": 0.0}])
def test_sums_that_are_not_there_never_make_a_bound_wrong(lost: dict[str, float]) -> None:
    for array in families(50).values():
        found = statistics(array)._replace(**{name: np.array([value]) for name, value in lost.items()})
        nonzero = np.abs(array[array != 0])
        for threshold in (1e-3, 0.5, 2.0):
            truth = np.count_nonzero(nonzero < threshold) / max(1, len(nonzero))
            least, most = below(found, threshold)
            assert least[0] <= truth <= most[0]


def test_a_small_tensor_is_known_to_be_small_and_a_large_one_only_estimated() -> None:
    normal = RANDOM.normal(size=100_000)
    found = statistics(normal * 1e-7, normal)
    thresholds = np.array([6.1e-5, 6.1e-5])
    least = below(found, thresholds).least
    assert least[0] == 1.0
    assert least[1] == 0
    assert normal_share(found, thresholds)[1] == pytest.approx(math.erf(6.1e-5 / math.sqrt(2)), rel=0.02)


@pytest.mark.parametrize(("mean", "spread", "threshold"), [(0, 1, 0.1), (0.5, 0.2, 0.4), (0, 1, 1e-6), (3, 1, 2e-5)])
def test_the_estimate_is_the_normal_distribution(mean: float, spread: float, threshold: float) -> None:
    x = mean + spread * RANDOM.normal(size=200_000)
    density = np.linspace(-threshold, threshold, 20_001)
    centre, width = x.mean(), x.std()
    expected = np.trapezoid(np.exp(-(((density - centre) / width) ** 2) / 2), density) / width / np.sqrt(2 * np.pi)
    assert normal_share(statistics(x), threshold)[0] == pytest.approx(expected, rel=1e-6)


def test_the_estimate_leaves_zeros_out_and_knows_a_constant() -> None:
    x = RANDOM.normal(size=50_000)
    half = np.append(x, np.zeros(50_000))
    assert normal_share(statistics(half), 0.3)[0] == pytest.approx(np.mean(np.abs(x) < 0.3), abs=0.01)
    constants = statistics(np.full(9, 2.0), np.full(9, 2.0), np.zeros(3))
    assert normal_share(constants, np.array([1.9, 2.1, 1.0])).tolist() == [0, 1, 0]
