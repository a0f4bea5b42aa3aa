"""Which call lies in which, for the calls of one rank.

The `parent` of a forward call is the call around it. The `parent` of a backward call is its forward call, so the
backward call around it is that of the nearest enclosing forward call that has one. The `parent` of a backward op is the
module whose code created its autograd node. The gradient of a parameter belongs to the module that owns it, in the same
micro step. A call that activation checkpointing repeats has no parent: it lies where the call lay the first time.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.graph.keys import find, one_key
from astray.records import ROOT
from astray.store import Table

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]

NO_ROW = -1

_SAME_CALL = ("step", "micro", "call")


class CallTree:
    """The calls of one rank. They are given and found by their row in `calls`.

    >>> tree = CallTree(run.ranks[0].calls)
    >>> tree.around(7), tree.backward_of(7), tree.enclosing(7)
    ([1, 6], 10, 6)
    """

    def __init__(self, calls: Table) -> None:
        self.calls = calls

    @cached_property
    def parent(self) -> Ints:
        """The row of each call's `parent`, −1 for none: the call around it; of a backward call its forward call."""
        seq, parent = self.calls.numbers("seq"), self.calls.numbers("parent")
        found = np.where(parent >= 0, find(parent, seq), NO_ROW)
        # A call begins after the one around it. What claims otherwise is damaged, and could lead in a circle.
        return np.where(seq[found] < seq, found, NO_ROW) if len(seq) else found

    @cached_property
    def outer(self) -> Ints:
        """For each forward call the one around it, recomputed ones included; the optimizer's step around an update."""
        calls, parent = self.calls, self.parent
        again = calls.numbers("recompute") & (parent < 0) & self.is_forward
        if not again.any():
            return parent
        codes = [calls.coded(name).codes for name in ("site", "phase")]
        key = one_key([*(calls.numbers(name) for name in _SAME_CALL), *codes])
        ordinary = np.flatnonzero(~calls.numbers("recompute"))
        distinct, first = np.unique(key[ordinary], return_index=True)
        twin = find(key[again], distinct)
        found = parent.copy()
        found[again] = np.where(twin >= 0, parent[ordinary[first[twin]]], NO_ROW) if len(first) else NO_ROW
        return found

    @cached_property
    def backward(self) -> Ints:
        """The first backward call of each forward call, −1 where there is none."""
        found = np.full(len(self.calls), NO_ROW)
        backward = np.flatnonzero(self.is_backward & ~self.is_op & (self.parent >= 0))[::-1]
        found[self.parent[backward]] = backward
        return found

    @cached_property
    def enclosings(self) -> Ints:
        """For each call the one in whose code it happened, −1 for an outermost one.

        Around a backward call it is the nearest backward call of what is around its forward call.
        """
        found = self.outer.copy()
        walking = np.flatnonzero(self.is_backward)
        of_op = self.is_op[walking]
        at = np.where(of_op, self.parent[walking], np.append(self.outer, NO_ROW)[self.parent[walking]])
        at = np.where(self.parent[walking] >= 0, at, NO_ROW)
        found[walking] = NO_ROW
        while len(walking):
            arrived = (at >= 0) & (self.backward[at] >= 0)
            found[walking[arrived]] = self.backward[at[arrived]]
            on = (at >= 0) & ~arrived
            walking, at = walking[on], self.outer[at[on]]
        return found

    @cached_property
    def owners(self) -> Ints:
        """For each gradient of a parameter the forward call of the module that has it, −1 where there is none.

        It is the first call of that module in the same micro step; where a pass was recorded that is not counted as
        one, the last before the gradient that had a backward.
        """
        calls, found = self.calls, np.full(len(self.calls), NO_ROW)
        wanted = np.flatnonzero(self.is_gradient)
        if not len(wanted):
            return found
        site, names = calls.coded("site").codes, calls.coded("site").values
        number = {name: code for code, name in enumerate(names)}
        module = np.array([number.get(str(name).rpartition(".")[0] or ROOT, -2) for name in names])
        forward = np.flatnonzero(self.is_forward & self._is("kind", "module") & ~calls.numbers("recompute"))
        at = np.concatenate([forward, wanted])
        key = one_key([
            calls.numbers("step")[at], calls.numbers("micro")[at], np.concatenate([site[forward], module[site[wanted]]])
        ])  # fmt: skip
        distinct, first = np.unique(key[: len(forward)], return_index=True)
        place = find(key[len(forward) :], distinct)
        found[wanted] = np.where(place >= 0, forward[first[place]], NO_ROW) if len(first) else NO_ROW
        self._find_elsewhere(found, wanted[found[wanted] < 0], forward, module[site])
        return found

    def _find_elsewhere(self, owners: Ints, missing: Ints, forward: Ints, module: Ints) -> None:
        """Fill in owners that were called in no such micro step."""
        steps, seq = self.calls.numbers("step"), self.calls.numbers("seq")
        sites = self.calls.coded("site").codes
        called: dict[tuple[int, int], list[int]] = {}
        for call in forward[np.isin(sites[forward], module[missing])].tolist():
            called.setdefault((int(steps[call]), int(sites[call])), []).append(call)
        for row in missing.tolist():
            before = [c for c in called.get((int(steps[row]), int(module[row])), ()) if seq[c] < seq[row]]
            trained = [call for call in before if self.backward[call] >= 0]
            owners[row] = max(trained or before, key=lambda call: int(seq[call]), default=NO_ROW)

    # -- of single calls ---------------------------------------------------------------------------------------------

    def enclosing(self, call: int) -> int | None:
        """The call in whose code this one happened; None for an outermost one."""
        return _or_none(self.enclosings[call])

    def backward_of(self, call: int) -> int | None:
        """The backward call of a forward call, if it has one."""
        return _or_none(self.backward[call])

    def owner(self, call: int) -> int | None:
        """The forward call of the module that has the parameter whose gradient this is."""
        return _or_none(self.owners[call])

    def around(self, call: int) -> list[int]:
        """The forward calls around this one, outermost first, without itself. For an update, its optimizer's step."""
        found: list[int] = []
        if self.is_gradient[call]:
            outer = int(self.owners[call])
        elif self.is_backward[call] and not self.is_op[call]:
            outer = NO_ROW if self.parent[call] < 0 else int(self.outer[self.parent[call]])
        else:
            outer = int(self.outer[call])
        while outer >= 0:
            found.append(outer)
            outer = int(self.outer[outer])
        return found[::-1]

    def is_inside(self, call: int, outer: int) -> bool:
        """Whether a call happened in the code of another; of two backward calls, whether their forwards did."""
        end = int(self.parent[outer]) if self.is_backward[outer] and not self.is_op[outer] else outer
        return end >= 0 and end in self.around(call)

    @cached_property
    def has_functions(self) -> bool:
        """Whether functions or ops are recorded; else code between two modules may compute unseen."""
        return bool(self.is_op.any() or self._is("kind", "function").any())

    # -- which are what ----------------------------------------------------------------------------------------------

    @cached_property
    def is_forward(self) -> Bools:
        """Calls of the forward phase."""
        return self._is("phase", "forward")

    @cached_property
    def is_backward(self) -> Bools:
        """Calls of the backward phase."""
        return self._is("phase", "backward")

    @cached_property
    def is_op(self) -> Bools:
        """Calls of ops. A backward op belongs to no forward call."""
        return self._is("kind", "op")

    @cached_property
    def is_gradient(self) -> Bools:
        """The gradients of parameters, as they arrive."""
        return self._is("kind", "parameter")

    def _is(self, column: str, word: str) -> Bools:
        cells = self.calls.coded(column)
        return np.asarray(cells.codes == cells.code(word))


def _or_none(row: Any) -> int | None:
    return int(row) if row >= 0 else None
