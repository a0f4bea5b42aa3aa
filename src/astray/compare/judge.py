"""Says of every pair of tensors whether it agrees.

Reads the `evidence` of one rank, gives a `verdict` of each pair. Whole columns are judged at once; only kept values are
looked at pair by pair. How large an error may be is decided in `noise`, and what is forgiven though it is larger in
`excuses`.
"""

from __future__ import annotations

import numpy as np

from astray.compare import noise
from astray.compare.calibration import Rule
from astray.compare.evidence import Evidence, Measured, Progress, measure_statistics, measure_values
from astray.compare.excuses import excuse
from astray.compare.kept import Source, is_partial
from astray.compare.noise import STATISTICS_EPS
from astray.compare.reasons import UNDECIDED, Reason
from astray.compare.rows import Bools, Floats, Ints
from astray.compare.verdict import BAD, Judgement, Verdict


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
    if len(remaining):
        _measure(evidence, remaining, judged, progress)
    if pairs.matched.any():
        excuse(evidence, judged)
    return judged


def _measure(evidence: Evidence, remaining: Ints, judged: Judgement, progress: Progress | None) -> None:
    """Judge what dtype, shape and fingerprint leave open, by the best that both sides kept."""
    kept, apart = evidence.kept_values(remaining)
    besides = evidence.source_without_values(remaining)
    judged.source[remaining] = source = np.maximum(kept, besides)
    judged.reason[remaining[apart]] |= Reason.ELSEWHERE
    _judge_bits(remaining[source <= Source.FINGERPRINT], judged)
    # Some of the values may miss what the statistics of the whole tensor show, so such a pair is judged by both.
    _judge_statistics(evidence, remaining[(source < Source.VALUES) & (besides == Source.STATISTICS)], judged)
    _judge_values(evidence, remaining[source >= Source.SAMPLE], judged, progress)


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
