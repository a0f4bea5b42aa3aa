"""What is measured between two tensors, by name, with its formula.

Reads one pass over both tensors' values (`stats.contrast`), or, for a whole column of pairs at once, their recorded
statistics. r and c are the elements of reference and candidate that are finite on both sides, n how many those are.
Nothing here decides what is large: `judge` does. docs/reference/metrics.md has the same formulas for users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Bools, Floats
from astray.stats.kernels import Contrast, Slices

NAN = math.nan


def cosine(k: Contrast) -> float:
    """Σrc / (‖r‖·‖c‖), in float64. 1 when both are the same, or zero; 0 when one is zero."""
    if k.cosine is not None:
        return 1.0 if k.max_abs_error == 0 else k.cosine  # whose roots are rounded
    return float(k.l2_reference == k.l2_candidate) if k.finite else NAN


def rel_l2(k: Contrast) -> float:
    """‖c − r‖ / ‖r‖. 0 when both are zero, ∞ when only the reference is."""
    return ratio(known(k.l2_error), known(k.l2_reference))


def euclidean(k: Contrast) -> float:
    """‖c − r‖: the Euclidean distance."""
    return known(k.l2_error)


def max_abs(k: Contrast) -> float:
    """max |c − r|."""
    return known(k.max_abs_error)


def max_rel(k: Contrast) -> float:
    """max |c − r| / |r|, over the elements with r ≠ 0."""
    return known(k.max_rel_error)


def rmse(k: Contrast) -> float:
    """√(Σ(c − r)² / n)."""
    return ratio(known(k.l2_error), math.sqrt(k.finite))


def mape(k: Contrast) -> float:
    """The mean of |c − r| / |r| over the elements with r ≠ 0, as a fraction (not in percent)."""
    return known(k.sum_rel_error) / k.rel_count if k.rel_count else NAN


def within_tolerance(k: Contrast) -> float:
    """The fraction of the elements with |c − r| ≤ 1e-8 + 1e-5·|r|. NaN or Inf on one side only is outside."""
    return _fraction(k.within_tolerance, k)


def within_1e3(k: Contrast) -> float:
    """The fraction of the elements with |c − r| ≤ 0.001·|r|. NaN or Inf on one side only is outside."""
    return _fraction(k.within_1e3, k)


def within_5e3(k: Contrast) -> float:
    """The fraction of the elements with |c − r| ≤ 0.005·|r|. NaN or Inf on one side only is outside."""
    return _fraction(k.within_5e3, k)


def max_ulp(k: Contrast) -> float:
    """The largest number of representable values passed from r to c. Only when both have the same float dtype."""
    return known(k.max_ulp)


def mean_ulp(k: Contrast) -> float:
    """The mean number of representable values passed from r to c. Only when both have the same float dtype."""
    return known(k.mean_ulp)


def different(k: Contrast) -> float:
    """How many elements have another value. NaN equals NaN here, and 0 equals −0."""
    return float(k.different)


def nonfinite_mismatch(k: Contrast) -> float:
    """How many elements are NaN, +Inf or −Inf on one side and something else on the other."""
    return float(k.nonfinite_mismatch)


def mean_reference(k: Contrast) -> float:
    """Σr / n."""
    return known(k.mean_reference)


def mean_candidate(k: Contrast) -> float:
    """Σc / n."""
    return known(k.mean_candidate)


def mean_difference(k: Contrast) -> float:
    """mean(c) − mean(r)."""
    return mean_candidate(k) - mean_reference(k)


def std_reference(k: Contrast) -> float:
    """√(Σ(r − mean(r))² / n): of the population (ddof 0)."""
    return known(k.std_reference)


def std_candidate(k: Contrast) -> float:
    """√(Σ(c − mean(c))² / n): of the population (ddof 0)."""
    return known(k.std_candidate)


def std_difference(k: Contrast) -> float:
    """std(c) − std(r)."""
    return std_candidate(k) - std_reference(k)


def var_reference(k: Contrast) -> float:
    """std(r)²."""
    return std_reference(k) * std_reference(k)  # infinite beyond float64, where a power raises


def var_candidate(k: Contrast) -> float:
    """std(c)²."""
    return std_candidate(k) * std_candidate(k)


def var_difference(k: Contrast) -> float:
    """var(c) − var(r)."""
    return var_candidate(k) - var_reference(k)


METRICS: dict[str, Callable[[Contrast], float]] = {
    metric.__name__: metric
    for metric in (
        cosine, rel_l2, euclidean, max_abs, max_rel, rmse, mape, within_tolerance, within_1e3, within_5e3, max_ulp,
        mean_ulp, different, nonfinite_mismatch, mean_reference, mean_candidate, mean_difference, std_reference,
        std_candidate, std_difference, var_reference, var_candidate, var_difference,
    )
}  # fmt: skip
"""Every metric of a pair whose values were read, in the order of the columns."""


SLICES = {
    "rel_slice": "‖c − r‖ of the slice that is furthest off, beside the root mean square of ‖r‖ of all slices.",
    "slice_dim": "In which dimension that is one index: 0 for a row of a matrix.",
    "slice_index": "Which index that is.",
    "rel_typical": "Likewise ‖c − r‖ of the median row: all elements along the last dimension, such as one token.",
}
"""The columns of `of_slices`, and what they mean. Only of pairs whose values were read as a whole."""


def of_slices(errors: Slices | None, k: Contrast) -> tuple[float, float, float, float]:
    """‖c − r‖ of the furthest slice / (‖r‖ / √(how many there are)), its dimension and index; that of a typical one."""
    if errors is None or not k.finite:
        return NAN, NAN, NAN, NAN
    size = known(k.l2_reference)
    return ratio(errors.furthest, size), float(errors.dim), float(errors.index), ratio(errors.typical, size)


def error_of_values(k: Contrast, absmax_reference: float, rms_reference: float = 0.0) -> float:
    """max(‖c − r‖ / ‖r‖, max |c − r| / max |r|): how far off the whole is, or its worst element beside the largest.

    The one number a verdict is made of. The second term lets a single wrong element of a million be seen. 0 when
    nothing is finite on both sides: there is nothing to be wrong.

    Where r and c are a slice, `rms_reference` is that of the whole tensor, and the first term is ‖c − r‖ over the
    larger of ‖r‖ and rms·√n: a slice of almost nothing may hold no more than the rounding of the numbers around it.
    """
    if not k.finite:
        return 0.0
    size = max(known(k.l2_reference), rms_reference * math.sqrt(k.finite))
    return max(ratio(known(k.l2_error), size), ratio(max_abs(k), absmax_reference))


BOUNDS = ("bound_mean", "bound_std", "bound_l2", "bound_min", "bound_max", "bound_absmax")

Column = npt.NDArray[np.floating]
Columns = Mapping[str, Column]


def bounds(
    reference: Columns, candidate: Columns, count: npt.NDArray[Any] | None = None, slack: Floats | float = 0.0
) -> dict[str, Floats]:
    """Lower bounds of the error, from the recorded statistics alone: the true error is at least as large as each.

    Because |mean(c) − mean(r)| ≤ rms(c − r), and likewise for std and rms, the first three bound ‖c − r‖ / ‖r‖;
    because |max(c) − max(r)| ≤ max |c − r|, the others bound max |c − r| / max |r|:

        bound_mean    |mean(c) − mean(r)| / rms(r)          bound_min     |min(c) − min(r)| / absmax(r)
        bound_std     |std(c) − std(r)| / rms(r)            bound_max     |max(c) − max(r)| / absmax(r)
        bound_l2      |‖c‖ − ‖r‖| / ‖r‖                     bound_absmax  |absmax(c) − absmax(r)| / absmax(r)

    A statistic that either side lacks gives NaN. Both columns must be of tensors with equally many finite elements.

    count: how many elements there are; rms(r) is ‖r‖ / √count where the std is not known.
    slack: how far the sums themselves may be off (`summing_slack`); that much of the first three proves nothing.
    """
    rms = np.hypot(reference["mean"], reference["std"])
    if count is not None:
        rms = np.where(np.isnan(rms), reference["l2"] / np.sqrt(np.maximum(count, 1)), rms)
    scales = {"mean": rms, "std": rms, "l2": reference["l2"]}
    found = {
        name: ratios(np.abs(candidate[of] - reference[of]), scales.get(of, reference["absmax"]))
        for name, of in ((name, name.removeprefix("bound_")) for name in BOUNDS)
    }
    return found | {name: np.maximum(found[name] - slack, 0.0) for name in BOUNDS[:3]}


OWN_SUMMING = 2.0**-24
"""The rounding of float32, in which other tools sum whatever is no coarser."""


def lacks_nonfinite_counts(reference: Columns, candidate: Columns) -> Bools:
    """Where a side does not say how many elements are NaN or infinite: the statistics are another tool's."""
    return np.asarray((reference["nan"] < 0) | (candidate["nan"] < 0))


