"""Every place where something went wrong by itself: results that are wrong though all that they came from was right.

`first` is one of them. Others follow where a part of the program is out of its reach: another branch, another rank's
data, a step for which the weights were loaded anew. To be listed, a call must be beyond doubt: its inputs and weights
agree without drift, its result is off by far more than rounding, no call inside it can be blamed instead, and in
backward nothing of its forward was wrong. What cannot be told from a victim is not listed.
"""

from __future__ import annotations

import numpy as np

from astray.compare.keys import one_key
from astray.compare.rows import Bools, Ints
from astray.compare.verdict import AGREEING, Verdict
from astray.compare.weights import GIVEN
from astray.graph import graph_of
from astray.store import RankRun, Table

FAR = 10
"""So many times beyond its limit a result must be: less may come from inputs that are off by a little."""

SURE = (Verdict.IDENTICAL, Verdict.ROUNDING)


def find_origins(pairs: Table, bad: Bools, run: RankRun) -> Ints:
    """The rows of results that went wrong by themselves, in order of observation; `pairs` are those of one rank."""
    return _Calls(pairs, bad, run).origins()


def healed(pairs: Table, bad: Bools, run: RankRun) -> Bools:
    """Wrong rows inside a forward call that computes the same result in another way, as other shapes or calls show."""
    calls = _Calls(pairs, bad, run)
    verdict = pairs.coded("verdict").codes
    agrees = calls.has(calls.is_result & np.isin(verdict, AGREEING)) & ~calls.has(bad & calls.is_result)
    otherwise = calls.has(np.isin(verdict, (Verdict.SHAPE, Verdict.ONLY_IN_REFERENCE)))
    agrees &= calls.around(np.flatnonzero(otherwise & ~calls.backward)) & ~calls.backward
    inside = np.zeros(calls.count, np.bool_)
    outer, at = calls.parent.copy(), np.flatnonzero(~calls.backward)
    while len(at):
        at = at[outer[at] >= 0]
        inside[at] |= agrees[outer[at]]
        at = at[~inside[at]]
        outer[at] = calls.parent[outer[at]]
    known = calls.of_row >= 0
    found = np.zeros(len(bad), np.bool_)
    found[known] = inside[calls.of_row[known]]
    return found & bad & ~calls.is_given


class _Calls:
    """What is known of each call of the reference: which of its tensors are wrong, and whose fault that can be."""

    def __init__(self, pairs: Table, bad: Bools, run: RankRun) -> None:
        self.pairs, self.bad, self.run = pairs, bad, run
        self.of_row: Ints = pairs.numbers("call_reference")
        self.count = len(run.calls)
        role = pairs.coded("role")
        self.is_input = np.isin(role.codes, [role.code("input"), *(role.code(name) for name in GIVEN)])
        self.is_given = np.isin(role.codes, [role.code(name) for name in GIVEN])
        self.is_result = np.isin(role.codes, [role.code("output"), role.code("gradient")])
        self.parent = graph_of(run).parent
        self.backward = self._has("phase", "backward")
        self.is_gradient = self._has("kind", "parameter")

    def origins(self) -> Ints:
        far = self._far() & self.is_result & (self.of_row >= 0)
        unsure = ~np.isin(self.pairs.coded("verdict").codes, SURE)
        fed_well = ~self.has(unsure & self.is_input) & self.has(self.is_input)
        fed_well[self.is_gradient] = True  # the gradient of a parameter has no inputs: its module answers for it
        candidates = self.has(far) & fed_well
        rows = np.flatnonzero(far)
        rows = rows[(candidates & ~self._explained(candidates))[self.of_row[rows]]]
        _, first = np.unique(self.of_row[rows], return_index=True)
        return np.sort(rows[first])

    def _far(self) -> Bools:
        """Rows that are wrong by far more than rounding, or by more than a number can say."""
        error, limit = self.pairs.numbers("error"), self.pairs.numbers("limit")
        return np.asarray(self.bad & ~(error <= FAR * limit))

    def _explained(self, candidates: Bools) -> Bools:
        """Calls that are wrong because another one is: one inside, or in backward the forward."""
        wrong, given = self.has(self.bad), self.has(self.bad & self.is_given)
        forward = np.where(self.backward & ~self.is_gradient, self.parent, np.arange(self.count))
        forward[self.is_gradient] = graph_of(self.run).owners[self.is_gradient]
        at = np.maximum(forward, 0)
        ahead, back = ~self.backward, self.backward & ~self.is_gradient
        explained = self._site_is_given_wrong() | (forward < 0)
        explained |= ahead & self.around(np.flatnonzero((candidates | given) & ahead))
        explained |= back & self.around(forward[candidates & back])[at]
        # In backward everything of the forward must be right, and for a weight's gradient its module's backward too.
        explained |= self.backward & self._with_around(np.flatnonzero(wrong & ahead))[at]
        return explained | (self.is_gradient & self._with_around(forward[wrong & back])[at])

    def _with_around(self, calls: Ints) -> Bools:
        return self._mark(calls) | self.around(calls)

    def around(self, calls: Ints) -> Bools:
        """The forward calls around some, without themselves."""
        found = np.zeros(self.count, np.bool_)
        calls = np.unique(calls[calls >= 0])
        while len(calls):
            calls = np.unique(self.parent[calls])
            calls = calls[calls >= 0]
            calls = calls[~found[calls]]
            found[calls] = True
        return found

    def _mark(self, calls: Ints) -> Bools:
        found = np.zeros(self.count, np.bool_)
        found[calls[calls >= 0]] = True
        return found

    def _site_is_given_wrong(self) -> Bools:
        """Calls of a site that had a wrong weight in the same step: it is recorded with the first of them only."""
        calls = self.run.calls
        place = one_key([calls.numbers("step"), calls.coded("site").codes])
        return np.isin(place, place[self.has(self.bad & self.is_given)])

    def has(self, rows: Bools) -> Bools:
        """Calls that have one of these rows."""
        return self._mark(self.of_row[rows & (self.of_row >= 0)])

    def _has(self, column: str, word: str) -> Bools:
        cells = self.run.calls.coded(column)
        return np.asarray(cells.codes == cells.code(word))
