"""What is forgiven though it is beyond its limit, because something right explains it; the row says what.

Called by `judge` once every pair has a verdict. A tolerance that the user gave is final: nothing beyond it is forgiven.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.compare import noise
from astray.compare.calibration import SAME_TENSOR, Rule
from astray.compare.evidence import Evidence, measure_statistics
from astray.compare.kept import Source
from astray.compare.keys import one_key
from astray.compare.reasons import Reason
from astray.compare.rows import Ints
from astray.compare.scale import rounding_of_updates, scales
from astray.compare.verdict import BAD, Judgement, Verdict


def excuse(evidence: Evidence, judged: Judgement) -> None:
    """Take back verdicts that something right explains."""
    _forgive_negligible(evidence, judged)
    _forgive_rounded_updates(evidence, judged)
    _forgive_rearranged(evidence, judged)
    _forgive_amplified(evidence, judged)
    _doubt_reduced(evidence, judged)


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
    that it may be off as a whole; its elements may even be the same but for their signs, in another order.
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
    reordered = (judged.reason[at] & Reason.REORDERED) > 0  # how far off that is nobody knows
    error = np.where(reordered & np.isnan(judged.error[at]), limit, judged.error[at])
    few = moved & (mostly_right | _began_at_zero(evidence, rows)) & (error <= noise.AMPLIFIED * limit)
    inherited = np.zeros(len(judged.error))
    inherited[at[few]] = error[few]
    excused = at[few | (error <= np.maximum.accumulate(inherited)[at])]
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


def _forgive_rearranged(evidence: Evidence, judged: Judgement) -> None:
    """Take back `shape` where a gradient has as many elements as the other, and all its statistics.

    Views hand gradients through in shapes of their own, and two ways to one result seldom use the same views. That the
    elements are in the right order shows in the forward, or where the gradient goes.
    """
    if "backward" not in evidence.phases:
        return
    at = np.flatnonzero(judged.verdict == Verdict.SHAPE)
    at = at[evidence.sides("phase", at)[0] == evidence.phases.index("backward")]
    left, right = evidence.numbers("count", at)
    at = at[(left == right) & (left > 0) & (evidence.eps(at) > 0)]
    if not len(at):
        return
    found = measure_statistics(evidence, at)
    eps = np.maximum(evidence.noise_eps(at), noise.STATISTICS_EPS)
    model = noise.limits(eps, evidence.calls_since_difference(at))
    _, limit, rule = evidence.allowance.limits(at, model.rounding, model.drifting)
    fits = (found.error <= limit) & ~found.nonfinite
    small = at[fits]
    judged.verdict[small] = Verdict.DRIFTING
    judged.error[small], judged.limit[small] = found.error[fits], limit[fits]
    judged.source[small], judged.rule[small] = Source.STATISTICS, rule[fits]
    judged.reason[small] |= Reason.REARRANGED


def _doubt_reduced(evidence: Evidence, judged: Judgement) -> None:
    """Say nothing of micro steps' numbers of which neither the mean nor the sum is the batch's: it may be another."""
    reduced = (evidence.remarks & (Reason.MEAN | Reason.SUM)) > 0
    other = reduced & (judged.verdict == Verdict.DIVERGED) & (judged.rule != Rule.TOLERANCE)
    judged.verdict[other] = Verdict.UNKNOWN
    judged.reason[other] |= Reason.NO_BATCH
