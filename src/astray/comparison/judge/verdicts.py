"""Turns what was measured into verdicts: which rows agree, which are wrong by themselves, and which have come of those.

The last stage of `judge`. Four can decide how far off a row may be, and the column `rule` says which did: a tolerance
of the user's, a noise run, the row's siblings, or a model. What came from nowhere (rule `start`) is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import Bases, find_bases, find_negligible, moves_of_optimizers, shared_rounding
from astray.comparison.judge.calls import read_calls
from astray.comparison.judge.errors import Errors, find_errors
from astray.comparison.judge.measuring import Facts, measure
from astray.comparison.judge.siblings import Gains, largest_of_family, size_of_family
from astray.comparison.judge.sources import Producer, Sources
from astray.comparison.judge.surprise import find_surprise
from astray.comparison.judge.victims import ReachAcrossWindows
from astray.comparison.judge.whole_run import Scaling, find_scaling, find_units, multiplied_units
from astray.comparison.judge.windows import Window, cut
from astray.comparison.measure.evidence import Evidence, Progress
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import AGREEING, BAD, MEASURES, Judgement, Reason, Rule, Verdict
from astray.graph.keys import mixed_key

T = TypeVar("T")

BY_SURPRISE = (Rule.MODEL, Rule.SIBLINGS, Rule.NOISE)
_BEYOND_FLOATS = np.errstate(over="ignore", invalid="ignore")  # what is too far off for a float is infinitely far off


@_BEYOND_FLOATS
def judge(evidence: Evidence, noise: list[Gains], progress: Progress | None = None, exact: bool = False) -> Judgement:
    """Judge every pair of one rank.

    noise: the gains that noise runs showed. exact: whatever is not identical has diverged.
    """
    judged = Judgement.of_nothing(len(evidence.pairs.reference), evidence.own.names)
    facts = measure(evidence, judged, progress)
    if not evidence.pairs.matched.any():
        return judged
    if evidence.blocks is not None:  # the tensors of a checkpoint do not come from each other
        _judge_alone(evidence, judged, facts)
    else:
        _settle(evidence, judged, facts, noise)
    if exact:
        other = np.isin(judged.verdict, (Verdict.ROUNDING, Verdict.DRIFTING))
        judged.verdict[other] = Verdict.DIVERGED
        judged.rule[other] = Rule.BITS
        judged.limit[other | (judged.verdict == Verdict.DIVERGED)] = 0.0
        judged.origin[:] = np.isin(judged.verdict, BAD)
    return judged


@_BEYOND_FLOATS
def _settle(evidence: Evidence, judged: Judgement, facts: Facts, noise: list[Gains]) -> None:
    """Decide about all pairs, window by window, unless bits have decided about every one."""
    past = _Past.of_nothing(evidence)
    for window, part in _one_ahead(_parts(evidence, judged, past)):
        rows, own = window.rows, np.flatnonzero(window.own)
        said = judged.taken(rows)
        judge = _Judge(part, said, facts.taken(rows), window.own, past.taken(rows))
        past.put(rows[own], judge.decide([gains.taken(rows) for gains in noise]).taken(own))
        judged.put(rows[own], said.taken(own))


@_BEYOND_FLOATS
def noise_gains(evidence: Evidence, judged: Judgement) -> Gains:
    """What a judged noise run shows, by pair of it."""
    sources = Sources(evidence, _comparable(judged))
    gains = {name: np.where(sources.known, 0.0, np.nan) for name in MEASURES}
    past = _Past.of_nothing(evidence)
    for window, part in _parts(evidence, judged, past):
        own, rows = window.own, window.rows[window.own]
        for name in MEASURES:
            error = np.minimum(part.errors.measure(name), t.LARGEST)
            gain = np.full(len(own), np.nan)
            np.divide(error, part.bases.whole[name], out=gain, where=part.sources.known & (part.errors.unit > 0))
            gains[name][rows] = gain[own]
    by_row, ever = ({name: np.full(len(sources.known), np.nan) for name in MEASURES} for _ in range(2))
    for name, gain in gains.items():
        at = np.flatnonzero(~np.isnan(gain))
        by_row[name][at] = np.maximum(gain[at], size_of_family(gain[at], sources.families[0][at]))
        ever[name][at] = largest_of_family(gain[at], sources.place_in_any_step[at])
    return Gains(by_row, ever, np.arange(len(sources.known)))


@dataclass(frozen=True)
class _Past:
    """What was found of the windows before, by pair: what optimizers moved weights by, and what faults have reached."""

    moved: Floats
    origin: Bools
    other: Bools
    tainted: Bools
    reach: ReachAcrossWindows

    @classmethod
    def of_nothing(cls, evidence: Evidence) -> _Past:
        length = len(evidence.pairs.reference)
        origin, other, tainted = (np.zeros(length, np.bool_) for _ in range(3))
        steps = np.unique(evidence.steps[evidence.pairs.matched])
        return cls(np.zeros(length), origin, other, tainted, ReachAcrossWindows(steps))

    def taken(self, rows: Ints) -> _Past:
        """That of some pairs."""
        return replace(self, **{name: getattr(self, name)[rows] for name in ("moved", "origin", "other", "tainted")})

    def put(self, rows: Ints, found: _Past) -> None:
        """Keep what was found of some pairs; what they were moved by is known since their window was made."""
        for name in ("origin", "other", "tainted"):
            getattr(self, name)[rows] = getattr(found, name)


@dataclass(frozen=True)
class _Part:
    """The pairs of a window: what they came from, how far off they are, and how far they may be."""

    evidence: Evidence
    sources: Sources
    scaling: Scaling
    errors: Errors
    negligible: Bools
    bases: Bases


def _parts(evidence: Evidence, judged: Judgement, past: _Past) -> Iterator[tuple[Window, _Part]]:
    """The windows in which anything is undecided. `past` is read anew for each of them."""
    undecided = (judged.verdict != Verdict.IDENTICAL) & evidence.pairs.matched
    run = evidence.reference.run
    if run is None or not undecided.any():
        return
    calls, comparable, units = read_calls(run), _comparable(judged), find_units(evidence)
    for window in cut(evidence, calls, undecided):
        rows = window.rows
        here = evidence.taken(rows)
        sources = Sources(here, comparable[rows], calls.taken(evidence.reference.call_row[here.pairs.reference]))
        scaling = find_scaling(here, sources)
        errors = find_errors(here, judged.taken(rows), scaling.factor, multiplied_units(sources, units))
        negligible = find_negligible(errors, sources)
        errors = errors.without(negligible)
        bases = find_bases(errors, sources, moves_of_optimizers(errors, sources, window.own, past.moved[rows]))
        past.moved[rows[window.own]] = bases.moved[window.own]
        yield window, _Part(here, sources, scaling, errors, negligible, bases)


def _one_ahead(parts: Iterator[T]) -> Iterator[T]:
    """The same, each made while the one before is judged: two cores share the work."""
    with ThreadPoolExecutor(1) as pool:
        try:
            coming = pool.submit(_next, parts)
        except RuntimeError:  # the system gives no thread
            while (part := _next(parts)) is not None:
                yield part
            return
        while (part := coming.result()) is not None:
            coming = pool.submit(_next, parts)
            yield part


@_BEYOND_FLOATS  # which holds for one thread
def _next(parts: Iterator[T]) -> T | None:
    return next(parts, None)


def _comparable(judged: Judgement) -> Bools:
    return np.asarray(~np.isin(judged.verdict, (Verdict.SHAPE, Verdict.DTYPE)))


@_BEYOND_FLOATS
def _judge_alone(evidence: Evidence, judged: Judgement, facts: Facts) -> None:
    """By the rounding of one call: there is nothing that a tensor came from."""
    eps = np.zeros(len(judged.verdict))
    at = np.flatnonzero(evidence.pairs.matched)
    eps[at] = evidence.eps(at)
    limit = t.OWN * np.where(eps / 2 <= t.FLOAT32, t.FINE_SUM * eps / 2, eps / 2)
    open_ = facts.measured & (judged.verdict != Verdict.IDENTICAL)
    said = ~np.isnan(evidence.tolerance)
    limit = np.where(said, evidence.tolerance, limit)
    judged.limit[open_] = limit[open_]
    judged.rule[open_] = np.where(said, Rule.TOLERANCE, Rule.MODEL)[open_]
    wrong = (judged.error > limit) | ((eps == 0) & facts.differs & ~said) | (facts.hidden & ~said)
    judged.verdict[open_] = np.where(wrong, Verdict.DIVERGED, Verdict.ROUNDING)[open_]
    judged.verdict[open_ & facts.nonfinite] = Verdict.NON_FINITE
    judged.verdict[facts.bits_only] = Verdict.DIVERGED
    judged.error[facts.hidden & ~(judged.error > limit)] = np.nan
    judged.origin[:] = np.isin(judged.verdict, BAD)


class _Judge:
    """The columns of a window while verdicts are found. Only rows of its own are `open`."""

    def __init__(self, part: _Part, judged: Judgement, facts: Facts, own: Bools, past: _Past) -> None:
        self.evidence, self.judged, self.facts, self.past = part.evidence, judged, facts, past
        self.sources, self.scaling, self.errors, self.bases = part.sources, part.scaling, part.errors, part.bases
        self.negligible = part.negligible
        self.unit = self.sources.unit
        self.own = own
        self.identical = part.errors.identical
        self.open = facts.measured & ~self.identical & own

    def decide(self, noise: list[Gains]) -> _Past:
        """Fill in what is judged; give back what later windows need."""
        judged, facts = self.judged, self.facts
        self._keep_surprise(noise)
        wrong = (
            self._by_surprise() | self._by_start() | self._of_integers() | self._of_hidden() | self._unlike_siblings()
        )
        wrong |= self._unmoved()
        wrong |= self._by_factor()
        wrong &= self.open
        said = ~np.isnan(self.evidence.tolerance) & self.open
        wrong = np.where(said, judged.error > self.evidence.tolerance, wrong)
        self._keep_tolerance(said)
        wrong |= facts.nonfinite & self.open
        wrong |= facts.bits_only & self.own
        agree = self.open & ~wrong
        judged.verdict[agree] = np.where(self._is_rounding(), Verdict.ROUNDING, Verdict.DRIFTING)[agree]
        judged.verdict[agree & said] = Verdict.ROUNDING
        judged.reason[agree & (self.negligible | self.bases.cancelled)] |= Reason.NEGLIGIBLE
        judged.reason[agree & facts.rearranged] |= Reason.REARRANGED
        judged.verdict[wrong] = np.where(facts.rearranged, Verdict.SHAPE, Verdict.DIVERGED)[wrong]
        judged.verdict[self.open & facts.nonfinite] = Verdict.NON_FINITE
        self._doubt_reduced()
        wrong = np.isin(judged.verdict, BAD)
        judged.origin[:] = wrong & ~self._comes_of(wrong) & self.own
        past = self._find_victims(self.open & ~wrong & ~said)
        unseen = facts.hidden & np.isin(judged.verdict, BAD) & (judged.error == 0)
        judged.error[unseen] = judged.deviation[unseen] = np.nan
        carried = np.flatnonzero(self.unit == Producer.CARRIED)
        self._carry(carried)
        return past

    def _keep_surprise(self, noise: list[Gains]) -> None:
        found = find_surprise(self.errors, self.sources, self.bases, noise)
        self.allowed = found.allowed
        judged, at = self.judged, np.flatnonzero(self.open & ~np.isnan(found.score))
        judged.surprise[at], judged.measure[at] = found.score[at], found.measure[at]
        judged.deviation[at], judged.limit[at] = found.error[at], found.limit[at]
        judged.given[at], judged.siblings[at], judged.rule[at] = found.given[at], found.siblings[at], found.rule[at]

    def _by_surprise(self) -> Bools:
        return np.asarray(self.judged.surprise > 1)

    def _by_factor(self) -> Bools:
        """Where gradients come in that are all scaled by one factor."""
        judged, scaling = self.judged, self.scaling
        if not scaling.found:
            return scaling.entries
        scaled = (scaling.factor != 1) & self.open
        judged.reason[scaled] |= Reason.SCALED
        at = np.flatnonzero(scaling.entries & self.open)
        judged.deviation[at] = np.abs(scaling.factor[at] - 1)
        judged.limit[at] = t.FACTOR_LEAST
        judged.surprise[at] = judged.deviation[at] / t.FACTOR_LEAST
        judged.measure[at], judged.rule[at] = MEASURES.index("norm"), Rule.MODEL
        return scaling.entries

    def _by_start(self) -> Bools:
        """What came from nowhere: weights are the same or a cast, inputs and buffers the same but for rounding."""
        judged, errors = self.judged, self.errors
        start = self.open & (self.unit == Producer.START) & (errors.unit > 0)
        weights = start & self.sources.is_weight
        pairs = np.flatnonzero(start)
        cast = np.zeros(len(start), np.bool_)
        cast[pairs] = np.not_equal(*self.evidence.sides("dtype", pairs))
        exact = weights & ~cast & (self.evidence.bits == 0)
        table = self.sources.has_role("state") & (errors.unit > t.FLOAT32)
        roundings = np.where(table, t.TABLE, t.OWN)
        rounding = np.where(cast, errors.unit, roundings * self.bases.own["values"])
        spread = np.where(cast, t.CAST, roundings * t.SUMS) * errors.unit / np.sqrt(errors.count)
        spread = spread + shared_rounding(errors.unit)
        spread = np.where(cast & self._is_constant(), errors.unit, spread)
        limits = {
            "values": rounding,
            "worst": np.where(cast, rounding, t.WORST * rounding),
            "norm": spread,
            "mean": spread,
            "extremes": np.where(cast, rounding, t.WORST * rounding),
        }
        for name in limits:
            number = MEASURES.index(name)
            error = np.where(start, errors.measure(name), np.nan)
            limit = np.where(exact, 0.0, limits[name])
            with np.errstate(divide="ignore", invalid="ignore"):
                surprise = np.where(exact, np.inf, error / limit)
            smaller = np.where(exact, error <= judged.deviation, surprise <= judged.surprise)
            better = start & ~np.isnan(error) & ~smaller
            judged.surprise[better], judged.measure[better] = surprise[better], number
            judged.deviation[better], judged.limit[better] = error[better], limit[better]
        judged.rule[start] = Rule.START
        judged.given[start] = 0.0
        return np.asarray(start & (exact | (judged.surprise > 1)))

    def _is_constant(self) -> Bools:
        """Tensors whose elements are so close together that a cast rounds all of them in the same direction."""
        found = np.zeros(len(self.open), np.bool_)
        at = np.flatnonzero(self.sources.known)
        mean, std = (self.evidence.numbers(name, at)[0] for name in ("mean", "std"))
        found[at] = std <= t.OWN * self.errors.unit[at] * np.abs(mean)
        return found

    def _of_integers(self) -> Bools:
        """Integers do not round. But what a call chooses may be another thing where what it chose from is off.

        What a loss is given are labels, which no call has chosen.
        """
        differs = self.facts.differs & (self.errors.unit == 0)
        self.judged.limit[self.open & differs] = 0.0
        self.judged.rule[self.open & differs] = Rule.MODEL
        chosen = self.sources.largest(np.where(self.open, 1.0, 0.0)) > 0
        chosen &= self.sources.is_unit(Producer.CALL, Producer.CODE, Producer.CARRIED) & ~self.sources.are_labels
        self.judged.reason[self.open & differs & chosen] |= Reason.CHOSEN
        return np.asarray(differs & ~chosen)

    def _of_hidden(self) -> Bools:
        """The same values in another order, and nothing they came from differs."""
        return np.asarray(self.facts.hidden & ~self.bases.spoilt & ~self.negligible)

    def _unlike_siblings(self) -> Bools:
        """Other bits out of the same bits, where siblings that were given the same bits gave the same ones.

        So it is one program on one machine, and no rounding differs. Siblings are those of the step before as well,
        if their tensors have the same shapes.
        """
        sources = self.sources
        units = sources.is_unit(Producer.CALL, Producer.CODE, Producer.GRADIENT, Producer.WEIGHT)
        at = np.flatnonzero(self.bases.unspoilt & sources.known & units)
        found = np.zeros(len(self.open), np.bool_)
        if not self.open[at].any():
            return found
        _, number = np.unique(mixed_key([sources.kind[at], sources.form[at]]), return_inverse=True)
        same, other = np.bincount(number, self.identical[at]), np.bincount(number, self.open[at])
        many = (same >= t.STEADY) & (same >= t.STEADY * other)
        few = (same >= 1) & (other == 1)
        odd = (many[number] & self._is_rounded(1)[at]) | (few[number] & self._is_rounded(t.OWN)[at])
        found[at[self.open[at] & odd]] = True
        judged = self.judged
        here = np.flatnonzero(self.open[at] & odd & ~(judged.surprise[at] > 1))  # else there is a number for it
        judged.rule[at[here]], judged.limit[at[here]], judged.surprise[at[here]] = Rule.SIBLINGS, 0.0, np.inf
        judged.siblings[at[here]] = same[number[here]]
        return found

    def _unmoved(self) -> Bools:
        """Weights that one run has left as they were in the step before, and the other has not.

        In bfloat16 steps of an optimizer may be less than a rounding, and then it is chance which of a few elements
        move. But where many did, and both runs moved the same weight of other layers, no optimizer stepped this one.
        """
        sources, evidence = self.sources, self.evidence
        found = np.zeros(len(self.open), np.bool_)
        weights = np.flatnonzero((sources.unit == Producer.WEIGHT) & (sources.last_seen >= 0) & (evidence.bits >= 0))
        many = self.judged.metrics["different"] >= t.MOVING
        if not (self.open & many)[weights].any():
            return found
        before = sources.last_seen[weights]
        later = (sources.step[before] != sources.step[weights]) & (evidence.bits[before] >= 0)
        weights, before = weights[later], before[later]
        now, then = (evidence.numbers("fingerprint", rows) for rows in (weights, before))
        in_reference, in_candidate = (one == other for one, other in zip(now, then, strict=True))
        _, number = np.unique(mixed_key([sources.kind[weights], sources.step[weights]]), return_inverse=True)
        moved, stayed = (
            np.bincount(number, ~in_reference & ~in_candidate),
            np.bincount(number, in_reference | in_candidate),
        )
        steady = (moved >= t.STEADY) & (moved >= t.STEADY * stayed)
        odd = (in_reference != in_candidate) & steady[number] & (self.open & many)[weights]
        found[weights[odd]] = True
        judged, rows = self.judged, weights[odd]
        judged.rule[rows], judged.limit[rows], judged.surprise[rows] = Rule.UNMOVED, 0.0, np.inf
        judged.siblings[rows] = moved[number[odd]]
        judged.reason[rows] |= np.where(in_reference[odd], Reason.UNMOVED_REFERENCE, Reason.UNMOVED_CANDIDATE)
        return found

    def _is_rounded(self, times: float) -> Bools:
        """Rows that are off by more than so many roundings of each element; the tail of a vector may be off by one."""
        errors, unit = self.errors, times * self.errors.unit
        far = errors.values > unit
        far |= errors.worst > t.WORST * unit
        far |= errors.extremes > t.WORST * unit
        return np.asarray(far | (errors.sums > t.SUMS * unit / errors.root))

    def _keep_tolerance(self, said: Bools) -> None:
        judged, tolerance = self.judged, self.evidence.tolerance
        judged.rule[said], judged.limit[said] = Rule.TOLERANCE, tolerance[said]
        judged.deviation[said], judged.measure[said] = judged.error[said], -1
        with np.errstate(divide="ignore", invalid="ignore"):
            judged.surprise[said] = judged.error[said] / tolerance[said]

    def _doubt_reduced(self) -> None:
        """Leave open micro steps' numbers of which neither the mean nor the sum is the batch's."""
        judged = self.judged
        reduced = (self.evidence.remarks & (Reason.MEAN | Reason.SUM)) > 0
        doubtful = reduced & (judged.verdict == Verdict.DIVERGED) & (judged.rule != Rule.TOLERANCE)
        judged.verdict[doubtful] = Verdict.UNKNOWN
        judged.surprise[doubtful] = np.nan
        judged.reason[doubtful] |= Reason.NO_BATCH

    def _is_rounding(self) -> Bools:
        """Whether a row is off by no more than the rounding of its own call."""
        errors, own = self.errors, self.bases.own
        fits = np.ones(len(self.open), np.bool_)
        for name in MEASURES:
            fits &= ~(errors.measure(name) > t.OWN * own[name])
        return fits

    def _comes_of(self, wrong: Bools) -> Bools:
        """Wrong rows that came of another row that is wrong in the same way."""
        found = np.zeros(len(wrong), np.bool_)
        verdict = self.judged.verdict
        for kinds in ((Verdict.NON_FINITE,), (Verdict.SHAPE, Verdict.DTYPE)):
            spoilt = np.isin(verdict, kinds)
            if spoilt.any():
                found |= spoilt & (self.sources.largest(spoilt.astype(np.float64)) > 0)
        by_bits = wrong & (self.facts.bits_only | (self.evidence.tolerance >= 0))
        if by_bits.any():
            found |= by_bits & (self.sources.largest(wrong.astype(np.float64)) > 0)
        return found

    def _find_victims(self, other: Bools) -> _Past:
        """What has come of rows that are wrong by themselves; `other` are those that seemed right."""
        judged, past = self.judged, self.past
        is_first = not past.reach.has_begun
        origin, other = np.where(self.own, judged.origin, past.origin), np.where(self.own, other, past.other)
        reached = past.reach.find(self.sources, self.own, origin, other)
        tainted = reached.rows | past.tainted
        victims = reached.rows & other & self.own
        if victims.any():
            victims &= self._beyond_clean(tainted) | self.facts.hidden
        judged.verdict[victims] = Verdict.DIVERGED
        victims |= self._blamed_before(reached.again, is_first)
        judged.origin[victims] = False
        judged.reason[victims] |= Reason.VICTIM
        return _Past(self.bases.moved, origin, other, tainted, past.reach)

    def _blamed_before(self, again: Bools, is_first: bool) -> Bools:
        """Origins that have come of another, or are the same value; `again` are those that could have come of one."""
        origin, sources = self.judged.origin, self.sources
        later = origin & (np.arange(len(origin)) > int(np.argmax(origin))) if is_first else origin.copy()
        if not later.any():
            return later
        found = again & (self.judged.surprise > 1) & np.isin(self.judged.rule, BY_SURPRISE)
        if (found & later).any():
            found &= ~self._beyond_all_together()
        # What came from nothing that was recorded may have come of anything before it.
        found |= ~sources.is_explained & self.sources.is_unit(Producer.CALL, Producer.CODE, Producer.GRADIENT)
        bad = np.append(np.isin(self.judged.verdict, BAD), False)
        return np.asarray(later & (found | bad[sources.seen_before]))

    def _beyond_all_together(self) -> Bools:
        """Rows that are further off than what they came from explains, if that is off in one direction.

        Rounding averages out in sums, and what has come of a fault does not.
        """
        found, bases = np.zeros(len(self.open), np.bool_), self.bases
        for name in MEASURES:
            whole = np.hypot(np.maximum(bases.given[name], bases.element), bases.own[name])
            found |= self.errors.measure(name) > np.fmax(t.GAIN[name], self.allowed[name]) * whole
        return found

    def _beyond_clean(self, tainted: Bools) -> Bools:
        """Rows that are further off than what they came from explains, if nothing tainted counts."""
        clean = self.errors.without(tainted)
        found = np.zeros(len(tainted), np.bool_)
        bases = find_bases(clean, self.sources, self.bases.moved)
        for name in MEASURES:
            allowed = np.fmax(t.GAIN[name], self.allowed[name])
            found |= self.errors.measure(name) > allowed * bases.whole[name]
        return found

    def _carry(self, rows: Ints) -> None:
        """What was seen before is as right or wrong as it was there, and is not blamed here."""
        judged = self.judged
        rows = rows[self.open[rows] & (judged.rule[rows] != Rule.TOLERANCE)]
        source = self.sources.carried_from[rows]
        agree = np.isin(judged.verdict[source], AGREEING)
        judged.verdict[rows] = np.where(
            self.identical[source], Verdict.DRIFTING, np.where(agree, judged.verdict[source], Verdict.DIVERGED)
        )
        judged.verdict[rows[self.facts.nonfinite[rows]]] = Verdict.NON_FINITE
        for column in (judged.measure, judged.deviation, judged.limit, judged.given, judged.siblings):
            column[rows] = column[source]
        judged.surprise[rows] = np.nan
        judged.rule[rows] = Rule.CARRIED
        judged.origin[rows] = False
        judged.reason[rows] |= judged.reason[source] & (Reason.VICTIM | Reason.CHOSEN)
