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
from astray.comparison.judge.sources import GIVEN
from astray.comparison.measure import metrics
from astray.comparison.measure.evidence import STATISTICS, Evidence
from astray.comparison.measure.kept_values import EvidenceSource, is_partial
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import MEASURES, Judgement, Reason, Verdict
from astray.stats.dtypes import DTYPES


@dataclass(frozen=True)
class Errors:
    """One entry per pair. A measure is NaN where it is not known and 0 where the bits are the same.

    unit: the unit roundoff that a pair is judged by, mostly of the coarser side; 0 for integers. count, size (‖r‖),
    absmax, zeros: of the reference. flips: by how many the two sides' zeros differ. by_values: all of them were
    kept. element: how far off a typical element is, as far as is known.
    """

    values: Floats
    worst: Floats
    slices: Floats
    typical: Floats
    norm: Floats
    mean: Floats
    extremes: Floats
    unit: Floats
    count: Floats
    size: Floats
    absmax: Floats
    zeros: Floats
    flips: Floats
    identical: Bools
    by_values: Bools

    def measure(self, name: str) -> Floats:
        column: Floats = getattr(self, name)
        return column

    def without(self, rows: Bools) -> Errors:
        """The same, with some rows that are off by nothing."""
        return replace(self, **{name: np.where(rows, 0.0, self.measure(name)) for name in MEASURES})

    @cached_property
    def root(self) -> Floats:
        """√n: so many times less than its elements a sum is off by."""
        return np.sqrt(self.count)

    @cached_property
    def sums(self) -> Floats:
        """The larger of those that are sums over all elements."""
        return np.fmax(self.norm, self.mean)

    @cached_property
    def element(self) -> Floats:
        """By values where they were kept; else what extremes and sums show of it.

        An extreme may be right by chance. Sums are off by δ/√n where elements are off by δ each for itself.
        """
        shown = np.fmax(self.extremes, self.sums * np.maximum(self.root / t.SUMS, 1.0))
        return _bounded(np.where(np.isnan(self.values), shown, self.values))

    @cached_property
    def at_most(self) -> Floats:
        """The most that elements can be off by, each by itself, before sums show it; by values where they were kept."""
        shown = np.fmax(self.extremes, t.SUMS * self.sums * self.root)
        return _bounded(np.where(np.isnan(self.values), np.where(np.isnan(shown), np.inf, shown), self.values))

    @cached_property
    def rms(self) -> Floats:
        return np.asarray(self.size / self.root)

    @cached_property
    def peak(self) -> Floats:
        """The largest element beside the norm."""
        return _share(self.absmax, self.size)

    @cached_property
    def sparse(self) -> Floats:
        """The share of zeros."""
        return np.asarray(self.zeros / self.count)


def find_errors(evidence: Evidence, judged: Judgement, factor: Floats, multiplied: Floats) -> Errors:
    """The errors of all pairs; those that one run lacks have none.

    factor: by which their candidates are divided. multiplied: the unit roundoff of the products they are made of.
    """
    length = len(evidence.pairs.reference)
    columns = {name: np.full(length, np.nan) for name in MEASURES}
    facts = {name: np.zeros(length) for name in ("unit", "size", "absmax", "zeros", "flips")}
    count = np.ones(length)
    at = np.flatnonzero(evidence.pairs.matched)
    if len(at):
        unit = _precision(evidence, at) / 2
        facts["unit"][at] = np.where(unit == t.FLOAT32, np.maximum(unit, multiplied[at]), unit)
        _read_sizes(evidence, at, facts, count)
        factor = factor * _ratio_of_masks(evidence, at, length)
        other = at[judged.verdict[at] != Verdict.IDENTICAL]
        _read_statistics(evidence, other, factor[other], columns, facts)
    by_values = np.flatnonzero(~np.isnan(judged.metrics["rel_l2"]))
    if len(by_values):
        _read_values(evidence, judged, by_values, columns, facts, count)
        _divide(judged, by_values[factor[by_values] != 1], factor, columns)
    identical = judged.verdict == Verdict.IDENTICAL
    # The same mask, as booleans in one run and as numbers in the other, explains nothing that is computed with it.
    agrees = identical | (judged.reason & Reason.MASKS != 0)
    for column in columns.values():
        column[agrees] = 0.0
    return Errors(
        **columns, **facts, count=count, identical=identical, by_values=judged.source == EvidenceSource.VALUES
    )


def _precision(evidence: Evidence, at: Ints) -> Floats:
    """The epsilon of the coarser side; of the reference for results that are among few with other dtypes."""
    coarser, dtypes = evidence.eps(at), evidence.sides("dtype", at)
    mixed = np.not_equal(*dtypes)
    if evidence.mixed >= t.MIXED:
        return coarser
    given = [number for number, role in enumerate(evidence.roles) if role in GIVEN]
    results = ~np.isin(evidence.sides("role", at)[0], given)
    return np.where(mixed & results, evidence.precisions[dtypes[0]], coarser)


