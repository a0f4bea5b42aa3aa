"""Which rows can have come of rows that are wrong by themselves (taint).

Reads the origins that `verdicts` found, and follows them through `sources`. A tainted row is a victim when it is
further off than its untainted sources explain; where the difference has healed, it agrees again. `verdicts` decides.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from astray.comparison.judge.provenance import Provenance
from astray.comparison.judge.sources import Sources
from astray.comparison.rows import Bools, Ints


class TaintedRows(NamedTuple):
    """The origins and all rows that can have come of them; and which origins can have come of another one."""

    rows: Bools
    origins: Bools


class TaintTracker:
    """Spreads taint window after window. Beyond the step after the first origin everything counts as tainted.

    steps: those of all rows, in order.
    """

    def __init__(self, steps: Ints) -> None:
        self._steps = steps.tolist()
        self._first: int | None = None  # the step of the first origin
        self._last = 0  # the step after it
        self._is_late = False  # whether anything is tainted in that one

    @property
    def has_begun(self) -> bool:
        """Whether any window had an origin."""
        return self._first is not None

    def spread(self, sources: Sources, current: Bools, origin: Bools, agreed: Bools) -> TaintedRows:
        """The tainted rows of a window.

        current: the rows that are judged in it. agreed: those that agree by themselves, and may be victims.
        The steps that a window looks back at are walked again, since what came of them lies in this window.
        """
        tainted, reached = origin.copy(), np.zeros(len(origin), np.bool_)
        if self._first is None:
            if not origin.any():
                return TaintedRows(tainted, reached)
            self._begin(int(sources.evidence.steps[np.argmax(origin)]))
        steps = np.where(sources.comparable, sources.step, -1)
        walked = (steps >= self._first) & (steps <= self._last)
        if np.any(walked & current):
            rows = np.flatnonzero(walked & (origin | agreed))
            rows = rows[rows >= int(np.argmax(tainted))]
            position = np.arange(len(tainted))  # a value is there from its first sighting on, in whatever order
            repeated = np.flatnonzero(sources.provenance == Provenance.SEEN_BEFORE)
            np.minimum.at(position, sources.first_seen[repeated], repeated)
            _walk(sources, rows[np.argsort(position[rows], kind="stable")], tainted, reached)
        self._is_late = self._is_late or bool(np.any(tainted & current & (steps == self._last)))
        if self._is_late:
            after = current & (steps > self._last)
            tainted |= after & agreed
            reached |= after & origin
        return TaintedRows(tainted, reached)

    def _begin(self, step: int) -> None:
        following = bisect_right(self._steps, step)
        self._first, self._last = step, self._steps[following] if following < len(self._steps) else step


def _walk(sources: Sources, rows: Ints, tainted: Bools, reached: Bools) -> None:
    """Go through rows in order of observation, and mark those with a tainted source."""
    calls = sources.calls
    columns = [
        rows.tolist(),
        sources.provenance[rows].tolist(),
        sources.call[rows].tolist(),
        sources.enclosing_group[rows].tolist(),
        sources.is_result[rows].tolist(),
        sources.first_seen[rows].tolist(),
        sources.last_seen[rows].tolist(),
        sources.applied_gradient[rows].tolist(),
        sources.step[rows].tolist(),
        sources.is_module_state[rows].tolist(),
    ]
    marked = set(np.flatnonzero(tainted).tolist())
    marked_calls: set[int] = set()  # which were given or have made something tainted
    marked_groups: set[int] = set()  # code in which something tainted was made
    marked_states: set[int] = set()  # modules with a weight or buffer that is tainted
    marked_modules: set[tuple[int, int, int]] = set()  # by plane and step
    forward, owner, module, plane = calls.forward_of, calls.owner, calls.module, calls.plane
    enclosing, planes, state_group = calls.enclosing, calls.planes_of_owners, calls.state_group
    marked_gradients = {user_plane: set(marked) for user_plane in planes}  # by plane
    for row, kind, call, group, is_result, first, last, gradient, step, is_state in zip(*columns, strict=True):
        if kind == Provenance.SEEN_BEFORE:
            comes = first in marked
        elif kind == Provenance.CALL:
            comes = call in marked_calls or call in marked_groups or group in marked_groups
            comes = comes or int(forward[call]) in marked_calls or int(state_group[call]) in marked_states
        elif kind == Provenance.CODE:
            outer = int(enclosing[call])
            comes = group in marked_groups or outer in marked_calls or gradient in marked
            comes = comes or int(forward[call]) in marked_calls
        elif kind == Provenance.GRADIENT:
            by_planes = [user_plane for user_plane in planes if (int(owner[call]), user_plane, step) in marked_modules]
            for user_plane in by_planes:
                marked_gradients[user_plane].add(row)
            comes = planes[0] in by_planes
        else:
            comes = last in marked or gradient in marked_gradients.get(int(plane[call]), marked)
        if row in marked:
            reached[row] = comes
        elif comes:
            marked.add(row)
        else:
            continue
        marked_calls.add(call)
        if is_state:
            marked_states.add(int(state_group[call]))
        marked_modules.add((int(module[call]), int(plane[call]), step))
        if is_result:
            marked_groups.add(group)
            if enclosing[call] >= 0:
                marked_calls.add(int(enclosing[call]))
    tainted[np.array(sorted(marked), np.int64)] = True
