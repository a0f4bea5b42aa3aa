"""Every metric against the same formula in plain float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.measure import metrics
from astray.stats.kernels import Strided, contrast, measure

R, C = "reference", "candidate"


def contrast_of(reference: np.ndarray, candidate: np.ndarray, dtype: str | None = None):
    return contrast(Strided.from_numpy(reference, dtype), Strided.from_numpy(candidate, dtype))


def ordered(x: np.ndarray) -> np.ndarray:
    """float32 bits as integers in the order of the numbers."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


EXPECTED = {
    "cosine": lambda r, c: r @ c / (np.linalg.norm(r) * np.linalg.norm(c)),
    "rel_l2": lambda r, c: np.linalg.norm(c - r) / np.linalg.norm(r),
    "euclidean": lambda r, c: np.linalg.norm(c - r),
    "max_abs": lambda r, c: np.max(np.abs(c - r)),
    "max_rel": lambda r, c: np.max(np.abs(c - r)[r != 0] / np.abs(r[r != 0])),
    "rmse": lambda r, c: np.sqrt(np.mean((c - r) ** 2)),
    "mape": lambda r, c: np.mean(np.abs(c - r)[r != 0] / np.abs(r[r != 0])),
    "within_tolerance": lambda r, c: np.mean(np.isclose(c, r)),
    "within_1e3": lambda r, c: np.mean(np.abs(c - r) <= 1e-3 * np.abs(r)),
    "within_5e3": lambda r, c: np.mean(np.abs(c - r) <= 5e-3 * np.abs(r)),
    "max_ulp": lambda r, c: np.max(np.abs(ordered(np.float32(c)) - ordered(np.float32(r)))),
    "mean_ulp": lambda r, c: np.mean(np.abs(ordered(np.float32(c)) - ordered(np.float32(r)))),
    "different": lambda r, c: np.sum(r != c),
    "nonfinite_mismatch": lambda *_: 0,
    "mean_reference": lambda r, _: r.mean(),
    "mean_candidate": lambda _, c: c.mean(),
    "mean_difference": lambda r, c: c.mean() - r.mean(),
    "std_reference": lambda r, _: r.std(),
    "std_candidate": lambda _, c: c.std(),
    "std_difference": lambda r, c: c.std() - r.std(),
    "var_reference": lambda r, _: r.var(),
    "var_candidate": lambda _, c: c.var(),
    "var_difference": lambda r, c: c.var() - r.var(),
}


def test_every_metric_is_checked_here():
    assert list(EXPECTED) == list(metrics.METRICS)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_metric_against_numpy(name, offset):
    random = np.random.default_rng(3)
    reference = (random.normal(size=997) + offset).astype(np.float32)
    candidate = (reference * (1 + random.normal(size=997) * 2e-3)).astype(np.float32)
    reference[:9] = 0
    candidate[:5] = 0
    found = metrics.METRICS[name](contrast_of(reference, candidate))
    wanted = EXPECTED[name](reference.astype(np.float64), candidate.astype(np.float64))
    # A difference of two nearly equal numbers is exact only beside those numbers.
    scale = float(np.abs(candidate).max()) ** 2 if name.endswith("_difference") else 0.0
    # The ratios of float32 tensors are taken in float32 before they are added up; everything else is in float64.
    assert found == pytest.approx(float(wanted), rel=1e-6 if name == "mape" else 1e-9, abs=1e-12 * scale)


@pytest.mark.parametrize("name", EXPECTED)
def test_metrics_leave_out_what_is_not_finite(name):
    random = np.random.default_rng(4)
    reference, candidate = random.normal(size=(2, 64)).astype(np.float32)
    spoiled = [np.append(side, [np.nan, np.inf]).astype(np.float32) for side in (reference, candidate)]
    clean = metrics.METRICS[name](contrast_of(reference, candidate))
    assert metrics.METRICS[name](contrast_of(*spoiled)) == pytest.approx(clean, rel=1e-12)


ZERO, ONE = np.zeros(4, np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("name", "both_zero", "reference_zero", "candidate_zero"),
    [
        ("cosine", 1, 0, 0),
        ("rel_l2", 0, math.inf, 1),
        ("euclidean", 0, 2, 2),
        ("max_abs", 0, 1, 1),
        ("max_rel", math.nan, math.nan, 1),
        ("mape", math.nan, math.nan, 1),
        ("rmse", 0, 1, 1),
        ("within_tolerance", 1, 0, 0),
    ],
)
def test_zeros(name, both_zero, reference_zero, candidate_zero):
    metric = metrics.METRICS[name]
    found = [metric(contrast_of(ZERO, ZERO)), metric(contrast_of(ZERO, ONE)), metric(contrast_of(ONE, ZERO))]
    assert found == pytest.approx([both_zero, reference_zero, candidate_zero], nan_ok=True)