def has_nonfinite(side: Columns, count: npt.NDArray[Any]) -> Bools:
    """Where some elements are not finite. Where they were not counted, a missing extreme shows it."""
    by_extremes = (count > 0) & (np.isnan(side["min"]) | np.isnan(side["max"]))
    return np.where(side["nan"] < 0, by_extremes, side["nan"] + side["inf"] > 0)


def has_other_nonfinite(reference: Columns, candidate: Columns) -> Bools:
    """Where neither side has counted, and another extreme is missing: NaN against infinity, or +Inf against −Inf."""
    without_counts = (reference["nan"] < 0) & (candidate["nan"] < 0)
    differ = [np.isnan(reference[name]) != np.isnan(candidate[name]) for name in ("min", "max")]
    return np.asarray(without_counts & (differ[0] | differ[1]))


def summing_slack(reference: Columns, candidate: Columns, eps: Floats, count: npt.NDArray[Any]) -> Floats:
    """How far apart mean and norm may be because a tool summed in the tensor's own precision: ε + 2⁻²⁴·n^¾.

    torch's float32 norm on a CPU is off by 6.5e-4 at 2²⁴ elements and by 5e-3 at 2²⁶, which is a third of that and
    less. 0 where both sides were recorded by astray, which sums in float64. Extremes are elements, and exact in every
    tool.
    """
    own = eps + OWN_SUMMING * np.maximum(count, 1) ** 0.75
    return np.where(lacks_nonfinite_counts(reference, candidate), own, 0.0)


