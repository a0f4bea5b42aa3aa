"""Follows weights that rounding has moved (`wandering`) to where the difference vanishes.

A weight whose gradient is zero in exact arithmetic has no influence on the result: a batch norm takes the bias before
it away again, and a softmax what all scores have in common. What was computed with it may be off until then. So the
wrong rows of each step are walked through in order of observation: each must be such a weight, or have come of one. If
what the step comes to agrees, its gradients above all, they are excused. If not there is a fault: then only what is
sure is excused, and the first row that is not is left to blame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from astray.compare.calibration import SAME_TENSOR, Rule
from astray.compare.evidence import Evidence
from astray.compare.kept import Source
from astray.compare.keys import one_key
from astray.compare.reasons import Reason
from astray.compare.rows import Bools, Ints
from astray.compare.verdict import BAD, Judgement, Verdict
from astray.compare.wandering import MOVES, Wandering
from astray.graph import graph_of

SAME_NUMBERS = 1e-9
"""Two norms that differ by less are of the same numbers, added up in another order."""

NEARLY = 1 / 8
"""A weight off by this part of what is allowed has wandered too: rounding an update leaves it far below that."""

USUAL = 4
"""What had an excuse in steps before may be off by so many times as much now: weights wander further and further."""


class Followed(NamedTuple):
    """The pairs that are excused: weights that wandered, and what has come of them."""

    weights: list[int]
    others: list[int]


def follow(evidence: Evidence, judged: Judgement, besides: Bools) -> Followed:
    """What wandering weights explain of the pairs that are wrong; `besides` are those that have another excuse."""
    return _Follower(evidence, judged, besides).found()


def _close(norm: float, other: float) -> bool:
    return abs(norm - other) <= SAME_NUMBERS * norm


class _Numbers(NamedTuple):
    """What two names of one tensor have in common, on both sides; its norms but for their last digits."""

    extremes: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass
class _Trail:
    """What one step has that is off by no fault.

    before: the trail of the step before, whose tensors live on. calls: the rows of calls that were given something of
    it, or have given it from inside; holders: of those that were given a weight. sites: those of the weights. room: the
    most that a weight may be off by.
    """

    before: _Trail | None = None
    calls: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    sites: set[int] = field(default_factory=set)
    room: float = 0.0
    tensors: dict[tuple[float, ...], list[_Numbers]] = field(default_factory=dict)
    weights: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def knows(self, numbers: _Numbers) -> bool:
        """Whether a tensor is on the trail, be it by another name or in another shape."""
        known = [one for trail in self._both for one in trail.tensors.get(numbers.extremes, ())]
        return any(all(map(_close, numbers.norms, one.norms)) for one in known)

    def moves(self, site: int) -> bool:
        """Whether the parameter of this site is one that wandered."""
        return any(site in trail.sites for trail in self._both)

    def add(self, numbers: _Numbers) -> None:
        self.tensors.setdefault(numbers.extremes, []).append(numbers)

    @property
    def _both(self) -> tuple[_Trail, ...]:
        return (self,) if self.before is None else (self, self.before)


class _Follower:
    def __init__(self, evidence: Evidence, judged: Judgement, besides: Bools) -> None:
        assert evidence.reference.run is not None, "pairs have both sides"
        self._evidence, self._judged, self._run = evidence, judged, evidence.reference.run
        self._rows: Ints = evidence.pairs.reference
        self._bad, self._besides = np.isin(judged.verdict, BAD) & ~besides, besides
        self._call: Ints = np.append(evidence.reference.call_row, -1)[self._rows]
        self._update = self._has("phase", "update")
        self._forward = self._has("phase", "forward")
        self._module = self._has("kind", "module")
        # An optimizer brings to its own scale what it is given, gradients that are nothing but rounding as well.
        self._noise = self._update & ((judged.reason & Reason.NEGLIGIBLE) > 0) & ~self._bad
        self._wandering = Wandering(evidence, judged)
        self._known: dict[int, float] = {}  # what had an excuse in steps before, and how far off it was at most
        self._numbers: dict[int, _Numbers] = {}  # of the step

    def found(self) -> Followed:
        """Walk from step to step until something has no excuse. What an update makes belongs to the step after it."""
        steps = np.append(self._evidence.reference.columns["step"], -1)[self._rows] + self._update
        # Where anything else needs an excuse, nobody can say that the step came out right.
        concluded = {*steps[self._has("kind", "parameter")].tolist()} - {*steps[self._besides & ~self._update].tolist()}
        walked = np.flatnonzero((self._judged.verdict != Verdict.IDENTICAL) & (self._rows >= 0))
        found, trail = Followed([], []), None
        for step in np.unique(steps[self._bad]).tolist():
            pairs: Ints = walked[steps[walked] == step]
            # The last update has no step behind it that could show what came of it.
            trail, right = self._step(pairs, trail, step in concluded or bool(self._update[pairs].all()))
            found.weights.extend(trail.weights)
            found.others.extend(trail.others)
            for pair in (*trail.weights, *trail.others):
                key = int(self._key[pair])
                self._known[key] = max(self._known.get(key, 0.0), float(self._judged.error[pair]))
            if not right:
                break
        return found

    def _step(self, pairs: Ints, before: _Trail | None, concluded: bool) -> tuple[_Trail, bool]:
        """The trail through the wrong rows of a step, and whether it is one through all of them."""
        self._numbers = self._read_numbers(pairs)
        if concluded:
            trail, through = self._walk(pairs, before, sure=False)
            if through and not any(self._is_result(pair) for pair in trail.others):
                return trail, True
        return self._walk(pairs, before, sure=True)

    def _walk(self, pairs: Ints, before: _Trail | None, sure: bool) -> tuple[_Trail, bool]:
        """With `sure`, only what needs no proof that the step comes out right."""
        trail = _Trail(before, room=0.0 if before is None else before.room)
        strays = set()
        for pair in pairs[self._strays[pairs]].tolist():  # the update that moved a weight comes before the weight
            if self._is_weight(pair) and self._wandered(pair, sure):
                strays.add(pair)
                trail.add(self._numbers[pair])
                trail.sites.add(self._wandering.site(pair))
                trail.room = max(trail.room, self._wandering.allowance(pair, self._must_be_sure(pair, sure)))
        for pair in pairs.tolist():
            if self._bad[pair]:
                if not self._has_excuse(pair, trail, sure):
                    return trail, False
                (trail.weights if self._is_weight(pair) else trail.others).append(pair)
            elif not (self._noise[pair] or pair in strays or (not sure and self._carries(pair, trail))):
                continue
            self._enter(pair, trail)
        return trail, True

    def _carries(self, pair: int, trail: _Trail) -> bool:
        """Whether what agrees has come of the trail all the same, and may make what comes after it be further off."""
        if not self._forward[pair]:
            return False
        return trail.knows(self._numbers[pair]) or (self._role(pair) == "output" and self._call[pair] in trail.calls)

    def _has_excuse(self, pair: int, trail: _Trail, sure: bool) -> bool:
        if not self._forgivable[pair]:
            return False
        if self._is_weight(pair):
            return self._wandered(pair, sure)
        if trail.knows(self._numbers[pair]):
            return True
        call, role = int(self._call[pair]), self._role(pair)
        if self._update[pair]:
            return role == "output" and (call in trail.calls or trail.moves(int(self._site[call])))
        if not self._forward[pair]:
            return False
        near = self._distance(pair) <= trail.room
        if role == "state":  # no gradient shows what becomes of a buffer
            return call in trail.calls and near
        usual = self._is_usual(pair) and bool(trail.sites)
        if role == "input" and self._wandering.is_vector(pair) and call in trail.calls and near:  # a function's buffer
            return True
        if role == "input":  # made by code of the call around it that nobody observed
            return usual or (not sure and int(self._parents[call]) in trail.calls)
        return usual or (call in trail.calls and (not sure or (call in trail.holders and near)))

    def _enter(self, pair: int, trail: _Trail) -> None:
        """Take a row into the trail, and the calls that it leads into or out of."""
        trail.add(self._numbers[pair])
        call = int(self._call[pair])
        if self._role(pair) != "output":
            trail.calls.add(call)
            if self._is_weight(pair):
                trail.holders.add(call)
        elif self._forward[pair]:
            while (call := int(self._parents[call])) >= 0:
                trail.calls.add(call)

    def _is_result(self, pair: int) -> bool:
        """Whether it is what an outermost module gives."""
        outermost = self._module[pair] and self._parents[self._call[pair]] < 0
        return bool(outermost and self._forward[pair] and self._role(pair) == "output")

    def _is_weight(self, pair: int) -> bool:
        """Whether it is a parameter that is used in a later step than the first."""
        return bool(self._forward[pair] and self._later[pair]) and self._wandering.is_weight(pair)

    def _wandered(self, pair: int, sure: bool) -> bool:
        if self._bad[pair] and not self._forgivable[pair]:
            return False
        allowed = self._wandering.allowance(pair, self._must_be_sure(pair, sure))
        return allowed > 0 and self._distance(pair) <= allowed

    def _must_be_sure(self, pair: int, sure: bool) -> bool:
        return sure and not self._is_usual(pair)

    def _is_usual(self, pair: int) -> bool:
        """Whether the same tensor had an excuse before, and was hardly less off."""
        return bool(self._judged.error[pair] <= USUAL * self._known.get(int(self._key[pair]), 0.0))

    def _distance(self, pair: int) -> float:
        """How far off a pair is in absolute terms, as far as is known."""
        both = [self._evidence.numbers(name, np.array([pair])) for name in MOVES]
        gaps = [abs(float(left[0]) - float(right[0])) for left, right in both]
        return float(np.fmax.reduce([*gaps, float(self._judged.metrics["max_abs"][pair])]))

    def _read_numbers(self, pairs: Ints) -> dict[int, _Numbers]:
        columns = [
            side.tolist() for name in ("min", "max", "count", "l2") for side in self._evidence.numbers(name, pairs)
        ]
        return {
            pair: _Numbers(tuple(numbers[:6]), tuple(numbers[6:]))
            for pair, *numbers in zip(pairs.tolist(), *columns, strict=True)
        }

    def _role(self, pair: int) -> str:
        return str(self._evidence.roles[self._evidence.reference.columns["role"][self._rows[pair]]])

    def _has(self, column: str, word: str) -> Bools:
        """Pairs whose call has this word in a column."""
        cells = self._run.calls.coded(column)
        return np.asarray(np.append(cells.codes == cells.code(word), False)[self._call])

    @cached_property
    def _forgivable(self) -> Bools:
        judged = self._judged
        measured = (judged.source >= Source.STATISTICS) & (judged.rule != Rule.TOLERANCE) & ~np.isnan(judged.error)
        return np.asarray((judged.verdict == Verdict.DIVERGED) & measured)

    @cached_property
    def _strays(self) -> Bools:
        """What is wrong, or nearly: statistics show less of a difference than there is."""
        return np.asarray(self._bad | (self._judged.error > NEARLY * self._judged.limit))

    @cached_property
    def _later(self) -> Bools:
        step = self._evidence.reference.columns["step"]
        return np.append(step > step.min(), False)[self._rows]

    @cached_property
    def _key(self) -> Ints:
        """The same number for what is the same tensor in another step."""
        key = one_key([self._evidence.reference.columns[name] for name in SAME_TENSOR])
        return np.append(key, -1)[self._rows]

    @cached_property
    def _site(self) -> Ints:
        return self._run.calls.coded("site").codes

    @cached_property
    def _parents(self) -> Ints:
        """The row of the call around each call, −1 for none."""
        return graph_of(self._run).parent
