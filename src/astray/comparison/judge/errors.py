"""How far apart the two sides of each pair are, by seven measures with a noise of their own.

Reads the `evidence` of one rank and what was measured of it, feeds `bases` and `surprise`. All are relative:

- `values`: ‖c − r‖ / ‖r‖, where values were kept. Rounding makes it about one unit roundoff. Of a slice, beside the
  size of the whole where that is larger.
- `worst`: max |c − r| / max |r|, where values were kept. It sees one wrong element of a million.
- `slices`: ‖c − r‖ of the slice that is furthest off (a row, a head, a channel, a position), beside the rms of ‖r‖ of
  all slices, where all values were kept. It sees one wrong row of a thousand, which the whole dilutes thirtyfold.
- `typical`: the same of the median row (along the last dimension: a token). It does not see the few that are far off,
  such as tokens that a router has sent to another expert, and so it sees what happens to all others.
- `norm`: how far norm and std are apart, beside ‖r‖; `mean`: how far the means are, beside the rms of r. Both are sums
  over all elements, in which rounding averages out: it is √n times smaller than in the elements, so that a factor of
  1.005 stands out of bfloat16's noise a hundredfold.
- `extremes`: how far min, max and absmax are apart, beside max |r|: single elements, seen without any values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.provenance import OPERAND_ROLES
from astray.comparison.measure import metrics
from astray.comparison.measure.evidence import STATISTICS, Evidence, is_partial
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import MEASURES, EvidenceSource, Judgement, Reason, Verdict
from astray.stats.dtypes import DTYPES


@dataclass(frozen=True)
class Errors:
    """One entry per pair. A measure is NaN where it is not known and 0 where the bits are the same.

    roundoff: the unit roundoff that a pair is judged by, mostly of the coarser side; 0 for integers.
    count, l2 (‖r‖), absmax, zeros: of the reference.
    zeros_difference: by how many the zeros of the two sides differ.
    by_values: all values were kept on both sides.
    """

    values: Floats
    worst: Floats
    slices: Floats
    typical: Floats
    norm: Floats
    mean: Floats
    extremes: Floats
    roundoff: Floats
    count: Floats
    l2: Floats
    absmax: Floats
    zeros: Floats
    zeros_difference: Floats
    identical: Bools
    by_values: Bools

    def measure(self, name: str) -> Floats:
        """The errors by one of the `MEASURES`."""
        column: Floats = getattr(self, name)
        return column

    def without(self, rows: Bools) -> Errors:
        """The same errors with those of some rows set to 0."""
        return replace(self, **{name: np.where(rows, 0.0, self.measure(name)) for name in MEASURES})

    @cached_property
    def sqrt_count(self) -> Floats:
        """√n: rounding makes sums this many times less far off than elements."""
        return np.sqrt(self.count)

    @cached_property
    def sums(self) -> Floats:
        """The larger of `norm` and `mean`, which are sums over all elements."""
        return np.fmax(self.norm, self.mean)

    @cached_property
    def element(self) -> Floats:
        """How far off a typical element is: by values where they were kept, else estimated from extremes and sums.

        An extreme may be the same by chance. Sums are off by δ/√n where each element is off by δ, independently.
        """
        shown = np.fmax(self.extremes, self.sums * np.maximum(self.sqrt_count / t.SUM_SIGMAS, 1.0))
        return _bounded(np.where(np.isnan(self.values), shown, self.values))

    @cached_property
    def element_bound(self) -> Floats:
        """The most that elements can be off by, independently, before sums show it; by values where they were kept."""
        shown = np.fmax(self.extremes, t.SUM_SIGMAS * self.sums * self.sqrt_count)
        return _bounded(np.where(np.isnan(self.values), np.where(np.isnan(shown), np.inf, shown), self.values))

    @cached_property
    def rms(self) -> Floats:
        return np.asarray(self.l2 / self.sqrt_count)

    @cached_property
    def peak(self) -> Floats:
        """The largest element relative to the norm."""
        return _share(self.absmax, self.l2)

    @cached_property
    def zero_share(self) -> Floats:
        return np.asarray(self.zeros / self.count)


def find_errors(evidence: Evidence, judged: Judgement, factor: Floats, products: Floats) -> Errors:
    """The errors of all pairs; rows of one run alone have none.

    factor: what each candidate is divided by first. products: the unit roundoff of the products each row is made of.
    """
    length = len(evidence.pairs.reference)
    columns = {name: np.full(length, np.nan) for name in MEASURES}
    facts = {name: np.zeros(length) for name in ("roundoff", "l2", "absmax", "zeros", "zeros_difference")}
    count = np.ones(length)
    at = np.flatnonzero(evidence.pairs.matched)
    if len(at):
        roundoff = _precision(evidence, at) / 2
        facts["roundoff"][at] = np.where(roundoff == t.FLOAT32, np.maximum(roundoff, products[at]), roundoff)
        _read_sizes(evidence, at, facts, count)
        factor = factor * _ratio_of_masks(evidence, at, length)
        differing = at[judged.verdict[at] != Verdict.IDENTICAL]
        _read_statistics(evidence, differing, factor[differing], columns, facts)
    by_values = np.flatnonzero(~np.isnan(judged.metrics["rel_l2"]))
    if len(by_values):
        _read_values(evidence, judged, by_values, columns, facts, count)
        _divide(judged, by_values[factor[by_values] != 1], factor, columns)
    identical = judged.verdict == Verdict.IDENTICAL
    # Where both sides hold the same mask, booleans in one run and numbers in the other, it explains no error either.
    agrees = identical | (judged.reason & Reason.MASKS != 0)
    for column in columns.values():
        column[agrees] = 0.0
    return Errors(
        **columns, **facts, count=count, identical=identical, by_values=judged.source == EvidenceSource.VALUES
    )


def _precision(evidence: Evidence, at: Ints) -> Floats:
    """The epsilon of the coarser side; where few dtypes differ, results are judged by that of the reference."""
    coarser, dtypes = evidence.eps(at), evidence.sides("dtype", at)
    mixed = np.not_equal(*dtypes)
    if evidence.mixed >= t.MIXED_DTYPE_SHARE:
        return coarser
    operands = [code for code, role in enumerate(evidence.roles) if role in OPERAND_ROLES]
    results = ~np.isin(evidence.sides("role", at)[0], operands)
    return np.where(mixed & results, evidence.precisions[dtypes[0]], coarser)


def _ratio_of_masks(evidence: Evidence, at: Ints, length: int) -> Floats:
    """For masks of the largest numbers of two dtypes, how many times larger the candidate's number is; else 1.

    Nothing was rounded there: each side holds the largest number that its dtype has.
    """
    ratio = np.ones(length)
    other = at[np.not_equal(*evidence.sides("dtype", at))]
    if len(other):
        ends = np.array([DTYPES[name].max if name in DTYPES else np.inf for name in evidence.dtypes])
        sizes, limits = evidence.numbers("absmax", other), [ends[side] for side in evidence.sides("dtype", other)]
        masks = np.logical_and(*(size == limit for size, limit in zip(sizes, limits, strict=True)))
        ratio[other[masks]] = sizes[1][masks] / sizes[0][masks]
    return ratio


def _read_sizes(evidence: Evidence, at: Ints, facts: dict[str, Floats], count: Floats) -> None:
    """Sizes of the reference's tensors: counts of elements and of zeros, norm and largest element."""
    rows, reference = evidence.pairs.reference[at], evidence.reference
    count[at] = np.maximum(reference.statistic("count", rows), 1)
    facts["l2"][at] = np.nan_to_num(reference.statistic("l2", rows))
    facts["absmax"][at] = np.nan_to_num(reference.statistic("absmax", rows))
    facts["zeros"][at] = np.maximum(reference.statistic("zeros", rows), 0)