def error_of_statistics(bounds: Mapping[str, Floats]) -> Floats:
    """The largest of the lower bounds: what the pair is off by at least. NaN where there is none."""
    return np.asarray(np.fmax.reduce([bounds[name] for name in BOUNDS]), np.float64)


def equal_statistics(reference: Columns, candidate: Columns) -> Bools:
    """Where every statistic is exactly the same on both sides, NaN standing for "no finite element".

    A statistic that a side lacks is not a difference.
    """
    same = np.ones(len(reference["mean"]), np.bool_)
    without_counts = lacks_nonfinite_counts(reference, candidate)
    for name, column in reference.items():
        same &= (column == candidate[name]) | _both_or_unrecorded(name, column, candidate[name], without_counts)
    return same


def _both_or_unrecorded(name: str, reference: Column, candidate: Column, without_counts: Bools) -> Bools:
    """Where both sides lack a statistic, or one of them lacks it because it does not record all of them."""
    if name in ("nan", "inf"):
        return without_counts
    return np.where(
        without_counts, np.isnan(reference) | np.isnan(candidate), np.isnan(reference) & np.isnan(candidate)
    )


SUMMING = 2.0**-50
"""How far the order of summing moves a statistic, beside the size of the numbers: a few roundings of float64."""


def equal_but_for_order(reference: Columns, candidate: Columns) -> Bools:
    """Where no statistic differs by more than adding up the same numbers in another order explains.

    Extremes and counts do not depend on the order, so they must be exactly equal.
    """
    size = np.hypot(reference["mean"], reference["std"])
    slack = {"mean": size, "std": size, "l2": reference["l2"]}
    same = np.ones(len(size), np.bool_)
    without_counts = lacks_nonfinite_counts(reference, candidate)
    for name, column in reference.items():
        tolerance = SUMMING * slack[name] if name in slack else 0.0
        close = np.abs(candidate[name] - column) <= tolerance
        same &= close | _both_or_unrecorded(name, column, candidate[name], without_counts)
    return same


def rounding_shows(eps: Floats, count: npt.NDArray[np.integer]) -> Bools:
    """Where the rounding of a single element of ordinary size (a quarter of the rms) would change a statistic.

    It moves the mean by ε/2 · rms/4 / n, which must stand out from what the order of summing does. So it is for up to
    2²⁴ elements of float32, and never for float64.
    """
    return np.asarray(eps / 8 >= SUMMING * count)


def known(value: float | None) -> float:
    """The value, or NaN for one that does not exist."""
    return NAN if value is None else float(value)


def ratio(part: float, whole: float) -> float:
    """part / whole, where nothing of nothing is 0 and something of nothing is ∞. NaN stays NaN."""
    if whole:
        return part / whole
    return part * math.inf if part else 0.0


def ratios(part: Floats, whole: Floats) -> Floats:
    """`ratio` for columns; NaN stays NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = part / whole
    return np.where((whole == 0) & (part == 0), 0.0, quotient)


def _fraction(elements: int, k: Contrast) -> float:
    """A part of the elements that could agree: all but those with the same NaN or Inf on both sides."""
    comparable = k.finite + k.nonfinite_mismatch
    return elements / comparable if comparable else NAN
