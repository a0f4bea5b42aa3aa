"""Which call a call lies in, for the calls of one rank.

A forward call names the call around it. A backward call names its forward call, so the backward call around it is that
of the nearest enclosing forward call that has one. The gradient of a parameter belongs to the module that owns it.
What activation checkpointing computes again runs inside the backward pass, where nothing is around it: it lies where
the same call lay the first time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from astray.record import ROOT
from astray.store import RankRun


class Nesting:
    """Walks outwards from calls, which are given and found by their row in `run.calls`."""

    def __init__(self, run: RankRun) -> None:
        self._calls = run.calls
        self._seq = run.calls.numbers("seq")
        self._parent = run.calls.numbers("parent")

    def enclosing(self, row: int) -> int | None:
        """The call in whose code this one happened; None for an outermost one."""
        if self._is(row, "phase", "forward"):
            return self._outer(row)
        outer = self._parent_row(row)
        while outer is not None:
            outer = self._outer(outer)
            backward = None if outer is None else self.backward_of(outer)
            if backward is not None:
                return backward
        return None

    def around(self, row: int) -> list[int]:
        """The forward calls around this one, outermost first, without itself. For an update, its optimizer's step."""
        found: list[int] = []
        if self._is(row, "kind", "parameter"):
            outer = self.owner(row)
            if outer is not None:
                found.append(outer)
        elif self._is(row, "phase", "forward"):
            outer = row
        elif self._is(row, "phase", "update"):
            outer = self._parent_row(row)
            return [] if outer is None else [outer]
        else:
            outer = self._parent_row(row)
        while outer is not None:
            outer = self._outer(outer)
            if outer is not None:
                found.append(outer)
        return found[::-1]

    def owner(self, row: int) -> int | None:
        """The forward call of the module that has the parameter of this row, in the same step."""
        name = str(self._calls["site"][row])
        module = name.rpartition(".")[0] or ROOT
        same = (
            (self._calls.coded("site").codes == self._calls.coded("site").code(module))
            & (self._calls.coded("phase").codes == self._calls.coded("phase").code("forward"))
            & (self._calls.numbers("step") == self._calls.numbers("step")[row])
        )
        return _first(same)

    def backward_of(self, row: int) -> int | None:
        """The backward call of a forward call, if it has one."""
        phase = self._calls.coded("phase")
        return _first((self._parent == self._seq[row]) & (phase.codes == phase.code("backward")))

    def _outer(self, row: int) -> int | None:
        """The call around a forward call."""
        outer = self._parent_row(row)
        if outer is None and self._calls.numbers("recompute")[row]:
            ordinary = self._first_time(row)
            outer = None if ordinary is None else self._parent_row(ordinary)
        return outer

    def _first_time(self, row: int) -> int | None:
        """The ordinary call that a recomputed one repeats."""
        same = ~self._calls.numbers("recompute")
        for name in ("step", "micro", "call"):
            same &= self._calls.numbers(name) == self._calls.numbers(name)[row]
        for name in ("site", "phase"):
            same &= self._calls.coded(name).codes == self._calls.coded(name).codes[row]
        return _first(same)

    def _parent_row(self, row: int) -> int | None:
        seq = int(self._parent[row])
        return None if seq < 0 else _first(self._seq == seq)

    def _is(self, row: int, column: str, value: str) -> bool:
        return bool(self._calls[column][row] == value)


def _first(mask: Any) -> int | None:
    found = np.flatnonzero(mask)
    return int(found[0]) if len(found) else None
