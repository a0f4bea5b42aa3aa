"""What is forgiven though it is beyond its limit, because something right explains it; the row says what.

Called by `judge` once every pair has a verdict. A tolerance that the user gave is final: nothing beyond it is forgiven.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.compare import noise
from astray.compare.calibration import SAME_TENSOR, Rule
from astray.compare.evidence import Evidence, measure_statistics
from astray.compare.following import follow
from astray.compare.kept import Source
from astray.compare.keys import one_key
from astray.compare.reasons import Reason
from astray.compare.rows import Ints
from astray.compare.scale import is_update, rounding_of_updates, scales
from astray.compare.verdict import BAD, Judgement, Verdict


def excuse(evidence: Evidence, judged: Judgement) -> None:
    """Take back verdicts that something right explains."""
    _forgive_negligible(evidence, judged)
    _forgive_rounded_updates(evidence, judged)
    _forgive_rearranged(evidence, judged)
    _forgive_moved(evidence, judged)
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
    _forgive_same(evidence, judged, small[evidence.sides("role", small)[0] == _code(evidence.roles, "gradient")])


def _forgive_same(evidence: Evidence, judged: Judgement, negligible: Ints) -> None:
    """Take back `diverged` of what is a forgiven gradient on its way from a function, or to an optimizer."""
    at = _forgivable(judged)
    at = at[np.isin(evidence.numbers("l2", at)[0], evidence.numbers("l2", negligible)[0])]
    known = set(_numbers(evidence, negligible))
    same = at[[numbers in known for numbers in _numbers(evidence, at)]]
    judged.verdict[same] = Verdict.ROUNDING
    judged.reason[same] |= Reason.NEGLIGIBLE


def _code(words: list[str], word: str) -> int:
    """The number of a word, or −2, which no row has."""
    return words.index(word) if word in words else -2


def _numbers(evidence: Evidence, at: Ints) -> list[tuple[float, ...]]:
    """What two names of one tensor have in common, on both sides."""
    sides = [side for name in ("min", "max", "l2", "count") for side in evidence.numbers(name, at)]
    return list(zip(*(side.tolist() for side in sides), strict=True))


def _forgive_rounded_updates(evidence: Evidence, judged: Judgement) -> None:
    """Take back `diverged` where an update is off by no more than the weight it was added to was rounded by."""
    at = _forgivable(judged)
    rounding = rounding_of_updates(evidence, at)
    judged.limit[at] += rounding
    small = at[(rounding > 0) & (judged.error[at] <= judged.limit[at])]
    judged.verdict[small] = Verdict.ROUNDING
    judged.reason[small] |= Reason.WEIGHT_ROUNDING


def _forgive_moved(evidence: Evidence, judged: Judgement) -> None:
    """Take back `diverged` where an optimizer moved weights by rounding, and of what was computed with them.

    Behind anything that has no excuse all is its victim, and nothing is excused any more.
    """
    amplified, heirs = _amplified(evidence, judged)
    besides = np.zeros(len(judged.verdict), np.bool_)
    besides[amplified] = besides[heirs] = True
    wandered, others = follow(evidence, judged, besides)
    besides[wandered] = besides[others] = True
    guilty = np.flatnonzero(np.isin(judged.verdict, BAD) & ~besides)
    until = guilty[0] if len(guilty) else len(besides)
    for rows, verdict, reason in (
        (amplified, Verdict.ROUNDING, Reason.AMPLIFIED),
        (heirs, Verdict.DRIFTING, Reason.INHERITED),
        (np.array(wandered, np.int64), Verdict.ROUNDING, Reason.WANDERED),
        (np.array(others, np.int64), Verdict.DRIFTING, Reason.VANISHES),
    ):
        excused = rows[rows < until]
        judged.verdict[excused] = verdict
        judged.reason[excused] |= reason


def _amplified(evidence: Evidence, judged: Judgement) -> tuple[Ints, Ints]:
    """Weights of which a few elements are off by no more than an optimizer may move them, and what is no further off.

    Adam moves every element by about its learning rate, also one whose gradient is nothing but rounding, and then in
    any direction. The weight as a whole is right all the same; and what is computed with it may be as far off as it is.
    That does not hold for weights that were never updated. One that began at zero is made of nothing but such moves, so
    that it may be off as a whole; its elements may even be the same but for their signs, in another order.
    """
    at = _forgivable(judged)
    if not len(at) or "parameter" not in evidence.roles:
        return at[:0], at[:0]
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
    few |= is_update(evidence, at) & mostly_right & (error <= noise.AMPLIFIED * limit)  # of which no call is given
    return at[few], at[~few & (error <= np.maximum.accumulate(inherited)[at])]


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
