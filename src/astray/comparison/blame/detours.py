"""Finds tensors that only one run has because it computed the same in another way, as eager attention beside SDPA does.

Reads the judged pairs and the graphs of both runs. `find_equivalent_rows` feeds `Comparison.same`: a tensor lies on
such a detour when what was computed with it has been compared and agrees: the result of the call around it, or the
input of a call that took it. A parameter that the other run does not have is never one: it may well be zero today and
matter tomorrow. `healed` feeds `first`: wrong rows inside a call that took a detour to the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.blame.weights import has_role
from astray.comparison.rows import Bools, Ints
from astray.comparison.verdict import AGREEING, BAD, Verdict
from astray.graph import Graph, graph_of
from astray.graph.keys import one_key
from astray.records import ROOT
from astray.store import RankRun, RunData, Table

_OPEN, _AGREES, _WRONG = 0, 1, 2
"""What is known of a call by its results: not compared, agreeing, and not."""


def find_equivalent_rows(pairs: Table, reference: RunData, candidate: RunData) -> Bools:
    """Which pairs are of one run only, and on another way to results that agree."""
    found = np.zeros(len(pairs), np.bool_)
    sides = (("reference", reference, Verdict.ONLY_IN_REFERENCE), ("candidate", candidate, Verdict.ONLY_IN_CANDIDATE))
    verdict, rank = pairs.coded("verdict").codes, pairs.numbers("rank")
    for side, run, only in sides:
        for number, rows in run.ranks.items():
            of_rank = rank == number
            unmatched = np.flatnonzero(of_rank & (verdict == only))
            if not len(unmatched):
                continue
            compared = np.flatnonzero(of_rank & np.isin(verdict, (*AGREEING, *BAD)))
            at = pairs.numbers(f"row_{side}")
            agrees = np.isin(verdict[compared], AGREEING)
            on_detour = _DetourSide(graph_of(rows), at[compared], agrees).on_detour(at[unmatched])
            found[unmatched] = on_detour & ~_unknown_weights(pairs, unmatched, verdict != only)
    return found


def _is_weight(pairs: Table) -> Bools:
    """Rows of parameters, of buffers and of gradients."""
    return has_role(pairs, "parameter", "gradient", "state")


def _unknown_weights(pairs: Table, unmatched: Ints, elsewhere: Bools) -> Bools:
    """Which of some rows are of a parameter that the other run, whose rows are `elsewhere`, does not have at all."""
    weight = _is_weight(pairs)
    found = weight[unmatched]
    if found.any():
        known = set(_names(pairs, np.flatnonzero(elsewhere & weight)))
        found[found] = [name not in known for name in _names(pairs, unmatched[found])]
    return found


def _names(pairs: Table, rows: Ints) -> list[str]:
    """The full names of parameters, whichever call has shown them: a compiled module shows all those inside."""
    site, path = pairs.coded("site"), pairs.coded("path")
    code, which = np.unique(one_key([site.codes[rows], path.codes[rows]]), return_index=True, return_inverse=True)[1:]
    names = []
    for row in rows[code].tolist():
        module, name = str(site[row]), "grad" if path[row] == "added" else str(path[row])  # a share of the same
        names.append(name if module == ROOT else f"{module}.{name}")
    return [names[one] for one in which.reshape(-1).tolist()]


class _DetourSide(NamedTuple):
    """One run: its graph, the rows that were compared, and which of those agree."""

    graph: Graph
    compared: Ints
    agrees: Bools

    def on_detour(self, unmatched: Ints) -> Bools:
        """Which of some rows that the other run does not have led to what agrees."""
        graph, state = self.graph, self._states()
        call = graph.call_rows[unmatched]
        around = np.append(graph.enclosings, -1)
        begin = np.where(graph.takes[unmatched], call, around[call])
        found = _walk(begin, state, around) == _AGREES
        left = np.flatnonzero(~found & np.append(graph.is_backward, False)[call])
        if len(left):  # a model that is given integers sends no gradient back, so its weights decide
            forward = graph.parent[call[left]]
            settled = _walk(forward, state, np.append(graph.outer, -1)) == _AGREES
            found[left] = settled & self._followed_by_gradients(unmatched[left])
        found |= self._is_share_of_gradient(unmatched) | self._is_outside(unmatched)
        return self._with_makers(unmatched, found)

    def _is_share_of_gradient(self, rows: Ints) -> Bools:
        """What a backward pass added to a gradient that agrees: zeros were there before, in one run only."""
        graph = self.graph
        role, path, site = (
            graph.tensors.coded("role"), graph.tensors.coded("path"), graph.calls.coded("site"),
        )  # fmt: skip
        places = one_key([graph.calls.numbers("step"), graph.calls.numbers("micro"), site.codes])
        place = np.append(places, -1)[graph.call_rows]
        gradient = role.codes == role.code("gradient")
        accumulated = self.compared[self.agrees]
        accumulated = accumulated[(gradient & (path.codes == path.code("grad")))[accumulated]]
        added = (gradient & (path.codes == path.code("added")))[rows]
        return np.asarray(added & np.isin(place[rows], place[accumulated]))

    def _is_outside(self, rows: Ints) -> Bools:
        """Of calls outside of every module, such as those of a loss, where the gradients agree that they gave.

        Those are the gradients that arrive at the outermost modules in the same micro step.
        """
        graph = self.graph
        kind, site = graph.calls.coded("kind"), graph.calls.coded("site")
        is_outside = np.array([*(str(name).startswith("/") for name in site.values), False])[site.codes]
        outermost = graph.is_backward & (kind.codes == kind.code("module"))
        outermost &= np.append(graph.outer, -1)[graph.parent] < 0
        place = np.append(one_key([graph.calls.numbers("step"), graph.calls.numbers("micro")]), -1)[graph.call_rows]
        arriving = np.append(outermost, False)[graph.call_rows[self.compared]] & graph.takes[self.compared]
        agreeing, wrong = (place[self.compared[arriving & side]] for side in (self.agrees, ~self.agrees))
        return np.append(is_outside, False)[graph.call_rows[rows]] & np.isin(place[rows], np.setdiff1d(agreeing, wrong))

    def _states(self) -> Ints:
        """What is known of each call by its results; one more for no call."""
        graph = self.graph
        state = np.zeros(len(graph.calls) + 1, np.int8)
        results = ~graph.takes[self.compared]
        call = graph.call_rows[self.compared]
        state[call[results & self.agrees]] = _AGREES
        state[call[results & ~self.agrees]] = _WRONG
        state[-1] = _OPEN
        return state

    def _followed_by_gradients(self, rows: Ints) -> Bools:
        """Whether later rows of the same backward pass agree."""
        graph = self.graph
        rows_that_agree = self.compared[self.agrees]
        back = np.append(graph.is_backward | graph.is_gradient, False)
        rows_that_agree = rows_that_agree[back[graph.call_rows[rows_that_agree]]]
        step = np.append(graph.calls.numbers("step"), -1)
        last: dict[int, int] = {}
        for row in np.sort(rows_that_agree).tolist():
            last[int(step[graph.call_rows[row]])] = row
        steps = step[graph.call_rows[rows]].tolist()
        return np.array([last.get(one, -1) > row for one, row in zip(steps, rows.tolist(), strict=True)], np.bool_)

    def _with_makers(self, unmatched: Ints, is_detour: Bools) -> Bools:
        """And those whose results were taken, directly or through others, by what agrees."""
        graph = self.graph
        fine = np.zeros(len(graph.takes), np.bool_)
        fine[self.compared[self.agrees]] = True
        fine[unmatched[is_detour]] = True
        is_unmatched = np.zeros(len(graph.takes), np.bool_)
        is_unmatched[unmatched] = True
        calls = np.append(np.zeros(len(graph.calls), np.bool_), False)
        taken = np.flatnonzero(fine & graph.takes & (graph.producer >= 0))
        while len(taken):
            made = graph.producer[taken]
            call = np.unique(graph.call_rows[made[is_unmatched[made] & ~fine[made]]])
            call = call[call >= 0]
            calls[call] = True
            new = np.flatnonzero(is_unmatched & ~fine & calls[graph.call_rows])
            fine[new] = True
            taken = new[graph.takes[new] & (graph.producer[new] >= 0)]
        return fine[unmatched]


def _walk(begin: Ints, state: Ints, around: Ints) -> Ints:
    """The state of the nearest call from `begin` outward of which anything was compared."""
    at = begin.copy()
    going = np.flatnonzero((at >= 0) & (state[at] == _OPEN))
    while len(going):
        at[going] = around[at[going]]
        going = going[(at[going] >= 0) & (state[at[going]] == _OPEN)]
    return np.where(at >= 0, state[at], _OPEN)


def healed(pairs: Table, bad: Bools, run: RankRun) -> Bools:
    """Wrong rows right inside a forward call that computes the same result in another way, as other calls show."""
    call = pairs.numbers("call_reference")
    role, verdict, phase = pairs.coded("role"), pairs.coded("verdict").codes, run.calls.coded("phase")
    parent = graph_of(run).parent
    forward = phase.codes != phase.code("backward")
    is_result = np.isin(role.codes, [role.code("output"), role.code("gradient")])
    is_given = np.isin(role.codes, [role.code("parameter"), role.code("state")])

    def has(rows: Bools) -> Bools:
        found = np.zeros(len(run.calls), np.bool_)
        found[call[rows & (call >= 0)]] = True
        return found

    agrees = has(is_result & np.isin(verdict, AGREEING)) & ~has(bad & is_result)
    missing = has(np.ones(len(bad), np.bool_)) & ~has(verdict != Verdict.ONLY_IN_REFERENCE)
    otherwise = np.unique(parent[(missing | has(verdict == Verdict.SHAPE)) & forward])
    contains = np.zeros(len(run.calls), np.bool_)
    contains[otherwise[otherwise >= 0]] = True
    agrees &= contains & forward
    inside = forward & np.append(agrees, False)[parent]
    known = call >= 0
    found = np.zeros(len(bad), np.bool_)
    found[known] = inside[call[known]]
    return found & bad & ~is_given