@pytest.mark.parametrize("reference", [np.full(3, np.nan, np.float32), np.empty(0, np.float32)], ids=["NaN", "empty"])
def test_nothing_finite_gives_nan_and_no_error(reference):
    found = contrast_of(reference, reference)
    for name, metric in metrics.METRICS.items():
        if name not in ("different", "nonfinite_mismatch"):
            assert math.isnan(metric(found)), name
    assert metrics.error_of_values(found, math.nan) == 0


def test_error_sees_a_single_wrong_element():
    reference = np.ones(1_000_000, np.float32)
    candidate = reference.copy()
    candidate[77] = 1.5
    found = contrast_of(reference, candidate)
    assert metrics.rel_l2(found) == pytest.approx(0.0005)
    assert metrics.error_of_values(found, 1.0) == pytest.approx(0.5)


def test_error_of_a_slice_is_beside_the_size_of_the_whole():
    reference, candidate = np.array([3.0, 4.0]) * 1e-9, np.array([3.0, 4.5]) * 1e-9
    found = contrast_of(reference, candidate)
    assert metrics.error_of_values(found, 10.0) == pytest.approx(0.1)
    assert metrics.error_of_values(found, 10.0, 2.0) == pytest.approx(0.5e-9 / (2 * math.sqrt(2)))
    assert metrics.error_of_values(found, 1e-9, 2.0) == pytest.approx(0.5)
    assert metrics.error_of_values(found, 10.0, 1e-12) == pytest.approx(0.1)


def statistics_of(*arrays: np.ndarray) -> dict[str, np.ndarray]:
    found = [measure(Strided.from_numpy(array)).statistics for array in arrays]
    names = ("min", "max", "mean", "std", "l2", "absmax")
    return {n: np.array([np.nan if getattr(s, n) is None else getattr(s, n) for s in found]) for n in names}


def test_bounds_are_never_above_the_true_error():
    random = np.random.default_rng(5)
    for _ in range(200):
        size = int(random.integers(1, 50))
        reference = random.normal(random.normal() * 3, 1, size)
        candidate = reference + random.normal(size=size) * 10.0 ** random.uniform(-8, 1)
        found = metrics.bounds(statistics_of(reference), statistics_of(candidate))
        l2 = np.linalg.norm(candidate - reference) / np.linalg.norm(reference)
        largest = np.max(np.abs(candidate - reference)) / np.max(np.abs(reference))
        for name in metrics.BOUNDS:
            true = l2 if name in ("bound_mean", "bound_std", "bound_l2") else largest
            assert found[name][0] <= true * (1 + 1e-9) + 1e-14, name
        assert metrics.error_of_statistics(found)[0] <= max(l2, largest) * (1 + 1e-9) + 1e-14


def test_bounds_against_numpy():
    reference, candidate = np.array([1.0, -2.0, 3.0]), np.array([1.5, -2.5, 3.0])
    found = {n: float(c[0]) for n, c in metrics.bounds(statistics_of(reference), statistics_of(candidate)).items()}
    rms = np.sqrt(np.mean(reference**2))
    assert found == pytest.approx(
        {
            "bound_mean": abs(candidate.mean() - reference.mean()) / rms,
            "bound_std": abs(candidate.std() - reference.std()) / rms,
            "bound_l2": abs(np.linalg.norm(candidate) / np.linalg.norm(reference) - 1),
            "bound_min": 0.5 / 3,
            "bound_max": 0.0,
            "bound_absmax": 0.0,
        }
    )


def test_bounds_of_zeros_and_of_nothing():
    nothing = np.full(4, np.nan)
    found = metrics.bounds(statistics_of(ZERO, ZERO, nothing), statistics_of(ZERO, ONE, nothing))
    assert metrics.error_of_statistics(found).tolist() == pytest.approx([0, math.inf, math.nan], nan_ok=True)


def test_the_cosine_of_equal_tensors_is_exactly_one() -> None:
    for values in ([2.0, 2.0], [0.1, 0.2, 0.3], [1e30, 1.0]):
        tensor = Strided.from_numpy(np.array(values, np.float32))
        assert metrics.cosine(contrast(tensor, tensor)) == 1.0
