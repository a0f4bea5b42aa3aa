"""Turns what was measured into verdicts: which rows agree, which are wrong by themselves, and which are their victims.

The last stage of `judge`. Every row is judged by one rule (the column `rule`): a tolerance of the user, the replay of
its call, a noise run, the row's siblings, or a model (`surprise`); `start` for what has no sources; `bits` where
nothing may differ. A row beyond its limit is an *origin*. Its *victims* (`victims`) are rows that came of it and are
further off than their other sources explain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import find_bases, shared_rounding
from astray.comparison.judge.measuring import Facts, measure
from astray.comparison.judge.provenance import Provenance
from astray.comparison.judge.siblings import Gains, largest_of_family, rms_of_family
from astray.comparison.judge.sources import Sources
from astray.comparison.judge.surprise import find_surprise
from astray.comparison.judge.victims import TaintTracker
from astray.comparison.judge.windows import WindowColumns, beyond_floats, comparable, one_ahead, undecided_windows
from astray.comparison.measure.evidence import Evidence, Progress
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import AGREEING, BAD, MEASURES, Judgement, Reason, Rule, Verdict
from astray.graph.keys import mixed_key

BY_SURPRISE = (Rule.MODEL, Rule.SIBLINGS, Rule.NOISE)


class Settled(NamedTuple):
    """What replaying calls has settled, one entry per pair.

    wrong, right: by itself, whatever limits say. surprise: how many times further off than its inputs explain.
    reason: flags of `Reason`.
    """

    wrong: Bools
    right: Bools
    surprise: Floats
    reason: npt.NDArray[np.int64]

    @classmethod
    def nothing(cls, pairs: int) -> Settled:
        return cls(
            np.zeros(pairs, np.bool_), np.zeros(pairs, np.bool_), np.full(pairs, np.nan), np.zeros(pairs, np.int64)
        )

    def take(self, at: Ints) -> Settled:
        """That of some pairs."""
        return Settled(self.wrong[at], self.right[at], self.surprise[at], self.reason[at])


class Measured(NamedTuple):
    """The pairs of a rank, measured, and what bits and shapes have decided."""

    evidence: Evidence
    judged: Judgement
    facts: Facts


@beyond_floats
def measure_pairs(evidence: Evidence, progress: Progress | None = None) -> Measured:
    """Measure every pair of one rank. `progress` is called with (done, total) pairs whose values had to be read."""
    judged = Judgement.empty(len(evidence.pairs.reference), evidence.custom_metrics.names)
    return Measured(evidence, judged, measure(evidence, judged, progress))


@beyond_floats
def decide(measured: Measured, noise: list[Gains], exact: bool = False, settled: Settled | None = None) -> Judgement:
    """Judge every pair of one rank. What was measured stays as it is, and can be judged again.

    noise: the gains that noise runs showed. exact: whatever is not identical has diverged. settled: what is known of
    some pairs by replaying their calls.
    """
    evidence, facts = measured.evidence, measured.facts
    judged = measured.judged.copy()
    if not evidence.pairs.matched.any():
        return judged
    if evidence.blocks is not None:
        _judge_checkpoint(evidence, judged, facts)
    else:
        _judge_steps(evidence, judged, facts, noise, settled or Settled.nothing(len(judged.verdict)))
    if exact:
        inexact = np.isin(judged.verdict, (Verdict.ROUNDING, Verdict.DRIFTING))
        judged.verdict[inexact] = Verdict.DIVERGED
        judged.rule[inexact] = Rule.BITS
        judged.limit[inexact | (judged.verdict == Verdict.DIVERGED)] = 0.0
        judged.origin[:] = np.isin(judged.verdict, BAD)
    return judged


def _judge_checkpoint(evidence: Evidence, judged: Judgement, facts: Facts) -> None:
    """Judge the tensors of checkpoints, which have no sources: by the rounding of one call."""
    eps = np.zeros(len(judged.verdict))
    at = np.flatnonzero(evidence.pairs.matched)
    eps[at] = evidence.eps(at)
    limit = t.OWN_ROUNDINGS * np.where(eps / 2 <= t.FLOAT32, t.FINE_SUM * eps / 2, eps / 2)
    undecided = facts.measured & (judged.verdict != Verdict.IDENTICAL)
    has_tolerance = ~np.isnan(evidence.tolerance)
    limit = np.where(has_tolerance, evidence.tolerance, limit)
    judged.limit[undecided] = limit[undecided]
    judged.rule[undecided] = np.where(has_tolerance, Rule.TOLERANCE, Rule.MODEL)[undecided]
    wrong = (judged.error > limit) | (((eps == 0) & facts.differs | facts.size_unknown) & ~has_tolerance)
    judged.verdict[undecided] = np.where(wrong, Verdict.DIVERGED, Verdict.ROUNDING)[undecided]
    judged.verdict[undecided & facts.nonfinite] = Verdict.NON_FINITE
    judged.verdict[facts.bits_only] = Verdict.DIVERGED
    judged.error[facts.size_unknown & ~(judged.error > limit)] = np.nan
    judged.origin[:] = np.isin(judged.verdict, BAD)


def _judge_steps(evidence: Evidence, judged: Judgement, facts: Facts, noise: list[Gains], settled: Settled) -> None:
    """Judge a rank window by window, unless bits have decided about every pair."""
    history = _History.empty(evidence)
    moves = np.zeros(len(judged.verdict))
    for columns in one_ahead(undecided_windows(evidence, judged, moves)):
        rows, current = columns.window.rows, np.flatnonzero(columns.window.current)
        of_window = judged.take(rows)
        window_judge = _WindowJudge(columns, of_window, facts.take(rows), history.take(rows), settled.take(rows))
        found = window_judge.decide([gains.take(rows) for gains in noise])
        history.put(rows[current], found.take(current))
        judged.put(rows[current], of_window.take(current))


@beyond_floats
def noise_gains(evidence: Evidence, judged: Judgement) -> Gains:
    """What a judged noise run shows, by pair of it."""
    sources = Sources(evidence, comparable(judged))
    gains = {name: np.where(sources.comparable, 0.0, np.nan) for name in MEASURES}
    for columns in undecided_windows(evidence, judged, np.zeros(len(judged.verdict))):
        errors, current = columns.errors, columns.window.current
        rows = columns.window.rows[current]
        floats = columns.sources.comparable & (errors.roundoff > 0)
        for name in MEASURES:
            gain = np.full(len(current), np.nan)
            np.divide(np.minimum(errors.measure(name), t.MAX_ERROR), columns.bases.base[name], out=gain, where=floats)
            gains[name][rows] = gain[current]
    by_row, in_any_step = ({name: np.full(len(sources.comparable), np.nan) for name in MEASURES} for _ in range(2))
    near, _ = sources.families
    for name, gain in gains.items():
        at = np.flatnonzero(~np.isnan(gain))
        by_row[name][at] = np.maximum(gain[at], rms_of_family(gain[at], near[at]))
        in_any_step[name][at] = largest_of_family(gain[at], sources.tensor_key[at])
    return Gains(by_row, in_any_step, np.arange(len(sources.comparable)))


@dataclass(frozen=True)
class _History:
    """What the windows before have left, by pair: origins, rows that agreed by themselves, and what origins reached."""

    origin: Bools
    agreed: Bools
    tainted: Bools
    taint: TaintTracker

    @classmethod
    def empty(cls, evidence: Evidence) -> _History:
        origin, agreed, tainted = (np.zeros(len(evidence.pairs.reference), np.bool_) for _ in range(3))
        return cls(origin, agreed, tainted, TaintTracker(np.unique(evidence.steps[evidence.pairs.matched])))

    def take(self, rows: Ints) -> _History:
        """That of some pairs."""
        return replace(self, origin=self.origin[rows], agreed=self.agreed[rows], tainted=self.tainted[rows])

    def put(self, rows: Ints, history: _History) -> None:
        """Keep what was found of some pairs."""
        self.origin[rows], self.agreed[rows], self.tainted[rows] = history.origin, history.agreed, history.tainted


class _WindowJudge:
    """The columns of a window while its verdicts are found.

    `current` rows are those of this window's own steps. Of these `undecided` are not bit-identical, and measured.
    """

    def __init__(
        self, columns: WindowColumns, judged: Judgement, facts: Facts, history: _History, settled: Settled
    ) -> None:
        self.evidence, self.judged, self.facts, self.history = columns.evidence, judged, facts, history
        self.settled = settled
        self.sources, self.scaling, self.errors = columns.sources, columns.scaling, columns.errors
        self.bases, self.negligible = columns.bases, columns.negligible
        self.provenance = self.sources.provenance
        self.current = columns.window.current
        self.identical = columns.errors.identical
        self.undecided = facts.measured & ~self.identical & self.current

    def decide(self, noise: list[Gains]) -> _History:
        """Fill in the judgement; returns what later windows need."""
        judged, facts = self.judged, self.facts
        self._judge_by_surprise(noise)
        wrong = np.asarray(judged.surprise > 1)
        wrong |= self._wrong_at_start() | self._wrong_integers() | self._reordered()
        wrong |= self._unlike_siblings() | self._moved_in_one_run() | self._scaled_gradients()
        wrong = (wrong | self.settled.wrong) & ~self.settled.right & self.undecided
        self._keep_settled()
        has_tolerance = ~np.isnan(self.evidence.tolerance) & self.undecided
        wrong = np.where(has_tolerance, judged.error > self.evidence.tolerance, wrong)
        self._keep_tolerance(has_tolerance)
        wrong |= facts.nonfinite & self.undecided
        wrong |= facts.bits_only & self.current
        agrees = self.undecided & ~wrong
        judged.verdict[agrees] = np.where(self._is_rounding(), Verdict.ROUNDING, Verdict.DRIFTING)[agrees]
        judged.verdict[agrees & has_tolerance] = Verdict.ROUNDING
        judged.reason[agrees & (self.negligible | self.bases.is_cancelled)] |= Reason.NEGLIGIBLE
        judged.reason[agrees & facts.rearranged] |= Reason.REARRANGED
        judged.verdict[wrong] = np.where(facts.rearranged, Verdict.SHAPE, Verdict.DIVERGED)[wrong]
        judged.verdict[self.undecided & facts.nonfinite] = Verdict.NON_FINITE
        self._leave_reduced_open()
        wrong = np.isin(judged.verdict, BAD)
        judged.origin[:] = wrong & ~self._has_wrong_source(wrong) & self.current
        history = self._find_victims(self.undecided & ~wrong & ~has_tolerance)
        unmeasured = facts.size_unknown & np.isin(judged.verdict, BAD) & (judged.error == 0)
        judged.error[unmeasured] = judged.deviation[unmeasured] = np.nan
        self._repeat_verdicts(np.flatnonzero(self.provenance == Provenance.SEEN_BEFORE))
        return history

    # -- what makes a row wrong by itself --------------------------------------------------------------------------

    def _judge_by_surprise(self, noise: list[Gains]) -> None:
        surprise = find_surprise(self.errors, self.sources, self.bases, noise)
        self.allowed_gain = surprise.allowed_gain
        judged, at = self.judged, np.flatnonzero(self.undecided & ~np.isnan(surprise.score))
        judged.surprise[at], judged.measure[at], judged.rule[at] = (
            surprise.score[at],
            surprise.measure[at],
            surprise.rule[at],
        )
        judged.deviation[at], judged.limit[at] = surprise.error[at], surprise.limit[at]
        judged.given[at], judged.siblings[at] = surprise.input_error[at], surprise.siblings[at]

    def _scaled_gradients(self) -> Bools:
        """The rows by which gradients come in that are all scaled by one factor."""
        judged, scaling = self.judged, self.scaling
        if not scaling.found:
            return scaling.entries
        scaled = (scaling.factor != 1) & self.undecided
        judged.reason[scaled] |= Reason.SCALED
        at = np.flatnonzero(scaling.entries & self.undecided)
        judged.deviation[at] = np.abs(scaling.factor[at] - 1)
        judged.limit[at] = t.MIN_FACTOR
        judged.surprise[at] = judged.deviation[at] / t.MIN_FACTOR
        judged.measure[at], judged.rule[at] = MEASURES.index("norm"), Rule.MODEL
        return scaling.entries

    def _wrong_at_start(self) -> Bools:
        """Of rows without sources: weights must be the same or a cast, inputs and buffers the same but for rounding."""
        judged, errors = self.judged, self.errors
        start = self.undecided & (self.provenance == Provenance.START) & (errors.roundoff > 0)
        rows = np.flatnonzero(start)
        cast = np.zeros(len(start), np.bool_)
        cast[rows] = np.not_equal(*self.evidence.sides("dtype", rows))
        exact = start & self.sources.is_weight & ~cast & (self.evidence.bits == 0)
        table = self.sources.has_role("state") & (errors.roundoff > t.FLOAT32)
        roundings = np.where(table, t.BUFFER_ROUNDINGS, t.OWN_ROUNDINGS)
        values = np.where(cast, errors.roundoff, roundings * self.bases.own_rounding["values"])
        single = np.where(cast, values, t.WORST_ELEMENT * values)
        sums = np.where(cast, t.CAST_SIGMAS, roundings * t.SUM_SIGMAS) * errors.roundoff / np.sqrt(errors.count)
        sums = sums + shared_rounding(errors.roundoff)
        sums = np.where(cast & self._is_constant(), errors.roundoff, sums)
        limits = {"values": values, "worst": single, "norm": sums, "mean": sums, "extremes": single}
        for name, by_measure in limits.items():
            error = np.where(start, errors.measure(name), np.nan)
            limit = np.where(exact, 0.0, by_measure)
            with np.errstate(divide="ignore", invalid="ignore"):
                surprise = np.where(exact, np.inf, error / limit)
            smaller = np.where(exact, error <= judged.deviation, surprise <= judged.surprise)
            larger = start & ~np.isnan(error) & ~smaller
            judged.surprise[larger], judged.measure[larger] = surprise[larger], MEASURES.index(name)
            judged.deviation[larger], judged.limit[larger] = error[larger], limit[larger]
        judged.rule[start] = Rule.START
        judged.given[start] = 0.0
        return np.asarray(start & (exact | (judged.surprise > 1)))

    def _is_constant(self) -> Bools:
        """Tensors whose elements are so close together that a cast rounds all of them in the same direction."""
        is_constant = np.zeros(len(self.undecided), np.bool_)
        at = np.flatnonzero(self.sources.comparable)
        mean, std = (self.evidence.numbers(name, at)[0] for name in ("mean", "std"))
        is_constant[at] = std <= t.OWN_ROUNDINGS * self.errors.roundoff[at] * np.abs(mean)
        return is_constant

    def _wrong_integers(self) -> Bools:
        """Integers do not round; but an index that a call chose may be another where the numbers it chose from are off.

        Inputs of a loss are labels, which no call chose.
        """
        differs = self.facts.differs & (self.errors.roundoff == 0)
        self.judged.limit[self.undecided & differs] = 0.0
        self.judged.rule[self.undecided & differs] = Rule.MODEL
        chosen = self.sources.largest(np.where(self.undecided, 1.0, 0.0)) > 0
        chosen &= (
            self.sources.has_provenance(Provenance.CALL, Provenance.CODE, Provenance.SEEN_BEFORE)
            & ~self.sources.is_label
        )
        self.judged.reason[self.undecided & differs & chosen] |= Reason.CHOSEN
        return np.asarray(differs & ~chosen)

    def _reordered(self) -> Bools:
        """Rows whose values surely differ though no statistic shows it, out of sources that are the same."""
        return np.asarray(self.facts.size_unknown & ~self.bases.inputs_differ & ~self.negligible)

    def _unlike_siblings(self) -> Bools:
        """Rows with other bits out of the same bits, where siblings have the same bits out of the same.

        Those show one program on one machine, where no rounding differs. Siblings of the steps that the window looks
        back at count as well, if their tensors have the same shapes.
        """
        sources = self.sources
        made = sources.has_provenance(Provenance.CALL, Provenance.CODE, Provenance.GRADIENT, Provenance.WEIGHT)
        at = np.flatnonzero(self.bases.inputs_identical & sources.comparable & made)
        unlike = np.zeros(len(self.undecided), np.bool_)
        if not self.undecided[at].any():
            return unlike
        _, family = np.unique(mixed_key([sources.position_in_layer[at], sources.call_shapes[at]]), return_inverse=True)
        same, other = np.bincount(family, self.identical[at]), np.bincount(family, self.undecided[at])
        many_same = (same >= t.MIN_STEADY_SIBLINGS) & (same >= t.MIN_STEADY_SIBLINGS * other)
        only_other = (same >= 1) & (other == 1)
        odd = many_same[family] & self._beyond_roundings(1)[at]
        odd |= only_other[family] & self._beyond_roundings(t.OWN_ROUNDINGS)[at]
        odd &= self.undecided[at]
        unlike[at[odd]] = True
        judged = self.judged
        by_bits = np.flatnonzero(odd & ~(judged.surprise[at] > 1))  # the others have a limit that they are beyond
        rows = at[by_bits]
        judged.rule[rows], judged.limit[rows], judged.surprise[rows] = Rule.SIBLINGS, 0.0, np.inf
        judged.siblings[rows] = same[family[by_bits]]
        return unlike

    def _moved_in_one_run(self) -> Bools:
        """Weights that have the same bits as in the step before in one run alone.

        In bfloat16 steps of an optimizer may be less than a rounding, and then it is chance which of a few elements
        move. But where many did, and both runs moved the same weight of other layers, no optimizer stepped this one.
        """
        sources, evidence = self.sources, self.evidence
        found = np.zeros(len(self.undecided), np.bool_)
        is_weight = (self.provenance == Provenance.WEIGHT) & (sources.last_seen >= 0)
        weights = np.flatnonzero(is_weight & (evidence.bits >= 0))
        many_differ = self.judged.metrics["different"] >= t.MIN_MOVED_ELEMENTS
        if not (self.undecided & many_differ)[weights].any():
            return found
        before = sources.last_seen[weights]
        known = (sources.step[before] != sources.step[weights]) & (evidence.bits[before] >= 0)
        weights, before = weights[known], before[known]
        bits, bits_before = (evidence.numbers("fingerprint", rows) for rows in (weights, before))
        stayed_reference, stayed_candidate = (now == then for now, then in zip(bits, bits_before, strict=True))
        family_key = mixed_key([sources.position_in_layer[weights], sources.step[weights]])
        _, family = np.unique(family_key, return_inverse=True)
        moved = np.bincount(family, ~stayed_reference & ~stayed_candidate)
        stayed = np.bincount(family, stayed_reference | stayed_candidate)
        steady = (moved >= t.MIN_STEADY_SIBLINGS) & (moved >= t.MIN_STEADY_SIBLINGS * stayed)
        odd = (stayed_reference != stayed_candidate) & steady[family] & (self.undecided & many_differ)[weights]
        rows = weights[odd]
        found[rows] = True
        judged = self.judged
        judged.rule[rows], judged.limit[rows], judged.surprise[rows] = Rule.UNMOVED, 0.0, np.inf
        judged.siblings[rows] = moved[family[odd]]
        judged.reason[rows] |= np.where(stayed_reference[odd], Reason.UNMOVED_REFERENCE, Reason.UNMOVED_CANDIDATE)
        return found

    def _beyond_roundings(self, times: float) -> Bools:
        """Rows that are off by more than so many roundings of each element; the tail of a vector may be off by one."""
        errors, roundings = self.errors, times * self.errors.roundoff
        beyond = errors.values > roundings
        beyond |= errors.worst > t.WORST_ELEMENT * roundings
        beyond |= errors.extremes > t.WORST_ELEMENT * roundings
        return np.asarray(beyond | (errors.sums > t.SUM_SIGMAS * roundings / errors.sqrt_count))

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _keep_settled(self) -> None:
        """Replays say by how much a row is further off than its call explains, and not how far off it may be."""
        judged, settled = self.judged, self.settled
        rows = np.flatnonzero((settled.wrong | settled.right) & self.undecided)
        judged.rule[rows], judged.surprise[rows] = Rule.REPLAY, settled.surprise[rows]
        judged.limit[rows] = np.nan
        judged.reason[rows] |= settled.reason[rows]

    def _keep_tolerance(self, rows: Bools) -> None:
        judged, tolerance = self.judged, self.evidence.tolerance
        judged.rule[rows], judged.limit[rows] = Rule.TOLERANCE, tolerance[rows]
        judged.deviation[rows], judged.measure[rows] = judged.error[rows], -1
        with np.errstate(divide="ignore", invalid="ignore"):
            judged.surprise[rows] = judged.error[rows] / tolerance[rows]

    def _leave_reduced_open(self) -> None:
        """Leave undecided the numbers of joined micro steps of which neither the mean nor the sum is the batch's."""
        judged = self.judged
        reduced = (self.evidence.remarks & (Reason.MEAN | Reason.SUM)) > 0
        doubtful = reduced & (judged.verdict == Verdict.DIVERGED) & (judged.rule != Rule.TOLERANCE)
        judged.verdict[doubtful] = Verdict.UNKNOWN
        judged.surprise[doubtful] = np.nan
        judged.reason[doubtful] |= Reason.NO_BATCH

    def _is_rounding(self) -> Bools:
        """Whether a row is off by no more than the rounding of its own call."""
        errors, own = self.errors, self.bases.own_rounding
        fits = np.ones(len(self.undecided), np.bool_)
        for name in MEASURES:
            fits &= ~(errors.measure(name) > t.OWN_ROUNDINGS * own[name])
        return fits

    def _has_wrong_source(self, wrong: Bools) -> Bools:
        """Wrong rows with a source that is wrong in the same way; of those judged without a base, in any way."""
        has_wrong_source = np.zeros(len(wrong), np.bool_)
        for verdicts in ((Verdict.NON_FINITE,), (Verdict.SHAPE, Verdict.DTYPE)):
            rows = np.isin(self.judged.verdict, verdicts)
            if rows.any():
                has_wrong_source |= rows & (self.sources.largest(rows.astype(np.float64)) > 0)
        without_base = wrong & (self.facts.bits_only | (self.evidence.tolerance >= 0))
        if without_base.any():
            has_wrong_source |= without_base & (self.sources.largest(wrong.astype(np.float64)) > 0)
        return has_wrong_source

    # -- victims ---------------------------------------------------------------------------------------------------

    def _find_victims(self, agrees: Bools) -> _History:
        """Turn rows that agree by themselves into victims, and origins that came of others, too."""
        judged, history = self.judged, self.history
        is_first = not history.taint.has_begun
        origin = np.where(self.current, judged.origin, history.origin)
        agreed = np.where(self.current, agrees, history.agreed)
        reached = history.taint.spread(self.sources, self.current, origin, agreed)
        tainted = reached.rows | history.tainted
        victims = reached.rows & agreed & self.current
        if victims.any():
            victims &= self._beyond_untainted(tainted) | self.facts.size_unknown
        judged.verdict[victims] = Verdict.DIVERGED
        victims |= self._origins_that_are_victims(reached.origins, is_first)
        judged.origin[victims] = False
        judged.reason[victims] |= Reason.VICTIM
        return _History(origin, agreed, tainted, history.taint)

    def _origins_that_are_victims(self, reached: Bools, is_first: bool) -> Bools:
        """Origins that came of another origin, or show a value that is wrong already.

        reached: origins that could have come of one. is_first: whether no window before this one has an origin.
        """
        origin, sources = self.judged.origin, self.sources
        later = origin & (np.arange(len(origin)) > int(np.argmax(origin))) if is_first else origin.copy()
        if not later.any():
            return later
        explained = reached & (self.judged.surprise > 1) & np.isin(self.judged.rule, BY_SURPRISE)
        if (explained & later).any():
            explained &= ~self._beyond_one_direction()
        # A row without recorded sources may have come of anything before it.
        made = sources.has_provenance(Provenance.CALL, Provenance.CODE, Provenance.GRADIENT)
        explained |= ~sources.has_sources & made
        bad = np.append(np.isin(self.judged.verdict, BAD), False)
        return np.asarray(later & (explained | bad[sources.first_seen_in_any_plane]))

    def _beyond_one_direction(self) -> Bools:
        """Rows that are further off than their sources explain, even if those are off in one direction.

        Rounding averages out in sums, and what has come of a fault does not.
        """
        beyond, bases = np.zeros(len(self.undecided), np.bool_), self.bases
        for name in MEASURES:
            base = np.hypot(np.maximum(bases.input_error[name], bases.element_error), bases.own_rounding[name])
            beyond |= self.errors.measure(name) > np.fmax(t.SIBLING_GAIN[name], self.allowed_gain[name]) * base
        return beyond

    def _beyond_untainted(self, tainted: Bools) -> Bools:
        """Rows that are further off than their sources explain without the tainted ones."""
        beyond = np.zeros(len(tainted), np.bool_)
        bases = find_bases(self.errors.without(tainted), self.sources, self.bases.optimizer_moves)
        for name in MEASURES:
            allowed_gain = np.fmax(t.SIBLING_GAIN[name], self.allowed_gain[name])
            beyond |= self.errors.measure(name) > allowed_gain * bases.base[name]
        return beyond

    def _repeat_verdicts(self, rows: Ints) -> None:
        """Give rows whose value was seen before the verdict of that row; they are not origins."""
        judged = self.judged
        rows = rows[self.undecided[rows] & (judged.rule[rows] != Rule.TOLERANCE)]
        source = self.sources.first_seen[rows]
        agrees = np.isin(judged.verdict[source], AGREEING)
        judged.verdict[rows] = np.where(
            self.identical[source], Verdict.DRIFTING, np.where(agrees, judged.verdict[source], Verdict.DIVERGED)
        )
        judged.verdict[rows[self.facts.nonfinite[rows]]] = Verdict.NON_FINITE
        for column in (judged.measure, judged.deviation, judged.limit, judged.given, judged.siblings):
            column[rows] = column[source]
        judged.surprise[rows] = np.nan
        judged.rule[rows] = Rule.SEEN_BEFORE
        judged.origin[rows] = False
        judged.reason[rows] |= judged.reason[source] & (Reason.VICTIM | Reason.CHOSEN)
