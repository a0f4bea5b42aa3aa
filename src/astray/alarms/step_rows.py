"""The rows of one step of one rank, as the search for an origin reads them.

Takes the two tables as the readers of `store` give them, or as they lie in memory while a program runs: only the rows
of the step, tensors in the order of observation. Calls and tensors are named by their row in these tables.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.record import ROOT, Statistics
from astray.store import RankRun, Table

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]

NO_ROW = -1

_LEVELS = {"op": 0, "function": 1, "collective": 1, "module": 2}
_OUTERMOST = 3  # of parameters, optimizers and what a program saves itself: all that is computed lies inside them
_OF_NOTHING = Statistics(None, None, None, None, None, None, 0, 0, 0, 0)


class StepRows:
    """One step of one rank: `calls` and `tensors` hold its rows and no others."""

    def __init__(self, calls: Table, tensors: Table) -> None:
        self.calls, self.tensors = calls, tensors
        self._row_of = {seq: row for row, seq in enumerate(calls.numbers("seq").tolist())}
        lookup = self._row_of.get
        self.call_of = [lookup(seq, NO_ROW) for seq in tensors.numbers("seq").tolist()]
        self.nan, self.inf = (tensors.numbers(name) for name in ("nan", "inf"))
        self.sizes = tensors.numbers("count")
        self.kinds = _words(calls, "kind")
        self.phases = _words(calls, "phase")
        self.sites = _words(calls, "site")
        self.types = _words(calls, "type")
        self.roles = _words(tensors, "role")
        self.paths = _words(tensors, "path")
        self.parents = [lookup(seq, NO_ROW) for seq in calls.numbers("parent").tolist()]

    @classmethod
    def of(cls, run: RankRun, step: int) -> StepRows:
        """A step of a rank that was recorded."""
        wanted = run.calls.numbers("step") == step
        known = run.call_rows >= 0
        return cls(run.calls.take(wanted), run.tensors.take(known & wanted[run.call_rows]))

    @cached_property
    def bad(self) -> list[int]:
        """The tensors that hold NaN or infinity, in the order of observation."""
        known = np.asarray(self.call_of, np.int64) >= 0
        rows: list[int] = np.flatnonzero(((self.nan > 0) | (self.inf > 0)) & known).tolist()
        return rows

    @cached_property
    def fine(self) -> bool:
        """Whether functions or ops are recorded, so that nothing is computed unseen between two calls."""
        return any(kind in ("function", "op") for kind in self.kinds)

    @cached_property
    def rows_of(self) -> dict[int, list[int]]:
        """The tensors of each call."""
        found: dict[int, list[int]] = {}
        for row, call in enumerate(self.call_of):
            found.setdefault(call, []).append(row)
        return found

    @cached_property
    def backward_of(self) -> dict[int, int]:
        """The backward call of each forward call that has one; a backward op belongs to no forward call."""
        return {
            parent: call
            for call, parent in enumerate(self.parents)
            if parent >= 0 and self.phases[call] == "backward" and self.kinds[call] != "op"
        }

    def goes_in(self, row: int) -> bool:
        """Whether the call takes this tensor; what it gives are outputs and gradients."""
        return self.roles[row] in ("input", "parameter", "state")

    def level(self, call: int) -> int:
        """How far out calls of this kind lie: ops inside functions, functions inside modules."""
        return _LEVELS.get(self.kinds[call], _OUTERMOST)

    def identity(self, row: int) -> Hashable | None:
        """What two sightings of one tensor share: its bits. A view in another shape has the same."""
        if not self.tensors.valid("fingerprint")[row]:
            return None
        print_ = int(self.tensors.numbers("fingerprint")[row])
        return print_, int(self.tensors.coded("dtype").codes[row]), int(self.sizes[row])

    def likeness(self, row: int) -> Hashable:
        """What a tensor shares with itself in another order, such as a transpose that was not recorded."""
        statistics = self.statistics(row)
        ordered: dict[str, Any] = dict.fromkeys(("mean", "std", "l2", "first_bad", "first_bad_value"))
        return self.tensors["dtype"][row], statistics._replace(**ordered)

    def statistics(self, row: int) -> Statistics:
        """The statistics of a tensor; of one that has none, those of no element."""
        return Statistics.of(self.tensors[list(Statistics._fields)].row(row)) or _OF_NOTHING

    def is_inside(self, call: int, outer: int) -> bool:
        """Whether a call happened in the code of another; of two backward calls, whether their forwards did."""
        home, end = self._home(call), self._home(outer)
        if self.phases[call] == "forward" or self.kinds[call] != "op":
            home = self.parents[home] if home >= 0 else NO_ROW
        while home >= 0:
            if home == end:
                return True
            home = self.parents[home]
        return False

    def enclosing(self, call: int) -> int:
        """The call around this one; of a backward call, the nearest backward call around it."""
        home = self._home(call)
        if home < 0:
            return NO_ROW
        if self.phases[call] != "backward":
            return self.parents[home]
        while (home := self.parents[home]) >= 0:
            if home in self.backward_of:
                return self.backward_of[home]
        return NO_ROW

    def module(self, call: int) -> str:
        """The module whose code a call belongs to: of a function what stands before the slash."""
        site = self.sites[call]
        if self.kinds[call] == "parameter":
            return site.rpartition(".")[0] or ROOT
        return site if self.kinds[call] == "module" else site.rpartition("/")[0]

    def _home(self, call: int) -> int:
        return self.parents[call] if self.phases[call] == "backward" else call


def _words(table: Table, name: str) -> list[str]:
    return [word or "" for word in table.coded(name).tolist()]