def _read_statistics(
    evidence: Evidence,
    at: Ints,
    factor: Floats,
    columns: dict[str, Floats],
    facts: dict[str, Floats],
) -> None:
    """How far apart the statistics of some pairs are."""
    if not len(at):
        return
    reference, candidate = evidence.statistics(at)
    if np.any(factor != 1):
        candidate |= {name: candidate[name] / factor for name in STATISTICS}
    counts = evidence.numbers("count", at)
    known = (counts[0] >= 0) & (counts[0] == counts[1])  # statistics of other sizes are not compared
    slack = metrics.summing_slack(reference, candidate, evidence.eps(at), counts[0])
    with np.errstate(invalid="ignore"):
        bounds = metrics.bounds(reference, candidate, counts[0], slack)
        norm = np.fmax(bounds["bound_l2"], bounds["bound_std"])
        extremes = np.fmax.reduce([bounds[name] for name in metrics.BOUNDS[3:]])
    columns["norm"][at] = np.where(known, norm, np.nan)
    columns["mean"][at] = np.where(known, bounds["bound_mean"], np.nan)
    columns["extremes"][at] = np.where(known, extremes, np.nan)
    zeros = [np.maximum(side, 0) for side in evidence.numbers("zeros", at)]
    facts["zeros_difference"][at] = np.where(known, np.abs(zeros[0] - zeros[1]), 0)


