"""Says of every pair of tensors whether it agrees.

Reads the `evidence` of one rank, feeds `first` and the reports. Whole columns are judged at once; only kept values are
looked at pair by pair. How large an error may be is decided in `noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from astray.compare import noise
from astray.compare.calibration import SAME_TENSOR, Rule
from astray.compare.evidence import (
    UNDECIDED,
    Evidence,
    Measured,
    Progress,
    Reason,
    measure_statistics,
    measure_values,
)
from astray.compare.kept import Source, is_partial
from astray.compare.keys import one_key
from astray.compare.metrics import BOUNDS, METRICS
from astray.compare.rows import Bools, Floats, Ints
from astray.compare.scale import rounding_of_updates, scales

STATISTICS_EPS = 2.0**-45
"""Statistics are exact to about 1e-12 and depend on the order of summing, so they cannot judge float64 any closer."""


class Verdict(IntEnum):
    """What is said of a pair. `label` is how it is written."""

    IDENTICAL = 0
    ROUNDING = 1
    DRIFTING = 2
    DIVERGED = 3
    NON_FINITE = 4
    SHAPE = 5
    DTYPE = 6
    ONLY_IN_REFERENCE = 7
    ONLY_IN_CANDIDATE = 8
    UNKNOWN = 9

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = [
    "identical",  # the same bits
    "rounding",  # as far apart as one call's rounding makes them
    "drifting",  # as far apart as the rounding of the calls since the first difference makes them
    "diverged",  # further
    "non-finite",  # NaN or Inf where the other side has none
    "shape",
    "dtype",  # of different kinds, such as a float and an integer
    "only in reference",
    "only in candidate",
    "unknown",  # neither side is to blame: what they kept cannot be compared
]

AGREEING = (Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.DRIFTING)
BAD = (Verdict.DIVERGED, Verdict.NON_FINITE, Verdict.SHAPE, Verdict.DTYPE)


@dataclass
class Judgement:
    """One entry per pair: the verdict, how far off (NaN: not known), by which source, why, and what was measured."""

    verdict: npt.NDArray[np.int8]
    error: Floats
    limit: Floats  # the largest error that would have been called drifting; NaN where no error was judged
    source: npt.NDArray[np.int8]
    rule: npt.NDArray[np.int8]
    reason: npt.NDArray[np.int32]
    metrics: dict[str, Floats]

    @classmethod
    def of_nothing(cls, pairs: int, own: Sequence[str] = ()) -> Judgement:
        unknown = np.full(pairs, np.nan)
        nowhere = np.broadcast_to(np.float64(np.nan), pairs)  # takes no memory until something is measured
        return cls(
            verdict=np.full(pairs, Verdict.UNKNOWN, np.int8),
            error=unknown,
            limit=unknown.copy(),
            source=np.full(pairs, Source.NONE, np.int8),
            rule=np.full(pairs, Rule.NONE, np.int8),
            reason=np.zeros(pairs, np.int32),
            metrics=dict.fromkeys((*METRICS, *BOUNDS, *own), nowhere),
        )

    def keep_metrics(self, at: Ints, found: dict[str, Floats]) -> None:
        for name, column in found.items():
            if not self.metrics[name].flags.writeable:
                self.metrics[name] = self.metrics[name].copy()
            self.metrics[name][at] = column


def judge(evidence: Evidence, progress: Progress | None = None, exact: bool = False) -> Judgement:
    """Judge every pair of one rank. With `exact`, whatever is not identical has diverged."""
    judged = _judge(evidence, progress)
    if exact:
        other = np.isin(judged.verdict, (Verdict.ROUNDING, Verdict.DRIFTING))
        judged.verdict[other] = Verdict.DIVERGED
        judged.rule[other] = Rule.BITS
        judged.limit[other | (judged.verdict == Verdict.DIVERGED)] = 0.0
    return judged


def _judge(evidence: Evidence, progress: Progress | None) -> Judgement:
    pairs = evidence.pairs
    judged = Judgement.of_nothing(len(pairs.reference), evidence.own.names)
    judged.verdict[pairs.candidate < 0] = Verdict.ONLY_IN_REFERENCE
    judged.verdict[pairs.reference < 0] = Verdict.ONLY_IN_CANDIDATE
    judged.reason |= evidence.remarks
    decided = (evidence.remarks & UNDECIDED) == 0
    remaining = _judge_form(evidence, np.flatnonzero(pairs.matched & decided), judged)
    if not len(remaining):
        return judged
    kept, apart = evidence.kept_values(remaining)
    besides = evidence.source_without_values(remaining)
    judged.source[remaining] = source = np.maximum(kept, besides)
    judged.reason[remaining[apart]] |= Reason.ELSEWHERE
    _judge_bits(remaining[source <= Source.FINGERPRINT], judged)
    # Some of the values may miss what the statistics of the whole tensor show, so such a pair is judged by both.
    _judge_statistics(evidence, remaining[(source < Source.VALUES) & (besides == Source.STATISTICS)], judged)
    _judge_values(evidence, remaining[source >= Source.SAMPLE], judged, progress)
    _forgive_negligible(evidence, judged)
    _forgive_rounded_updates(evidence, judged)
    _forgive_amplified(evidence, judged)
    _doubt_reduced(evidence, judged)
    return judged


def _judge_form(evidence: Evidence, at: Ints, judged: Judgement) -> Ints:
    """Settle what dtype, shape and fingerprint decide; give back the pairs that must be measured."""
    if not len(at):
        return at
    dtypes = evidence.sides("dtype", at)
    kinds_differ = evidence.kinds[dtypes[0]] != evidence.kinds[dtypes[1]]
    shapes_differ = np.not_equal(*evidence.sides("form", at))
    same_bits = evidence.bits[at] == 1
    judged.reason[at] |= (
        np.where(dtypes[0] != dtypes[1], np.where(kinds_differ, Reason.KINDS, Reason.DTYPES), 0)
        | np.where(shapes_differ, Reason.SHAPES, 0)
        | np.where(shapes_differ & same_bits, Reason.RESHAPED, 0)
    )
    judged.verdict[at[shapes_differ]] = Verdict.SHAPE
    judged.verdict[at[kinds_differ]] = Verdict.DTYPE
    judged.rule[at] = Rule.BITS
    identical = at[same_bits & ~shapes_differ]
    judged.verdict[identical] = Verdict.IDENTICAL
    judged.error[identical] = 0.0
    judged.source[identical] = Source.FINGERPRINT
    settled: Bools = kinds_differ | shapes_differ | same_bits
    return at[~settled]


def _judge_bits(at: Ints, judged: Judgement) -> None:
    """Pairs that have different fingerprints and nothing else, or nothing at all."""
    known = judged.source[at] == Source.FINGERPRINT
    judged.verdict[at] = np.where(known, Verdict.DIVERGED, Verdict.UNKNOWN)
    judged.reason[at] |= np.where(known, Reason.BITS_ONLY, Reason.NOTHING_KEPT)


def _judge_statistics(evidence: Evidence, at: Ints, judged: Judgement) -> None:
    if len(at):
        eps = evidence.noise_eps(at)
        eps = np.where(eps > 0, np.maximum(eps, STATISTICS_EPS), 0)
        _settle(at, measure_statistics(evidence, at), eps, evidence, judged)


def _judge_values(evidence: Evidence, at: Ints, judged: Judgement, progress: Progress | None) -> None:
    """Judge by kept values, all or some. What cannot be read falls back on what else is known."""
    if not len(at):
        return
    read, found = measure_values(evidence, at, progress)
    _fall_back(evidence, np.setdiff1d(at, read), judged)
    if is_partial(judged.source[read]).any():
        found = _with_statistics(found, judged.source[read], judged.verdict[read], judged.error[read])
    _settle(read, found, evidence.noise_eps(read), evidence, judged)


def _with_statistics(found: Measured, source: Ints, verdict: Ints, error: Floats) -> Measured:
    """Add to what some values say what the statistics have said before. Equal values of a part prove nothing alone."""
    some = is_partial(source)
    same = np.where(source == Source.SAMPLE, Reason.SAMPLED, Reason.SLICED)
    return found._replace(
        error=np.where(some, np.fmax(found.error, error), found.error),
        hidden=some & (verdict == Verdict.DIVERGED) & np.isnan(error),
        equal=found.equal & (~some | (verdict == Verdict.IDENTICAL)),
        differs=found.differs | (some & np.isin(verdict, BAD)),
        nonfinite=found.nonfinite | (some & (verdict == Verdict.NON_FINITE)),
        reason=found.reason | np.where(some & ~found.differs, same, 0),
    )


def _fall_back(evidence: Evidence, unread: Ints, judged: Judgement) -> None:
    """Judge by something else what was kept but cannot be read."""
    judged.reason[unread] |= Reason.UNREADABLE
    judged.source[unread] = source = evidence.source_without_values(unread)
    _judge_statistics(evidence, unread[source == Source.STATISTICS], judged)
    _judge_bits(unread[source < Source.STATISTICS], judged)


def _settle(at: Ints, found: Measured, eps: Floats, evidence: Evidence, judged: Judgement) -> None:
    """Turn measurements into verdicts."""
    model = noise.limits(eps, evidence.calls_since_difference(at))
    rounding, drifting, rule = evidence.allowance.limits(at, model.rounding, model.drifting)
    verdict = np.where(
        found.error <= rounding,
        Verdict.ROUNDING,
        np.where(found.error <= drifting, Verdict.DRIFTING, Verdict.DIVERGED),
    )
    # Integers do not round, however small the difference, unless somebody says so.
    verdict[(eps == 0) & found.differs & (rule != Rule.TOLERANCE)] = Verdict.DIVERGED
    unknown = found.hidden & (found.error <= drifting)
    verdict[found.hidden] = Verdict.DIVERGED
    verdict[found.nonfinite] = Verdict.NON_FINITE
    verdict[found.equal] = Verdict.IDENTICAL
    judged.verdict[at] = verdict
    judged.error[at] = np.where(unknown, np.nan, found.error)
    judged.limit[at] = drifting
    judged.rule[at] = np.where(found.equal, Rule.BITS, rule)
    judged.reason[at] |= found.reason | np.where(found.nonfinite, Reason.NONFINITE_ONE, 0)
    coarser = (eps > np.maximum(evidence.eps(at), STATISTICS_EPS)) & ~found.equal
    judged.reason[at] |= np.where(coarser, Reason.COARSE, 0)
    judged.keep_metrics(at, found.metrics)


def _doubt_reduced(evidence: Evidence, judged: Judgement) -> None:
    """Say nothing of micro steps' numbers of which neither the mean nor the sum is the batch's: it may be another."""
    reduced = (evidence.remarks & (Reason.MEAN | Reason.SUM)) > 0
    other = reduced & (judged.verdict == Verdict.DIVERGED) & (judged.rule != Rule.TOLERANCE)
    judged.verdict[other] = Verdict.UNKNOWN
    judged.reason[other] |= Reason.NO_BATCH


def _forgivable(judged: Judgement) -> Ints:
    """What diverged by the numbers, and not because it is beyond what the user allows."""
    measured = (judged.source >= Source.STATISTICS) & (judged.rule != Rule.TOLERANCE)
    return np.flatnonzero((judged.verdict == Verdict.DIVERGED) & measured)


def _forgive_negligible(evidence: Evidence, judged: Judgement) -> None:
    """Take back `diverged` where both sides are nothing but the rounding of larger numbers."""
    at = _forgivable(judged)
    eps = evidence.eps(at)
    absmax = np.maximum(*evidence.numbers("absmax", at))
    small = at[(eps > 0) & noise.negligible(absmax, scales(evidence, at), eps)]
    judged.verdict[small] = Verdict.ROUNDING
    judged.reason[small] |= Reason.NEGLIGIBLE


def _forgive_rounded_updates(evidence: Evidence, judged: Judgement) -> None:
    """Take back `diverged` where an update is off by no more than the weight it was added to was rounded by."""
    at = _forgivable(judged)
    rounding = rounding_of_updates(evidence, at)
    judged.limit[at] += rounding
    small = at[(rounding > 0) & (judged.error[at] <= judged.limit[at])]
    judged.verdict[small] = Verdict.ROUNDING
    judged.reason[small] |= Reason.WEIGHT_ROUNDING


def _forgive_amplified(evidence: Evidence, judged: Judgement) -> None:
    """Take back `diverged` where a few elements of a weight are off by no more than an optimizer may move them.

    Adam moves every element by about its learning rate, also one whose gradient is nothing but rounding, and then in
    any direction. The weight as a whole is right all the same; and what is computed with it may be as far off as it is.
    That does not hold for weights that were never updated. One that began at zero is made of nothing but such moves, so
    that it may be off as a whole.
    """
    at = _forgivable(judged)
    if not len(at) or "parameter" not in evidence.roles:
        return
    rows, columns = evidence.pairs.reference[at], evidence.reference.columns
    moved = (columns["role"][rows] == evidence.roles.index("parameter")) & (
        columns["step"][rows] > columns["step"].min()
    )
    whole, limit = judged.metrics["rel_l2"][at], judged.limit[at]
    mostly_right = (judged.source[at] >= Source.SAMPLE) & (whole <= limit)
    few = moved & (mostly_right | _began_at_zero(evidence, rows)) & (judged.error[at] <= noise.AMPLIFIED * limit)
    inherited = np.zeros(len(judged.error))
    inherited[at[few]] = judged.error[at[few]]
    excused = at[few | (judged.error[at] <= np.maximum.accumulate(inherited)[at])]
    # Behind anything that has no excuse all is its victim, and nothing is excused any more.
    guilty = np.setdiff1d(np.flatnonzero(np.isin(judged.verdict, BAD)), excused)
    excused = excused[excused < guilty[0]] if len(guilty) else excused
    weights = excused[inherited[excused] > 0]
    judged.verdict[excused] = Verdict.DRIFTING
    judged.verdict[weights] = Verdict.ROUNDING
    judged.reason[excused] |= Reason.INHERITED
    judged.reason[weights] ^= Reason.INHERITED | Reason.AMPLIFIED


def _began_at_zero(evidence: Evidence, rows: Ints) -> npt.NDArray[np.bool_]:
    """Of some rows of the reference, those whose tensor was all zeros in the first step."""
    columns = evidence.reference.columns
    key = one_key([columns[name] for name in SAME_TENSOR])
    first = np.flatnonzero(columns["step"] == columns["step"].min())
    zero = first[evidence.reference.statistic("absmax", first) == 0]
    return np.isin(key[rows], key[zero])
