"""The graph of one rank: its call tree, and for every row where its value came from and where it went."""

from __future__ import annotations

import weakref
from functools import cached_property

import numpy as np

from astray.graph.calls import NO_ROW, Ints
from astray.graph.flow import ValueFlow
from astray.graph.keys import one_key
from astray.store import RankRun

MOST = 64
"""So many earlier results, the last ones, count as sources of what unrecorded code made."""


class Graph(ValueFlow):
    """What made, gave, encloses and follows what. Calls and tensors are named by their row in the rank's two tables.

    >>> graph = graph_of(astray.open("runs/a").ranks[0])
    >>> row = 15  # the input of `out`
    >>> graph.producer[row], graph.source_call[row]  # the result of `add` that it is
    (14, 5)
    >>> graph.consumers(14).tolist()  # `out` takes it, and `linear` inside
    [15, 18]
    >>> graph.around(graph.source_call[row])  # `add` was called by the code of the model itself
    [1]
    """

    # -- of single rows ----------------------------------------------------------------------------------------------

    def rows_of(self, call: int) -> Ints:
        """The tensors of a call."""
        return self._rows_of(call)

    def results(self, call: int) -> Ints:
        """The tensors that a call gives."""
        rows = self._rows_of(call)
        return rows[~self.takes[rows]]

    def inputs(self, call: int) -> Ints:
        """The tensors that a call takes, its weights and buffers among them."""
        rows = self._rows_of(call)
        return rows[self.takes[rows]]

    def given(self, call: int) -> Ints:
        """The inputs, with the weights that were recorded at another call of this site: a step records them once."""
        place = int(self._places[call])
        return np.unique(np.concatenate([self.inputs(call), self._weights_at(place)]))

    def children(self, call: int) -> Ints:
        """The calls right inside of a call, those of its own phase; of −1, the outermost ones."""
        return self._children_of(call)

    def sightings(self, row: int) -> Ints:
        """All rows that show this value, in the order of observation."""
        return self._shown_in(int(self._flows[row]))

    def consumers(self, row: int) -> Ints:
        """The rows of calls that take this value from here on."""
        found = self.sightings(row)
        return found[(found > row) & self.takes[found]]

    def contributors(self, row: int) -> Ints:
        """What makes up the gradient that arrives at the result of a forward call: the results of its users' backward
        calls.

        A value that several calls have used gets a gradient from each, and they are added up where no call is recorded.
        Calls that lie inside of another user are left out: their shares are in that one's.
        """
        call = int(self.call_rows[row])
        if call < 0:  # the row of its call is missing
            return np.empty(0, np.int64)
        forward = int(self.parent[call]) if self.is_backward[call] and not self.is_op[call] else NO_ROW
        if forward < 0:
            return self.producer[[row]][self.producer[[row]] >= 0]
        path = self.tensors.coded("path").codes
        results = self.results(forward)
        users = [
            user for result in results[path[results] == path[row]] for user in self.consumers(int(result)).tolist()
        ]
        calls = {int(self.call_rows[user]) for user in users}
        outermost = [user for user in users if calls.isdisjoint(self.around(int(self.call_rows[user])))]
        shares = [
            share
            for user in outermost
            if self.is_forward[self.call_rows[user]] and (backward := self.backward[self.call_rows[user]]) >= 0
            for share in self.results(int(backward)).tolist()
            if path[share] == path[user]
        ]
        return np.array(sorted(set(shares)) or self.producer[[row]][self.producer[[row]] >= 0], np.int64)

    def explains(self, row: int) -> Ints:
        """The rows from which this one may have come, in the order of observation.

        Of a value that was seen before, the result that made it, or else the first call that was given it. Of one that
        nothing recorded has made, whatever the code around could have made it of: what the enclosing call was given,
        and the results of calls inside it that were seen before (the last `MOST`). Of a result, what its call was
        given, and the results of the calls inside; in the backward phase that includes what its forward call was given.
        """
        call, first = int(self.call_rows[row]), int(self.first_seen[row])
        if call < 0 or first < row:
            return np.array([first][: first < row], np.int64)
        if self.is_gradient[call]:
            return self._explains_gradient(row, call)
        found = self._explains_input(row, call) if self._is_given[row] else self._explains_result(row, call)
        return np.unique(found)

    # -- how they are found ------------------------------------------------------------------------------------------

    def _explains_input(self, row: int, call: int) -> Ints:
        if self.tensors["role"][row] in ("parameter", "state"):
            return np.empty(0, np.int64)  # a weight that was there before
        shares = self.contributors(row) if self.is_backward[call] else np.empty(0, np.int64)
        if len(shares) and self.has_functions:  # else code between the modules may have used it, too
            return shares
        if not self.is_forward[call] and not self.is_backward[call] and len(same := self._gradients(call, row)):
            return same[-1:]
        outer = int(self.enclosings[call])
        given = self.given(outer) if outer >= 0 else np.empty(0, np.int64)
        return np.concatenate([shares, given[given < row], self._made_inside(outer, row, call)])

    def _explains_result(self, row: int, call: int) -> Ints:
        given = [self.given(call), self._made_inside(call, row, call)]
        if self.is_backward[call] and not self.is_op[call] and self.parent[call] >= 0:
            given.append(self.given(int(self.parent[call])))
        found = np.concatenate(given)
        return found if len(found) else self._gradients(call, row)[-1:]

    def _explains_gradient(self, row: int, call: int) -> Ints:
        """Of a sum over micro steps what was added and what was there; else what arrives at the module and is in it."""
        before = self._gradients(call, row)
        if len(before) and np.any(self.call_rows[before] == call):
            return before[-2:]
        owner = int(self.owners[call])
        arriving = [] if owner < 0 or self.backward[owner] < 0 else [self.inputs(int(self.backward[owner]))]
        given = [] if owner < 0 else [self.given(owner)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *given, *arriving]))

    def _gradients(self, call: int, row: int) -> Ints:
        """The gradients of a parameter that were seen before, in the same step, given a call at its site."""
        sites, steps = self.calls.coded("site").codes, self.calls.numbers("step")
        same = np.flatnonzero(self.is_gradient & (sites == sites[call]) & (steps == steps[call]))
        rows = np.concatenate([np.empty(0, np.int64), *(self.results(one) for one in same.tolist())])
        return np.sort(rows[rows < row])

    def _made_inside(self, outer: int, row: int, call: int) -> Ints:
        """The last results before a row of the calls right inside of a call; of −1, of its step and phase."""
        inside = self.children(outer)
        if outer < 0:
            same = [self.calls.coded("phase").codes, self.calls.numbers("step")]
            same += [self.calls.numbers("micro")] if self.is_backward[call] else []
            inside = inside[np.all([column[inside] == column[call] for column in same], axis=0)]
        before = self._first_result[inside] < row
        near = inside[before & (inside != call)][-MOST:]
        rows = np.concatenate([np.empty(0, np.int64), *(self.results(one) for one in near.tolist())])
        return np.sort(rows[rows < row])[-MOST:]

    @cached_property
    def _first_result(self) -> Ints:
        """For each call the first of its results, one behind all rows where there is none."""
        found = np.full(len(self.calls) + 1, len(self.takes))
        rows = np.flatnonzero(~self.takes)[::-1]
        found[self.call_rows[rows]] = rows
        return found[:-1]

    @cached_property
    def _shown_in(self) -> _Groups:
        return _Groups(self._flows)

    @cached_property
    def _places(self) -> Ints:
        """One number for each site in each step."""
        return one_key([self.calls.numbers("step"), self.calls.coded("site").codes])

    @cached_property
    def _weights_at(self) -> _Groups:
        place = np.append(self._places, NO_ROW)[self.call_rows]
        of_module = np.append(self.is_forward & self._is("kind", "module"), False)[self.call_rows]
        role = self.tensors.coded("role")
        weights = np.isin(role.codes, [role.code("parameter"), role.code("state")]) & of_module
        return _Groups(np.where(weights, place, NO_ROW))

    @cached_property
    def _rows_of(self) -> _Groups:
        return _Groups(self.call_rows)

    @cached_property
    def _children_of(self) -> _Groups:
        return _Groups(np.where(self.is_gradient, len(self.calls), self.enclosings))


class _Groups:
    """Finds the places of a number among many."""

    def __init__(self, numbers: Ints) -> None:
        self._order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[self._order]

    def __call__(self, number: int) -> Ints:
        begin, end = np.searchsorted(self._sorted, [number, number + 1])
        return self._order[begin:end]


_GRAPHS: weakref.WeakKeyDictionary[RankRun, Graph] = weakref.WeakKeyDictionary()


def graph_of(run: RankRun) -> Graph:
    """The graph of a rank, built when it is first asked for and kept for as long as the rank is."""
    found = _GRAPHS.get(run)
    if found is None:
        found = _GRAPHS[run] = Graph(run.calls, run.tensors, run.call_rows)
    return found
