"""Each measure of how far two tensors are apart, against plain numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.comparison.verdict import MEASURES
from judging import judged_errors

REFERENCE = np.random.default_rng(0).normal(0.3, 1, (16, 24)).astype(np.float32)
CANDIDATE = (REFERENCE * 1.01 + np.random.default_rng(1).normal(0, 0.01, REFERENCE.shape)).astype(np.float32)
STATISTICS, VALUES = "stats,fingerprint", "stats,fingerprint,tensors"


def one_pair(runs: Any, keep: str, reference: np.ndarray, candidate: np.ndarray, **rest: Any) -> Any:
    sides = []
    for array in (reference, candidate):
        builder = runs.Builder(keep=keep)
        builder.tensor(builder.call("site"), "output", "out", array, **rest)
        sides.append(builder.run)
    return judged_errors(*sides)


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def expected(reference: np.ndarray, candidate: np.ndarray) -> dict[str, float]:
    """What the docstring of `errors` says, in float64."""
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    size, largest = float(np.sqrt((r * r).mean())), np.abs(r).max()
    return {
        "values": norm(c - r) / norm(r),
        "worst": np.abs(c - r).max() / largest,
        "slices": max(np.sqrt(((c - r) ** 2).sum(axis=1 - dim).max() * r.shape[dim]) / norm(r) for dim in (0, 1)),
        "typical": np.sqrt(np.sort(((c - r) ** 2).sum(axis=1))[len(r) // 2] * len(r)) / norm(r),
        "norm": max(abs(norm(c) - norm(r)) / norm(r), abs(c.std() - r.std()) / size),
        "mean": abs(c.mean() - r.mean()) / size,
        "extremes": max(abs(c.min() - r.min()), abs(c.max() - r.max()), abs(np.abs(c).max() - np.abs(r).max()))
        / largest,
    }


@pytest.mark.parametrize("measure", MEASURES)
def test_each_measure(runs: Any, measure: str) -> None:
    found = one_pair(runs, VALUES, REFERENCE, CANDIDATE)
    assert found.measure(measure)[0] == pytest.approx(expected(REFERENCE, CANDIDATE)[measure], rel=1e-6)


def test_statistics_tell_nothing_of_single_elements(runs: Any) -> None:
    found = one_pair(runs, STATISTICS, REFERENCE, CANDIDATE)
    wanted = expected(REFERENCE, CANDIDATE)
    for measure in MEASURES:
        told = found.measure(measure)[0]
        assert (
            np.isnan(told)
            if measure in ("values", "worst", "slices", "typical")
            else told == pytest.approx(wanted[measure], rel=1e-6)
        )


def test_values_alone_tell_sizes_and_sums(runs: Any) -> None:
    """Without statistics the largest element is not known, but the error is the larger of both measures."""
    found, whole = (one_pair(runs, keep, REFERENCE, CANDIDATE) for keep in ("tensors", VALUES))
    for measure in ("values", "mean"):
        assert found.measure(measure)[0] == pytest.approx(whole.measure(measure)[0], rel=1e-6)
    assert found.worst[0] == max(whole.values[0], whole.worst[0])
    assert (found.count[0], found.l2[0]) == (whole.count[0], pytest.approx(whole.l2[0], rel=1e-6))


def test_identical_tensors_are_off_by_nothing(runs: Any) -> None:
    found = one_pair(runs, STATISTICS, REFERENCE, REFERENCE)
    assert [float(found.measure(measure)[0]) for measure in MEASURES] == [0.0] * len(MEASURES)
    assert found.identical[0]


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float16", 11), ("float32", 24), ("float64", 53), ("int32", None), ("bool", None)]
)
def test_the_unit_roundoff_is_half_an_epsilon_and_none_for_integers(runs: Any, dtype: str, bits: int | None) -> None:
    array = np.ones(4, dtype)
    found = one_pair(runs, STATISTICS, array, array)
    assert found.roundoff[0] == (0.0 if bits is None else 2.0**-bits)


def test_what_is_known_of_the_reference(runs: Any) -> None:
    reference, candidate = REFERENCE.copy(), REFERENCE.copy()
    reference[0, :3] = 0
    found = one_pair(runs, STATISTICS, reference, candidate)
    assert (found.count[0], found.zeros[0], found.zeros_difference[0]) == (reference.size, 3, 3)
    assert found.l2[0] == pytest.approx(norm(reference), rel=1e-6)
    assert found.rms[0] == pytest.approx(norm(reference) / np.sqrt(reference.size), rel=1e-6)
    assert found.peak[0] == pytest.approx(np.abs(reference).max() / norm(reference), rel=1e-6)
    assert found.zero_share[0] == 3 / reference.size


def test_by_sums_an_element_is_as_far_off_as_a_random_error_would_be(runs: Any) -> None:
    """Of n elements that are off by δ each for itself, sums are off by δ/√n."""
    noise = np.random.default_rng(2).normal(0, 1e-3, REFERENCE.shape)
    found = one_pair(runs, STATISTICS, REFERENCE, (REFERENCE * (1 + noise)).astype(np.float32))
    true = one_pair(runs, VALUES, REFERENCE, (REFERENCE * (1 + noise)).astype(np.float32)).values[0]
    assert true / 20 < found.element[0] <= found.element_bound[0]
    assert true < found.element_bound[0] < 20 * true


def test_a_slice_is_beside_the_whole(runs: Any) -> None:
    reference, candidate = REFERENCE.copy(), REFERENCE.copy()
    reference[0], candidate[0] = 0, 1e-9
    found = one_pair(runs, VALUES, reference, candidate, part="0:1")
    size = norm(reference) / np.sqrt(reference.size)
    assert found.values[0] == pytest.approx(1e-9 / size, rel=1e-5)


def test_a_zero_reference_is_infinitely_off_and_counted_as_very_much(runs: Any) -> None:
    found = one_pair(runs, VALUES, np.zeros(4, np.float32), np.ones(4, np.float32))
    assert np.isinf(found.values[0])
    assert found.element[0] == 1e3


def test_after_dividing_by_a_common_factor(runs: Any) -> None:
    """Of values only their norms and the cosine are needed: ‖c/f − r‖ follows from them."""
    sides = []
    for factor in (1.0, 0.5):
        builder = runs.Builder(keep=VALUES)
        seq = builder.call("net")
        builder.tensor(seq, "output", "out", REFERENCE)
        backward = builder.call("net", phase="backward", parent=seq)
        noisy = REFERENCE if factor == 1 else (CANDIDATE * np.float32(factor))
        builder.tensor(backward, "input", "out", noisy)
        builder.tensor(backward, "output", "0", noisy)
        sides.append(builder.run)
    found = judged_errors(*sides)
    ratio = norm(CANDIDATE * np.float32(0.5)) / norm(REFERENCE)
    r, c = REFERENCE.astype(np.float64), (CANDIDATE * np.float32(0.5)).astype(np.float64) / ratio
    assert found.values[1] == pytest.approx(norm(c - r) / norm(r), rel=1e-4)
    assert found.norm[1] < 1e-3
    assert np.isnan(found.worst[1])


@pytest.mark.parametrize(("others", "wrong"), [(3, False), (30, True)])
def test_a_dtype_that_only_a_few_results_have_is_judged_by_the_reference(runs: Any, others: int, wrong: bool) -> None:
    """In runs of different precision many differ; a single one may be the fault."""
    values = np.linspace(1, 2, 64, dtype=np.float32)
    sides = []
    for narrow in (False, True):
        builder = runs.Builder()
        for number in range(others):
            builder.tensor(builder.call(f"same{number}"), "output", "out", values)
        seq = builder.call("cast")
        builder.tensor(seq, "input", "0", values)
        bits = ((values.view(np.uint32) >> 16) + 1).astype(np.uint16)
        builder.tensor(seq, "output", "out", *((bits, "bfloat16") if narrow else (values,)))
        sides.append(builder.run)
    found = compare(*sides)
    assert (found.first is not None and found.first.site == "cast") == wrong


@pytest.mark.parametrize(("more", "keep"), [(0, STATISTICS), (8, STATISTICS), (0, VALUES)])
def test_a_mask_of_the_largest_number_of_another_dtype_is_the_same(runs: Any, more: int, keep: str) -> None:
    """Each side is as far down as its dtype goes, which is not rounding; one that covers more is off all the same."""
    mask = np.triu(np.full((64, 64), np.finfo(np.float32).min), 1)
    other = mask.copy()
    other.reshape(-1)[:more] = mask.min()
    narrow = np.where(other < 0, 0xFF7F, 0).astype(np.uint16)
    sides = []
    for array, dtype in ((mask, "float32"), (narrow, "bfloat16")):
        builder = runs.Builder(keep=keep)
        builder.tensor(builder.call("site"), "output", "out", array, dtype)
        sides.append(builder.run)
    found = judged_errors(*sides)
    assert (found.norm[0] > 1e-4) == (more > 0)
    assert found.extremes[0] < 1e-12
