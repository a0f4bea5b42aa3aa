"""Cuts a rank's steps into windows of a few, which are judged together.

Reads `evidence`, feeds `verdicts`. A row is judged by its own step, and by where the weights that it starts from were
seen last. So steps in which no bit differs are left out, and the others are judged in windows that fit into the cache.
How they are cut changes no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.calls import CallColumns
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Ints


class Window(NamedTuple):
    """Some pairs in their order: those that are judged now, and with them all of the steps that they look back at."""

    rows: Ints
    own: Bools


def cut(evidence: Evidence, calls: CallColumns, undecided: Bools) -> Iterator[Window]:
    """The windows with all steps in which anything is undecided, in the order of steps."""
    pairs = _by_step(evidence)
    called = np.zeros(calls.count, np.bool_)
    called[evidence.reference.call_row[evidence.pairs.reference[evidence.pairs.matched]]] = True
    before = _steps_before(calls, np.flatnonzero(called), np.array(sorted(pairs)))
    open_steps = [step for step, rows_of in pairs.items() if undecided[rows_of].any()]
    wanted: list[int] = []
    size = 0
    for place, step in enumerate(open_steps, 1):
        wanted.append(step)
        size += len(pairs[step])
        if place == len(open_steps) or (size >= t.ROWS and len(wanted) >= t.STEPS):
            seen = set().union(*(before.get(one, ()) for one in wanted)) - set(wanted)
            yield _window(pairs, wanted, sorted(seen & pairs.keys()))
            wanted, size = [], 0


def _by_step(evidence: Evidence) -> dict[int, Ints]:
    """The pairs of each step, in their order; the steps in theirs."""
    matched = np.flatnonzero(evidence.pairs.matched)
    steps = evidence.steps[matched]
    if np.any(steps[1:] < steps[:-1]):
        order = np.argsort(steps, kind="stable")
        matched, steps = matched[order], steps[order]
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    return dict(zip(steps[begins].tolist(), np.split(matched, begins[1:]), strict=True))


def _window(pairs: dict[int, Ints], wanted: list[int], before: list[int]) -> Window:
    rows = np.concatenate([pairs[step] for step in (*wanted, *before)])
    order = np.argsort(rows, kind="stable")
    return Window(rows[order], order < sum(len(pairs[step]) for step in wanted))


def _steps_before(calls: CallColumns, called: Ints, steps: Ints) -> dict[int, set[int]]:
    """For each step those in which its sites were called last; the step before it is one, whatever was called there."""
    found = {step: {before} for before, step in zip(steps[:-1].tolist(), steps[1:].tolist(), strict=True)}
    wide = int(steps.max(initial=0)) + 1
    site, step = np.divmod(np.unique(calls.site[called].astype(np.int64) * wide + calls.step[called]), wide)
    again = site[1:] == site[:-1]
    for before, here in np.unique(np.stack([step[:-1], step[1:]])[:, again], axis=1).T.tolist():
        found[here].add(before)
    return found
