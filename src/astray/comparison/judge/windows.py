"""Computes what verdicts are made of (sources, errors, bases), for a few steps of a rank at a time.

Reads `evidence`, feeds `verdicts`. A row is judged by its own step, and by the steps in which the weights that it
starts from were seen last. So steps in which no bit differs are left out, and the others are judged in windows that fit
into the cache. Where the windows are cut changes no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import Bases, find_bases, find_negligible
from astray.comparison.judge.calls import CallColumns, read_calls
from astray.comparison.judge.errors import Errors, find_errors
from astray.comparison.judge.flips import find_optimizer_moves
from astray.comparison.judge.sources import Sources
from astray.comparison.judge.whole_run import Scaling, find_product_roundoffs, find_scaling, product_roundoffs
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import Judgement, Verdict

T = TypeVar("T")

beyond_floats = np.errstate(over="ignore", invalid="ignore")
"""What is too far off for a float is infinitely far off. It holds for one thread."""


class Window(NamedTuple):
    """Some pairs in their order: those of the `current` steps, and of the earlier steps that these look back at."""

    rows: Ints
    current: Bools


@dataclass(frozen=True)
class WindowColumns:
    """What is known of the pairs of a window before any is judged. Errors do not have the `negligible` ones."""

    window: Window
    evidence: Evidence
    sources: Sources
    scaling: Scaling
    errors: Errors
    negligible: Bools
    bases: Bases


def comparable(judged: Judgement) -> Bools:
    """Pairs whose shapes and dtypes agree."""
    return np.asarray(~np.isin(judged.verdict, (Verdict.SHAPE, Verdict.DTYPE)))


def undecided_windows(evidence: Evidence, judged: Judgement, optimizer_moves: Floats) -> Iterator[WindowColumns]:
    """The windows with all steps in which anything is undecided, in the order of steps.

    optimizer_moves: those of all pairs, which are filled in window by window, since each builds on the step before.
    """
    undecided = (judged.verdict != Verdict.IDENTICAL) & evidence.pairs.matched
    run = evidence.reference.run
    if run is None or not undecided.any():
        return
    calls, known, roundoffs = read_calls(run), comparable(judged), find_product_roundoffs(evidence)
    for window in cut_windows(evidence, calls, undecided):
        rows = window.rows
        some = evidence.take(rows)
        sources = Sources(some, known[rows], calls.take(evidence.reference.call_row[some.pairs.reference]))
        scaling = find_scaling(some, sources)
        errors = find_errors(some, judged.take(rows), scaling.factor, product_roundoffs(sources, roundoffs))
        negligible = find_negligible(errors, sources)
        errors = errors.without(negligible)
        moves = find_optimizer_moves(errors, sources, window.current, optimizer_moves[rows])
        optimizer_moves[rows[window.current]] = moves[window.current]
        yield WindowColumns(window, some, sources, scaling, errors, negligible, find_bases(errors, sources, moves))


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in a thread while the one before is used: two cores share the work."""
    with ThreadPoolExecutor(1) as pool:
        try:
            coming = pool.submit(_next, items)
        except RuntimeError:  # the system gives no thread
            while (item := _next(items)) is not None:
                yield item
            return
        while (item := coming.result()) is not None:
            coming = pool.submit(_next, items)
            yield item


@beyond_floats
def _next(items: Iterator[T]) -> T | None:
    return next(items, None)


# -- which steps make a window -----------------------------------------------------------------------------------------


def cut_windows(evidence: Evidence, calls: CallColumns, undecided: Bools) -> Iterator[Window]:
    """The steps in which anything is undecided, a few at a time, each time with the steps they look back at."""
    pairs = _pairs_by_step(evidence)
    called = np.zeros(calls.count, np.bool_)
    called[evidence.reference.call_row[evidence.pairs.reference[evidence.pairs.matched]]] = True
    before = _steps_before(calls, np.flatnonzero(called), np.array(sorted(pairs)))
    open_steps = [step for step, rows in pairs.items() if undecided[rows].any()]
    current: list[int] = []
    size = 0
    for number, step in enumerate(open_steps, 1):
        current.append(step)
        size += len(pairs[step])
        if number == len(open_steps) or (size >= t.ROWS_PER_WINDOW and len(current) >= t.STEPS_PER_WINDOW):
            earlier = set().union(*(before.get(one, ()) for one in current)) - set(current)
            yield _window(pairs, current, sorted(earlier & pairs.keys()))
            current, size = [], 0


def _pairs_by_step(evidence: Evidence) -> dict[int, Ints]:
    """The pairs of each step, in their order; the steps in theirs."""
    matched = np.flatnonzero(evidence.pairs.matched)
    steps = evidence.steps[matched]
    if np.any(steps[1:] < steps[:-1]):
        order = np.argsort(steps, kind="stable")
        matched, steps = matched[order], steps[order]
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    return dict(zip(steps[begins].tolist(), np.split(matched, begins[1:]), strict=True))


def _window(pairs: dict[int, Ints], current: list[int], earlier: list[int]) -> Window:
    rows = np.concatenate([pairs[step] for step in (*current, *earlier)])
    order = np.argsort(rows, kind="stable")
    return Window(rows[order], order < sum(len(pairs[step]) for step in current))


def _steps_before(calls: CallColumns, called: Ints, steps: Ints) -> dict[int, set[int]]:
    """For each step those in which its sites were called last; the step before it is one, whatever was called there."""
    before = {step: {previous} for previous, step in zip(steps[:-1].tolist(), steps[1:].tolist(), strict=True)}
    steps_in_all = int(steps.max(initial=0)) + 1
    key = calls.site[called].astype(np.int64) * steps_in_all + calls.step[called]
    site, step = np.divmod(np.unique(key), steps_in_all)
    again = site[1:] == site[:-1]
    for previous, later in np.unique(np.stack([step[:-1], step[1:]])[:, again], axis=1).T.tolist():
        before[later].add(previous)
    return before