def _read_values(
    evidence: Evidence, judged: Judgement, at: Ints, columns: dict[str, Floats], facts: dict[str, Floats], count: Floats
) -> None:
    """Errors by kept values; where no statistics were kept, the l2 norm and the sums as well."""
    measured = judged.metrics
    rms = np.hypot(measured["mean_reference"][at], measured["std_reference"][at])
    without = np.isnan(columns["norm"][at]) & ~(facts["absmax"][at] > 0)
    values_only = at[without]
    count[values_only] = np.maximum(_elements(evidence, values_only), 1)
    facts["l2"][values_only] = np.nan_to_num(rms[without]) * np.sqrt(count[values_only])
    for name, difference in (("mean", "mean_difference"), ("norm", "std_difference")):
        columns[name][values_only] = metrics.ratios(np.abs(measured[difference][values_only]), rms[without])
    # A slice of almost nothing may hold no more than the rounding of the numbers around it.
    rms_of_tensor = np.where(is_partial(judged.source[at]), facts["l2"][at] / np.sqrt(count[at]), 0.0)
    relative = metrics.ratios(measured["rmse"][at], rms_of_tensor)
    columns["values"][at] = np.where(rms_of_tensor > rms, relative, measured["rel_l2"][at])
    worst = metrics.ratios(measured["max_abs"][at], facts["absmax"][at])
    # The error is the larger of both measures, so it stands for the worst element where its scale is not known.
    columns["worst"][at] = np.where(facts["absmax"][at] > 0, worst, judged.error[at])
    columns["slices"][at], columns["typical"][at] = measured["rel_slice"][at], measured["rel_typical"][at]


def _elements(evidence: Evidence, at: Ints) -> Floats:
    """How many elements the reference's tensors have, by their shapes."""
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    shape = rows.run.tensors.coded("shape")
    counts = np.array([*(math.prod(sizes) for sizes in shape.values), 0], np.float64)
    return counts[shape.codes[rows.tensor[evidence.pairs.reference[at]]]]


def _divide(judged: Judgement, at: Ints, factor: Floats, columns: dict[str, Floats]) -> None:
    """Errors by values after dividing by a factor: ‖c/f − r‖ follows from both norms and the cosine.

    Those of single elements and of slices do not follow, and become unknown.
    """
    if not len(at):
        return
    measured = judged.metrics
    rms = [np.hypot(measured[f"mean_{side}"][at], measured[f"std_{side}"][at]) for side in ("reference", "candidate")]
    ratio = metrics.ratios(rms[1], rms[0]) / factor[at]
    columns["values"][at] = np.sqrt((ratio - 1) ** 2 + 2 * ratio * np.maximum(1 - measured["cosine"][at], 0.0))
    columns["worst"][at] = columns["slices"][at] = columns["typical"][at] = np.nan


def _bounded(column: Floats) -> Floats:
    return np.minimum(np.nan_to_num(column, nan=0.0, posinf=t.MAX_ERROR), t.MAX_ERROR)


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
