"""What has come of the rows that are wrong by themselves.

Reads the origins that `verdicts` found, and follows them through `sources`. A row is a victim when something it came
from is, and it is further off than the rest explains; where the difference has healed, it agrees again. `verdicts`
decides that.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from astray.comparison.judge.sources import Producer, Sources
from astray.comparison.rows import Bools, Ints


class ReachedRows(NamedTuple):
    """What can be reached from rows that are wrong, those included; and which of those can be from another."""

    rows: Bools
    again: Bools


class ReachAcrossWindows:
    """Whatever can have come of an origin, window after window; after the step behind the first one, everything.

    steps: those of all rows, in order.
    """

    def __init__(self, steps: Ints) -> None:
        self._steps = steps.tolist()
        self._first: int | None = None  # the step of the first origin
        self._last = 0  # the step behind it
        self._is_late = False  # whether something was reached in that one

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    def find(self, sources: Sources, own: Bools, origin: Bools, other: Bools) -> ReachedRows:
        """What is reached in a window. own: the rows that are judged in it. other: those that may have come of origins.

        Steps that a window looks back at are walked through again: what comes of them does.
        """
        tainted, again = origin.copy(), np.zeros(len(origin), np.bool_)
        if self._first is None:
            if not origin.any():
                return ReachedRows(tainted, again)
            self._begin(int(sources.evidence.steps[np.argmax(origin)]))
        steps = np.where(sources.known, sources.step, -1)
        walked = (steps >= self._first) & (steps <= self._last)
        if np.any(walked & own):
            self._walk(sources, np.flatnonzero(walked & (origin | other)), tainted, again)
        self._is_late = self._is_late or bool(np.any(tainted & own & (steps == self._last)))
        if self._is_late:
            after = own & (steps > self._last)
            tainted |= after & other
            again |= after & origin
        return ReachedRows(tainted, again)

    def _walk(self, sources: Sources, rows: Ints, tainted: Bools, again: Bools) -> None:
        rows = rows[rows >= int(np.argmax(tainted))]
        position = np.arange(len(tainted))  # a value comes by its source, wherever it was seen before
        carried = np.flatnonzero(sources.unit == Producer.CARRIED)
        np.minimum.at(position, sources.carried_from[carried], carried)
        _walk(sources, rows[np.argsort(position[rows], kind="stable")], tainted, again)

    def _begin(self, step: int) -> None:
        place = bisect_right(self._steps, step)
        self._first, self._last = step, self._steps[place] if place < len(self._steps) else step


def _walk(sources: Sources, rows: Ints, tainted: Bools, again: Bools) -> None:
    """Walk through rows in order of observation, and mark what comes of marked ones."""
    calls = sources.calls
    group = sources.code_group
    columns = [
        rows.tolist(),
        sources.unit[rows].tolist(),
        sources.call[rows].tolist(),
        group[rows].tolist(),
        sources.is_result[rows].tolist(),
        sources.carried_from[rows].tolist(),
        sources.last_seen[rows].tolist(),
        sources.gradient_before[rows].tolist(),
        sources.step[rows].tolist(),
        sources.is_held[rows].tolist(),
    ]
    spoilt: set[int] = set()  # calls that were given or have made something tainted
    inside: set[int] = set()  # groups in which something tainted was made
    holders: set[int] = set()  # modules with a weight or buffer that is tainted
    owners: set[tuple[int, int, int]] = set()  # modules by plane and step
    marked = set(np.flatnonzero(tainted).tolist())
    forward, owner, module, plane = calls.forward_of, calls.owner, calls.module, calls.plane
    enclosing, planes, holder = calls.enclosing, calls.planes_of_owners, calls.holder
    moving = {one: set(marked) for one in planes}  # gradients of each plane
    for row, unit, call, where, result, carried, before, gradient, step, held in zip(*columns, strict=True):
        if unit == Producer.CARRIED:
            comes = carried in marked
        elif unit == Producer.CALL:
            comes = call in spoilt or call in inside or int(forward[call]) in spoilt or where in inside
            comes = comes or int(holder[call]) in holders
        elif unit == Producer.CODE:
            outer = int(enclosing[call])
            comes = where in inside or outer in spoilt or gradient in marked or int(forward[call]) in spoilt
        elif unit == Producer.GRADIENT:
            found = [one for one in planes if (int(owner[call]), one, step) in owners]
            for one in found:
                moving[one].add(row)
            comes = planes[0] in found
        else:
            comes = before in marked or gradient in moving.get(int(plane[call]), marked)
        if row in marked:
            again[row] = comes
        elif comes:
            marked.add(row)
        else:
            continue
        spoilt.add(call)
        if held:
            holders.add(int(holder[call]))
        owners.add((int(module[call]), int(plane[call]), step))
        if result:
            inside.add(where)
            if enclosing[call] >= 0:
                spoilt.add(int(enclosing[call]))
    tainted[np.array(sorted(marked), np.int64)] = True
