"""Has the calls replayed on which the verdicts of a rank depend, in both runs, and says what that settles.

Reads the judged pairs of one rank, feeds `rank`, which judges them again. Only calls of what is wrong by itself or
nearly so are replayed, and only where both runs kept values; a comparison that finds nothing of the kind imports no
framework. Replays change verdicts only where they prove a call wrong: then what others only passed on is cleared.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from astray.comparison.blame.suspects import most_surprising
from astray.comparison.blame.weights import has_role
from astray.comparison.judge import Settled
from astray.comparison.judge.replays import (
    CallReplay,
    NotReplayedError,
    RankReplayer,
    ReplayedPair,
    Sides,
    find_out,
    own_share,
)
from astray.comparison.rows import Bools
from astray.comparison.verdict import AGREEING, RULES, Reason, Rule, Verdict
from astray.graph import Graph, graph_of
from astray.store import RankRun, Table

Calls = tuple[int, int]
"""A call that both runs make, by its rows in the tables of reference and candidate."""

MOST_CALLS = 24
"""Calls of a rank that are replayed, in each run: the ten suspects, some origins, and what made their inputs. Each
takes less than a second but for the largest, so that all take less than reading the values of a rank that has many."""

MOST_ORIGINS = 8
"""Of the rows that are wrong by themselves so many, the earliest, come before the suspects."""

MOST_INSIDE = 4
"""Of the calls inside of a module that cannot be replayed itself so many, the most surprising ones."""

MOST_ROUNDS = 4
"""How often a rank is judged again: what one round clears may show what it had hidden."""

SUSPICIOUS = 0.125
"""The least surprise for which a call is replayed. A call may be off by eight of its roundings, and two right kernels
are half a rounding off each."""

_REASONS = {
    "candidate": Reason.REPLAYED_CANDIDATE,
    "reference": Reason.REPLAYED_REFERENCE,
    "inputs": Reason.CAME_IN,
}


class Replays:
    """The replays of one rank of two runs: `pairs` has what they say, by row; `settled` what follows for verdicts.

    replayer: the dotted name of a `CallReplayer`, "package.module:name". It is imported when it is first needed.
    """

    def __init__(self, replayer: str, reference: RankRun, candidate: RankRun, rows: int) -> None:
        self._name = replayer
        self._runs = (reference, candidate)
        self._calls: dict[Calls, tuple[CallReplay, CallReplay] | str] = {}
        self._settled = Settled.nothing(rows)
        self.pairs: dict[int, ReplayedPair] = {}

    @property
    def settled(self) -> Settled:
        """What follows for verdicts. A call is cleared only where another one is proven wrong.

        Else what came in with inputs that agree may have begun where nothing was recorded, and the call that shows it
        is the best that is known.
        """
        return self._settled if self._settled.wrong.any() else self._settled._replace(right=self._settled.wrong)

    def look_at(self, pairs: Table, origins: Sequence[int], progress: Callable[[int, int], None]) -> bool:
        """Replay the calls of origins and suspects that have not been replayed yet. Whether that proves one wrong."""
        sight = _Pairs(pairs, *self._runs)
        suspects = most_surprising(pairs, SUSPICIOUS, sight.by_values & has_role(pairs, "output", "gradient"))
        waiting = deque([*origins[:MOST_ORIGINS], *suspects, *origins[MOST_ORIGINS:]])
        seen: set[int] = set()
        proven = False
        while waiting:
            progress(len(seen), len(seen) + len(waiting))
            row = waiting.popleft()
            if row in seen or not sight.by_values[row]:
                continue
            seen.add(row)
            for calls in sight.calls_that_made(row):
                if calls not in self._calls and self._count < MOST_CALLS:
                    proven |= self._replay(sight, calls)
            if sight.surprise[row] > 1 and row in self.pairs and self.pairs[row].finding == "inputs":
                waiting.extendleft(sight.made_inputs_of(row)[::-1])
        return proven

    @property
    def _count(self) -> int:
        return sum(not isinstance(replayed, str) for replayed in self._calls.values())

    def _replay(self, sight: _Pairs, calls: Calls) -> bool:
        """Replay a call of both runs. Whether that proves a result wrong."""
        replayed = self._calls[calls] = self._both(calls)
        proven = False
        for row in sight.results_of(calls):
            if isinstance(replayed, str):
                self.pairs[row] = ReplayedPair("not replayed", reason=replayed)
            elif (found := _of_row(sight, row, calls, *replayed)) is not None:
                self.pairs[row] = found
                proven |= self._settle(sight, row, found)
        return proven

    def _settle(self, sight: _Pairs, row: int, found: ReplayedPair) -> bool:
        wrong, right = (
            found.finding in ("candidate", "reference"),
            found.finding == "inputs" and sight.surprise[row] > 1,
        )
        if not sight.may_be_settled[row] or not (wrong or right):
            return False
        self._settled.wrong[row], self._settled.right[row] = wrong, right
        self._settled.surprise[row] = found.surprise
        self._settled.reason[row] = _REASONS[found.finding]
        return wrong

    def _both(self, calls: Calls) -> tuple[CallReplay, CallReplay] | str:
        """A call of both runs; the reason where one of them cannot be replayed."""
        try:
            reference, candidate = (replay(call) for replay, call in zip(self._replayers, calls, strict=True))
        except NotReplayedError as error:
            return str(error)
        return reference, candidate

    @cached_property
    def _replayers(self) -> tuple[RankReplayer, RankReplayer]:
        module, _, name = self._name.partition(":")
        try:
            make: Any = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise NotReplayedError(f"it takes {error.name}, which is not installed here") from None
        return make(self._runs[0]), make(self._runs[1])


def _of_row(sight: _Pairs, row: int, calls: Calls, reference: CallReplay, candidate: CallReplay) -> ReplayedPair | None:
    """What the replays of a call say of one of its results; None where that was not replayed."""
    rows = sight.rows(row)
    results = reference.results.get(rows[0]), candidate.results.get(rows[1])
    if results[0] is None or results[1] is None:
        return None
    alike = reference.computes_like(candidate) and sight.are_alike(calls, row)

    def share() -> float:
        if not sight.surprise[row] > 1:  # it would settle nothing, and takes another execution
            return math.inf
        try:
            sides = Sides(*reference.values(rows[0]), *candidate.values(rows[1]))
        except NotReplayedError:
            return math.inf
        return own_share(sides, *sight.measured_by(row))

    return find_out(results[0], results[1], alike, share)


class _Pairs:
    """The judged pairs of a rank, with the graphs of both runs."""

    def __init__(self, pairs: Table, reference: RankRun, candidate: RankRun) -> None:
        self._pairs = pairs
        self._runs = reference, candidate
        self._graphs: tuple[Graph, Graph] = graph_of(reference), graph_of(candidate)
        self._row = pairs.numbers("row_reference"), pairs.numbers("row_candidate")
        self._call = pairs.numbers("call_reference"), pairs.numbers("call_candidate")
        verdict = pairs.coded("verdict").codes
        self._identical = verdict == Verdict.IDENTICAL
        self.surprise = pairs.numbers("surprise")
        source = pairs.coded("source")
        self.by_values: Bools = source.codes == source.code("values")
        rule = pairs.coded("rule")
        # A tolerance is the user's word. What is not finite, or of another form, no rounding explains.
        self.may_be_settled: Bools = (rule.codes != rule.code(RULES[Rule.TOLERANCE])) & np.isin(
            verdict, (Verdict.ROUNDING, Verdict.DRIFTING, Verdict.DIVERGED)
        )

    def rows(self, row: int) -> tuple[int, int]:
        """A pair's rows in the tables of tensors of both runs."""
        return int(self._row[0][row]), int(self._row[1][row])

    def measured_by(self, row: int) -> tuple[str, float, float]:
        """By what measure a row is furthest off, and in which slice."""
        dim, index = (float(self._pairs.numbers(name)[row]) for name in ("slice_dim", "slice_index"))
        return self._pairs["measure"][row] or "", dim, index

    # -- which calls ---------------------------------------------------------------------------------------------------

    def calls_that_made(self, row: int) -> Iterator[Calls]:
        """The calls that made what a row shows, the innermost first. A module that is no leaf is represented by calls
        inside of it."""
        calls = dict.fromkeys(self._forward(maker) for maker in self._shown_by(row))
        yield from (each for each in calls if min(each) >= 0)  # a torn run may lack a forward call
        if self._pairs["kind"][row] == "module" and len(calls) == 1 and self._is_result(row):
            yield from self._inside(row)

    def made_inputs_of(self, row: int) -> list[int]:
        """The results that a result's call was given, where both runs made them by the same call and they differ."""
        matched = (self._row[0] >= 0) & (self._row[1] >= 0)
        inputs = np.flatnonzero(self._any_of(self._forward(row), row) & self._takes & ~self._identical & matched)
        return [made for each in inputs.tolist() for made in self._shown_by(each)[:1] if made < row]

    def _shown_by(self, row: int) -> list[int]:
        """The results that are the same value in both runs, in order of observation: that of the innermost call first.

        The row itself is one, if it is a result.
        """
        rows = self.rows(row)
        made = [int(graph.maker[shown]) for graph, shown in zip(self._graphs, rows, strict=True)]
        found = np.zeros(len(self._pairs), np.bool_)
        if min(made) >= 0:
            found = (self._row[0] >= 0) & (self._row[1] >= 0)
            for graph, of_row, maker in zip(self._graphs, self._row, made, strict=True):
                found &= (graph.maker[of_row] == maker) & ~graph.takes[of_row]
        found[row] = self._is_result(row)
        return np.flatnonzero(found).tolist()

    def _is_result(self, row: int) -> bool:
        return bool(self._pairs["role"][row] == "output")

    def _forward(self, row: int) -> Calls:
        """The forward calls of a row's calls."""
        found = []
        for graph, calls in zip(self._graphs, self._call, strict=True):
            call = int(calls[row])
            is_backward = call >= 0 and graph.is_backward[call] and not graph.is_op[call]
            found.append(int(graph.parent[call]) if is_backward else call)
        return found[0], found[1]

    def _inside(self, row: int) -> list[Calls]:
        """The most surprising calls inside of a module's call."""
        graph = self._graphs[0]
        waiting, calls = [int(self._call[0][row])], list[int]()
        while waiting:
            inner = graph.children(waiting.pop()).tolist()
            calls += inner
            waiting += inner
        rows = np.flatnonzero(np.isin(self._call[0], calls) & self.by_values & (self.surprise > 0))
        rows = rows[np.argsort(-self.surprise[rows], kind="stable")]
        calls_inside = dict.fromkeys(self._forward(each) for each in rows.tolist() if self._is_result(each))
        return [each for each in calls_inside if min(each) >= 0][:MOST_INSIDE]

    def results_of(self, calls: Calls) -> list[int]:
        """The rows of what a forward call gave, and of the gradients that it sent."""
        rows = np.flatnonzero(self._is_of(calls))
        return [row for row in rows.tolist() if self._is_result(row) and not self._identical[row]]

    def _is_of(self, calls: Calls) -> Bools:
        """Rows of a forward call or of its backward."""
        found = np.ones(len(self._pairs), np.bool_)
        for graph, of_row, call in zip(self._graphs, self._call, calls, strict=True):
            backward = np.flatnonzero(graph.is_backward & ~graph.is_op & (graph.parent == call))
            found &= np.isin(of_row, [call, *backward.tolist()])
        return found

    # -- whether both runs made the same call --------------------------------------------------------------------------

    def are_alike(self, calls: Calls, row: int) -> bool:
        """Whether both runs called the same with the same arguments, but for values of tensors that agree.

        Of a gradient the arguments are those of the forward call, and what arrived at its results.
        """
        reference, candidate = (
            (run.calls["type"][call], run.calls["args"][call], _settings(run, call))
            for run, call in zip(self._runs, calls, strict=True)
        )
        if reference != candidate or reference[1] is None:
            return False
        inputs = np.flatnonzero(self._any_of(calls, row) & self._takes)
        agree = self._identical[inputs] | self._pass_on_differences[inputs]
        return bool(len(inputs) and agree.all())

    def _any_of(self, calls: Calls, row: int) -> Bools:
        """Rows of a forward call, or of the call of `row`, in either run."""
        own = (int(self._call[0][row]), int(self._call[1][row]))
        found = np.zeros(len(self._pairs), np.bool_)
        for of_row, call, of_own in zip(self._call, calls, own, strict=True):
            found |= np.isin(of_row, [call, of_own])
        return found

    @cached_property
    def _takes(self) -> Bools:
        role = self._pairs.coded("role")
        return np.isin(role.codes, [role.code(name) for name in ("input", "parameter", "state")])

    @cached_property
    def _pass_on_differences(self) -> Bools:
        """Rows that agree, by their values, and are floats: other numbers do not differ by rounding."""
        found = self.by_values & np.isin(self._pairs.coded("verdict").codes, AGREEING)
        for run, rows in zip(self._runs, self._row, strict=True):
            dtype = run.tensors.coded("dtype")
            is_float = np.array([*("float" in name for name in dtype.values), False])
            found &= is_float[np.append(dtype.codes, -1)[rows]]
        return found


def _settings(run: RankRun, call: int) -> dict[str, Any]:
    """What a module was set to at a call."""
    found: dict[str, Any] = {}
    if run.calls["kind"][call] == "module":
        site, step = run.calls["site"][call], run.calls["step"][call]
        for setup in run.setup:
            if setup.subject == "module" and setup.site == site and setup.step <= step:
                found |= setup.values
    return found
