"""What is measured of parts and put together, beside what is measured of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.measure.pieces import merge_contrasts, merge_statistics
from astray.comparison.pair.micro_groups import STATISTICS
from astray.stats.kernels import Strided, contrast, measure

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30], np.float32)


def statistics(parts: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """The statistics of all parts as columns."""
    found = [measure(Strided.from_numpy(part)).statistics for tensor in parts for part in tensor]
    return {
        name: np.array([math.nan if getattr(one, name) is None else getattr(one, name) for one in found])
        for name in STATISTICS
    }


def merged(*tensors: list[np.ndarray]) -> dict[str, np.ndarray]:
    begin = np.cumsum([0, *(len(tensor) for tensor in tensors)])[:-1]
    return merge_statistics(statistics(list(tensors)), begin)


def random(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).normal(3, 2, size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        [random(2, 5), random(3, 5), random(1, 5)],
        [random(4)],
        [random(3), SPECIAL, random(2)],
        [np.full(3, np.nan, np.float32), random(7)],
        [np.zeros((0, 4), np.float32), random(2, 4)],
        [np.array([1e300, -1e300]), np.array([3e300])],
        [np.array([1, 2, 3]), np.array([7, -9])],
    ],
    ids=["random", "one", "special", "nothing finite", "empty", "huge", "integers"],
)
def test_statistics_of_parts_are_those_of_the_whole(tensor):
    together = np.concatenate(tensor)
    whole = measure(Strided.from_numpy(together)).statistics
    found = merged(random_first := [random(6), random(2)], tensor)
    assert found["count"].tolist() == [sum(part.size for part in random_first), whole.count]
    for name in ("min", "max", "absmax", "zeros", "nan", "inf"):
        assert found[name][1] == getattr(whole, name)
    for name in ("mean", "std", "l2"):
        assert found[name][1] == pytest.approx(getattr(whole, name), rel=1e-14)


def test_nothing_finite_anywhere_leaves_no_measure():
    nothing = np.full(2, np.inf, np.float32)
    found = merged([nothing, nothing])
    assert all(math.isnan(found[name][0]) for name in ("min", "max", "mean", "std", "l2", "absmax"))
    assert (found["inf"][0], found["count"][0]) == (4, 4)


def test_a_mean_far_beyond_the_largest_element_is_not_a_warning():
    parts = statistics([[random(2), random(2)]])
    parts["mean"][0] = parts["std"][1] = 1e308
    assert merge_statistics(parts, np.array([0]))["count"].tolist() == [4]


def test_a_part_without_statistics_leaves_none_of_the_whole():
    parts = statistics([[random(2), random(2)], [random(3), random(3)]])
    for name, column in parts.items():
        column[1] = -1 if name in ("zeros", "nan", "inf", "count") else math.nan
    found = merge_statistics(parts, np.array([0, 2]))
    assert found["count"].tolist() == [-1, 6]
    assert np.isnan(found["l2"]).tolist() == [True, False]


@pytest.mark.parametrize("cut", [[3], [1, 2], [0, 5], [1, 1, 4]], ids=str)
def test_contrasts_of_parts_are_those_of_the_whole(cut):
    reference = np.concatenate([random(5, 6), SPECIAL[None]])
    candidate = (reference * np.float32(1.01)).astype(np.float32)
    candidate[2, 3], candidate[5, 0], reference[4] = np.nan, 7.0, 0.0
    parts = [
        contrast(Strided.from_numpy(one), Strided.from_numpy(other))
        for one, other in zip(np.split(reference, cut), np.split(candidate, cut), strict=True)
    ]
    found = merge_contrasts(parts)
    whole = contrast(Strided.from_numpy(reference), Strided.from_numpy(candidate))
    for name, value in whole._asdict().items():
        if name in ("max_abs_index", "max_rel_index", "first_nonfinite_mismatch"):
            assert getattr(found, name) == -1
        elif isinstance(value, float):
            assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
        else:
            assert getattr(found, name) == value, name


def test_contrast_of_nothing_finite_and_of_zeros():
    nan, zeros = np.full(2, np.nan), np.zeros(2)
    of_nan = contrast(Strided.from_numpy(nan), Strided.from_numpy(nan))
    of_zeros = contrast(Strided.from_numpy(zeros), Strided.from_numpy(zeros))
    assert merge_contrasts([of_nan, of_nan]).l2_error is None
    assert merge_contrasts([of_nan, of_nan]).mean_reference is None
    both = merge_contrasts([of_nan, of_zeros])
    assert (both.finite, both.l2_error, both.cosine, both.max_rel_error) == (2, 0.0, None, None)


def test_numbers_beyond_float64_are_infinite_and_their_cosine_is_right():
    huge = np.array([1e308, -1e308, 1e308])
    opposite = -huge
    part = contrast(Strided.from_numpy(huge), Strided.from_numpy(opposite))
    found = merge_contrasts([part, part])
    assert found.cosine == pytest.approx(-1)
    assert found.l2_error == math.inf


def test_infinities_of_both_signs_add_up_to_no_number():
    parts = [
        contrast(Strided.from_numpy(one), Strided.from_numpy(one * sign)) for one, sign in ((BEYOND, 1), (BEYOND, -1))
    ]
    assert [part.dot for part in parts] == [math.inf, -math.inf]
    assert math.isnan(merge_contrasts(parts).dot)


BEYOND = np.full(3, 1e200)