def _ratio_of_masks(evidence: Evidence, at: Ints, length: int) -> Floats:
    """What a mask of the largest numbers of one dtype is to be divided by, to be that of another; 1 for all others.

    Nothing was rounded there: each side is as far down as its dtype goes.
    """
    found = np.ones(length)
    other = at[np.not_equal(*evidence.sides("dtype", at))]
    if len(other):
        ends = np.array([DTYPES[name].max if name in DTYPES else np.inf for name in evidence.dtypes])
        sizes, limits = evidence.numbers("absmax", other), [ends[side] for side in evidence.sides("dtype", other)]
        masks = np.logical_and(*(size == limit for size, limit in zip(sizes, limits, strict=True)))
        found[other[masks]] = sizes[1][masks] / sizes[0][masks]
    return found


def _read_sizes(evidence: Evidence, at: Ints, facts: dict[str, Floats], count: Floats) -> None:
    """How large the reference's tensors are, in elements and in numbers."""
    rows, reference = evidence.pairs.reference[at], evidence.reference
    count[at] = np.maximum(reference.statistic("count", rows), 1)
    facts["size"][at] = np.nan_to_num(reference.statistic("l2", rows))
    facts["absmax"][at] = np.nan_to_num(reference.statistic("absmax", rows))
    facts["zeros"][at] = np.maximum(reference.statistic("zeros", rows), 0)


def _read_statistics(
    evidence: Evidence,
    at: Ints,
    factor: Floats,
    columns: dict[str, Floats],
    facts: dict[str, Floats],
) -> None:
    """How far the statistics of pairs are apart that are not the same."""
    if not len(at):
        return
    reference, candidate = evidence.statistics(at)
    if np.any(factor != 1):
        candidate |= {name: candidate[name] / factor for name in STATISTICS}
    counts = evidence.numbers("count", at)
    told = (counts[0] >= 0) & (counts[1] >= 0)
    same_count = counts[0] == counts[1]  # what has another shape has another error
    slack = metrics.summing_slack(reference, candidate, evidence.eps(at), counts[0])
    with np.errstate(invalid="ignore"):
        bounds = metrics.bounds(reference, candidate, counts[0], slack)
        norm = np.fmax(bounds["bound_l2"], bounds["bound_std"])
        extremes = np.fmax.reduce([bounds[name] for name in metrics.BOUNDS[3:]])
    known = told & same_count
    columns["norm"][at] = np.where(known, norm, np.nan)
    columns["mean"][at] = np.where(known, bounds["bound_mean"], np.nan)
    columns["extremes"][at] = np.where(known, extremes, np.nan)
    zeros = [np.maximum(side, 0) for side in evidence.numbers("zeros", at)]
    facts["flips"][at] = np.where(known, np.abs(zeros[0] - zeros[1]), 0)


def _read_values(
    evidence: Evidence, judged: Judgement, at: Ints, columns: dict[str, Floats], facts: dict[str, Floats], count: Floats
) -> None:
    """What values show; where no statistics were kept, size and sums as well."""
    found = judged.metrics
    rms = np.hypot(found["mean_reference"][at], found["std_reference"][at])
    untold = np.isnan(columns["norm"][at]) & ~(facts["absmax"][at] > 0)
    alone = at[untold]
    count[alone] = np.maximum(_elements(evidence, alone), 1)
    facts["size"][alone] = np.nan_to_num(rms[untold]) * np.sqrt(count[alone])
    for name, gap in (("mean", "mean_difference"), ("norm", "std_difference")):
        columns[name][alone] = metrics.ratios(np.abs(found[gap][alone]), rms[untold])
    # A slice of almost nothing may hold no more than the rounding of the numbers around it.
    whole = np.where(is_partial(judged.source[at]), facts["size"][at] / np.sqrt(count[at]), 0.0)
    columns["values"][at] = np.where(whole > rms, metrics.ratios(found["rmse"][at], whole), found["rel_l2"][at])
    worst = metrics.ratios(found["max_abs"][at], facts["absmax"][at])
    # The error is the larger of both measures, so it stands for the worst element where its scale is not known.
    columns["worst"][at] = np.where(facts["absmax"][at] > 0, worst, judged.error[at])
    columns["slices"][at], columns["typical"][at] = found["rel_slice"][at], found["rel_typical"][at]


def _elements(evidence: Evidence, at: Ints) -> Floats:
    """How many elements the reference has, by its shape."""
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    shape = rows.run.tensors.coded("shape")
    sizes = np.array([*(math.prod(one) for one in shape.values), 0], np.float64)
    return sizes[shape.codes[rows.tensor[evidence.pairs.reference[at]]]]


def _divide(judged: Judgement, at: Ints, factor: Floats, columns: dict[str, Floats]) -> None:
    """What values are off by after dividing: ‖c/f − r‖ follows from both norms and the cosine; single ones are lost."""
    if not len(at):
        return
    found = judged.metrics
    sizes = [np.hypot(found[f"mean_{side}"][at], found[f"std_{side}"][at]) for side in ("reference", "candidate")]
    size = metrics.ratios(sizes[1], sizes[0]) / factor[at]
    columns["values"][at] = np.sqrt((size - 1) ** 2 + 2 * size * np.maximum(1 - found["cosine"][at], 0.0))
    columns["worst"][at] = columns["slices"][at] = columns["typical"][at] = np.nan


def _bounded(column: Floats) -> Floats:
    return np.minimum(np.nan_to_num(column, nan=0.0, posinf=t.LARGEST), t.LARGEST)


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
