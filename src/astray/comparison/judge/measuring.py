"""Measures every pair by the best that both sides kept; first what dtype, shape and fingerprint decide.

Reads `evidence`, feeds `errors` and `verdicts`. Whole columns are measured at once; only kept values are looked at
pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.measure.evidence import Evidence, Progress, is_partial
from astray.comparison.measure.measurements import MeasuredPairs, measure_statistics, measure_values
from astray.comparison.rows import Bools, Ints
from astray.comparison.verdict import UNDECIDED, EvidenceSource, Judgement, Reason, Rule, Verdict
from astray.stats.dtypes import DTYPES


@dataclass(frozen=True)
class Facts:
    """One entry per pair.

    measured: its error is known.
    differs: values surely differ. size_unknown: they do, and no statistic shows by how much.
    nonfinite: NaN or infinity where the other side has none.
    bits_only: fingerprints differ, and nothing else is known.
    rearranged: a gradient that has another shape and as many elements, which is measured by its statistics alone.
    """

    measured: Bools
    differs: Bools
    size_unknown: Bools
    nonfinite: Bools
    bits_only: Bools
    rearranged: Bools

    @classmethod
    def empty(cls, pairs: int) -> Facts:
        return cls(**{one.name: np.zeros(pairs, np.bool_) for one in fields(cls)})

    def take(self, at: Ints) -> Facts:
        """Those of some pairs."""
        return Facts(**{one.name: getattr(self, one.name)[at] for one in fields(self)})


def measure(evidence: Evidence, judged: Judgement, progress: Progress | None) -> Facts:
    """Fill in what a pair shows by itself: error, source, metrics, and what bits and shapes decide."""
    pairs = evidence.pairs
    facts = Facts.empty(len(pairs.reference))
    judged.verdict[pairs.candidate < 0] = Verdict.ONLY_IN_REFERENCE
    judged.verdict[pairs.reference < 0] = Verdict.ONLY_IN_CANDIDATE
    judged.reason |= evidence.remarks
    decided = (evidence.remarks & UNDECIDED) == 0
    remaining = _settle_form(evidence, np.flatnonzero(pairs.matched & decided), judged)
    if len(remaining):
        _measure(evidence, remaining, judged, facts, progress)
    _measure_rearranged(evidence, np.flatnonzero(judged.verdict == Verdict.SHAPE), judged, facts)
    _tell_layouts(evidence, np.flatnonzero(pairs.matched), judged)
    return facts


def _tell_layouts(evidence: Evidence, at: Ints, judged: Judgement) -> None:
    """Say which pairs were laid out by the mapping, and of which the order of elements was not seen."""
    if not evidence.layouts or not len(at):
        return
    at = at[evidence.has_layout(at) & (judged.verdict[at] != Verdict.SHAPE)]
    unseen = evidence.moved(at) & (judged.source[at] < EvidenceSource.SAMPLE)
    judged.reason[at] |= np.where(unseen, Reason.UNORDERED, Reason.LAID_OUT)
    judged.reason[at] |= np.where(unseen & evidence.has_same_fingerprint(at), Reason.NOT_MOVED, 0)


def _settle_form(evidence: Evidence, at: Ints, judged: Judgement) -> Ints:
    """Settle what dtype, shape and fingerprint decide; give back the pairs that must be measured."""
    if not len(at):
        return at
    dtypes = evidence.sides("dtype", at)
    kinds_differ = evidence.kinds[dtypes[0]] != evidence.kinds[dtypes[1]]
    shapes_differ = np.not_equal(*evidence.sides("form", at))
    masks = np.zeros(len(at), np.bool_)
    others = np.flatnonzero(kinds_differ & ~shapes_differ)
    masks[others] = _are_the_same_masks(evidence, at[others])
    kinds_differ &= ~masks
    same_bits = evidence.bits[at] == 1
    judged.reason[at] |= (
        np.where((dtypes[0] != dtypes[1]) & ~masks, np.where(kinds_differ, Reason.KINDS, Reason.DTYPES), 0)
        | np.where(shapes_differ, Reason.SHAPES, 0)
        | np.where(shapes_differ & same_bits, Reason.RESHAPED, 0)
    )
    judged.verdict[at[shapes_differ]] = Verdict.SHAPE
    judged.verdict[at[kinds_differ]] = Verdict.DTYPE
    judged.rule[at] = Rule.BITS
    identical = at[same_bits & ~shapes_differ]
    judged.verdict[at[masks]], judged.error[at[masks]] = Verdict.ROUNDING, 0.0
    judged.source[at[masks]] = EvidenceSource.STATISTICS
    judged.reason[at[masks]] |= Reason.MASKS
    judged.verdict[identical] = Verdict.IDENTICAL
    judged.error[identical] = 0.0
    judged.source[identical] = EvidenceSource.FINGERPRINT
    settled: Bools = kinds_differ | shapes_differ | same_bits | masks
    return at[~settled]


def _are_the_same_masks(evidence: Evidence, at: Ints) -> Bools:
    """Pairs of a mask of booleans and one of numbers, which are zero or one large negative number.

    Attention takes both: scores stay where booleans are true, and where zero is added. By statistics, as many are true
    as are zero, and nothing lies between zero and the smallest number. Code that means it the other way round is not
    taken for the same: a causal mask that is off by one hides as many scores as a right one shows.
    """
    found = np.zeros(len(at), np.bool_)
    if not len(at):
        return found
    known = np.array([DTYPES[name].kind if name in DTYPES else "" for name in evidence.dtypes])
    kinds = [known[side] for side in evidence.sides("dtype", at)]
    names = ("zeros", "inf", "nan", "count", "min", "max", "mean")
    sides = {name: evidence.numbers(name, at) for name in names}
    for booleans, numbers in ((0, 1), (1, 0)):
        true = sides["count"][booleans] - sides["zeros"][booleans]
        kept, hidden = sides["zeros"][numbers], sides["count"][numbers] - sides["zeros"][numbers]
        finite = hidden - sides["inf"][numbers]
        with np.errstate(invalid="ignore", over="ignore"):
            # Statistics are over finite elements: all of them are zero, or as small as the smallest.
            total = sides["mean"][numbers] * (kept + finite)
            alike = (finite == 0) | (
                np.abs(total / finite - sides["min"][numbers]) <= t.MASK_SPREAD * -sides["min"][numbers]
            )
            large = (finite == 0) | (sides["min"][numbers] <= -1 / t.MASK_SPREAD)
        here = (kinds[booleans] == "bool") & (kinds[numbers] == "float") & (sides["nan"][numbers] == 0)
        here &= (np.nan_to_num(sides["max"][numbers]) <= 0) & (hidden > 0) & alike & large
        found |= here & (true == kept)
    return found


def _measure(evidence: Evidence, remaining: Ints, judged: Judgement, facts: Facts, progress: Progress | None) -> None:
    """Measure what dtype, shape and fingerprint leave open, by the best that both sides kept."""
    kept, apart = evidence.kept_values(remaining)
    besides = evidence.source_without_values(remaining)
    judged.source[remaining] = source = np.maximum(kept, besides)
    judged.reason[remaining[apart]] |= Reason.ELSEWHERE
    _by_bits(remaining[source <= EvidenceSource.FINGERPRINT], judged, facts)
    # Some of the values may miss what the statistics of the whole tensor show, so such a pair is measured by both.
    _by_statistics(
        evidence, remaining[(source < EvidenceSource.VALUES) & (besides == EvidenceSource.STATISTICS)], judged, facts
    )
    _by_values(evidence, remaining[source >= EvidenceSource.SAMPLE], judged, facts, progress)


def _by_bits(at: Ints, judged: Judgement, facts: Facts) -> None:
    """Pairs that have different fingerprints and nothing else, or nothing at all."""
    known = judged.source[at] == EvidenceSource.FINGERPRINT
    facts.bits_only[at] = known
    judged.reason[at] |= np.where(known, Reason.BITS_ONLY, Reason.NOTHING_KEPT)


def _by_statistics(evidence: Evidence, at: Ints, judged: Judgement, facts: Facts) -> None:
    for rows in np.split(
        at, range(t.ROWS_PER_WINDOW, len(at), t.ROWS_PER_WINDOW)
    ):  # as many at a time as fit into the cache
        _keep(rows, measure_statistics(evidence, rows), judged, facts)


def _by_values(evidence: Evidence, at: Ints, judged: Judgement, facts: Facts, progress: Progress | None) -> None:
    """Measure by kept values, all or some. What cannot be read falls back on what else is known."""
    if not len(at):
        return
    read, found = measure_values(evidence, at, progress)
    unread = np.setdiff1d(at, read)
    judged.reason[unread] |= Reason.UNREADABLE
    judged.source[unread] = source = evidence.source_without_values(unread)
    _by_statistics(evidence, unread[source == EvidenceSource.STATISTICS], judged, facts)
    _by_bits(unread[source < EvidenceSource.STATISTICS], judged, facts)
    some = is_partial(judged.source[read])
    if some.any():
        found = _with_statistics(found, read, some, judged, facts)
    _keep(read, found, judged, facts)


def _with_statistics(measured: MeasuredPairs, at: Ints, some: Bools, judged: Judgement, facts: Facts) -> MeasuredPairs:
    """Add the bounds of the statistics to what some of the values show: equal values of a part prove nothing alone."""
    same = np.where(judged.source[at] == EvidenceSource.SAMPLE, Reason.SAMPLED, Reason.SLICED)
    before = some & facts.measured[at]
    return measured._replace(
        error=np.where(before, np.fmax(measured.error, judged.error[at]), measured.error),
        size_unknown=before & facts.size_unknown[at],
        equal=measured.equal & (~some | (judged.verdict[at] == Verdict.IDENTICAL)),
        differs=measured.differs | (before & facts.differs[at]),
        nonfinite=measured.nonfinite | (before & facts.nonfinite[at]),
        reason=measured.reason | np.where(some & ~measured.differs, same, 0),
    )


def _measure_rearranged(evidence: Evidence, at: Ints, judged: Judgement, facts: Facts) -> None:
    """Gradients of as many elements as the other side's.

    Views hand gradients through in shapes of their own, and two ways to one result seldom use the same views. That the
    elements are in the right order shows in the forward, or where the gradient goes.
    """
    if not len(at) or "backward" not in evidence.phases:
        return
    at = at[evidence.sides("phase", at)[0] == evidence.phases.index("backward")]
    count_reference, count_candidate = evidence.numbers("count", at)
    at = at[(count_reference == count_candidate) & (count_reference > 0) & (evidence.eps(at) > 0)]
    if not len(at):
        return
    nothing = np.zeros(len(at), np.bool_)
    facts.rearranged[at] = True
    judged.verdict[at], judged.source[at] = Verdict.UNKNOWN, EvidenceSource.STATISTICS
    _keep(at, measure_statistics(evidence, at)._replace(equal=nothing, size_unknown=nothing), judged, facts)


def _keep(at: Ints, measured: MeasuredPairs, judged: Judgement, facts: Facts) -> None:
    facts.measured[at] = True
    facts.differs[at] = measured.differs
    facts.size_unknown[at] = measured.size_unknown & ~measured.equal
    facts.nonfinite[at] = measured.nonfinite
    judged.error[at] = measured.error
    judged.reason[at] |= measured.reason | np.where(measured.nonfinite, Reason.NONFINITE_ONE, 0)
    judged.verdict[at[measured.equal]] = Verdict.IDENTICAL
    judged.rule[at[measured.equal]] = Rule.BITS
    judged.keep_metrics(at, measured.metrics)
