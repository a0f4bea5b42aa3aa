"""How surprising each row is: what it is off by, over what the rows it came from explain.

Reads `errors`, `sources` and `bases`, feeds `verdicts`. A row's *gain* is its error over its base. It may have so many
times the largest gain among its siblings; in a noise run, of its family there; without either, what a model allows. A
surprise above 1 is beyond that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.compare.judge import thresholds as t
from astray.compare.judge.bases import Bases
from astray.compare.judge.errors import Errors
from astray.compare.judge.siblings import Families, Gains
from astray.compare.judge.sources import Sources, Unit
from astray.compare.rows import Bools, Floats, Ints
from astray.compare.verdict import MEASURES, Rule


class Surprise(NamedTuple):
    """One entry per row: the largest of its measures' surprises, and of that measure the error, limit, rule and so on.

    given: what the row came from is off by. gain: the largest gain among `siblings` others.
    """

    score: Floats
    measure: Ints
    error: Floats
    limit: Floats
    given: Floats
    gain: Floats
    siblings: Ints
    rule: Ints
    allowed: dict[str, Floats]  # by measure, how many times its base a row may be off by; NaN where it says nothing


def find_surprise(errors: Errors, sources: Sources, bases: Bases, noise: list[Gains]) -> Surprise:
    """Judge every row that came from something by its siblings, or by runs that show the noise.

    A row that is wrong is no witness of what is right: its gain would allow its siblings, and all that comes of it,
    whatever it likes. So they are judged once more without those that were found.
    """
    wrong = np.zeros(len(errors.unit), np.bool_)
    rows = _rows_to_judge(errors, sources, bases)
    found = _judged_by_witnesses(errors, sources, bases, noise, wrong, rows)
    for _ in range(t.ROUNDS):
        more = (found.score > 1) & ~wrong
        if not more.any():
            break
        wrong |= more
        found = _judged_by_witnesses(errors, sources, bases, noise, wrong, rows)
    return found


class _Rows(NamedTuple):
    """The rows of which a measure says something, by their nearest families and by all of their kind."""

    at: Ints
    near: Families
    kin: Families


def _rows_to_judge(errors: Errors, sources: Sources, bases: Bases) -> dict[str, _Rows]:
    """For each measure its rows; most measures have the same ones, which are sorted once."""
    units = (Unit.CALL, Unit.CODE, Unit.GRADIENT, Unit.WEIGHT, Unit.BUFFER)
    judged = sources.is_unit(*units) & (errors.unit > 0)
    found: dict[str, _Rows] = {}
    for name in MEASURES:
        at = np.flatnonzero(judged & ~np.isnan(errors.measure(name)) & ~bases.silent[name])
        same = next((one for one in found.values() if np.array_equal(one.at, at)), None)
        if len(at):
            found[name] = same or _Rows(at, *(Families(family[at], sources.site[at]) for family in sources.families))
    return found


def _judged_by_witnesses(
    errors: Errors, sources: Sources, bases: Bases, noise: list[Gains], wrong: Bools, rows: dict[str, _Rows]
) -> Surprise:
    length = len(errors.unit)
    score = np.full(length, -1.0)
    found = Surprise(
        score,
        measure=np.zeros(length, np.int8),
        error=np.full(length, np.nan),
        limit=np.full(length, np.nan),
        given=np.full(length, np.nan),
        gain=np.full(length, np.nan),
        siblings=np.zeros(length, np.int32),
        rule=np.zeros(length, np.int8),
        allowed={name: np.full(length, np.nan) for name in MEASURES},
    )
    for name, (at, nearest, kindred) in rows.items():
        error = np.minimum(errors.measure(name), t.LARGEST)
        whole = bases.whole[name][at]
        gain = error[at] / whole
        shown = np.where(wrong[at], 0.0, gain)
        near, kin = nearest.others(shown), kindred.others(shown)
        use_near = near.sites >= t.SIBLINGS
        others = np.where(use_near, near.largest, kin.largest)
        count = np.where(use_near, near.sites, kin.sites)
        known = count >= t.SIBLINGS
        before = nearest.before(shown)
        earlier = (before.sites >= t.BEFORE) & sources.is_unit(Unit.CALL, Unit.CODE)[at]
        others = np.where(earlier, np.minimum(others, before.largest), others)
        slack = np.where(use_near, 1.0, t.OF_KIND) * np.where(sources.backward[at], t.OF_GRADIENTS[name], 1.0)
        slack *= np.where(count < t.STEADY, t.OF_FEW, 1.0)
        drifted = t.DRIFTED * np.where(bases.element[at] > t.LINEAR, t.FAR, 1.0)
        wide = slack * np.where(bases.drifted[name][at], drifted, 1.0)
        allowed = np.where(known, wide * t.GAIN[name] * np.maximum(others, t.LEAST[name]), t.LONELY)
        rule = np.where(known, Rule.SIBLINGS, Rule.MODEL)
        if name in ("norm", "mean"):  # sums of what is off by δ may be off by as much, if it is all in one direction
            allowed = np.where(known, allowed, np.maximum(allowed, bases.element[at] / whole))
        capped = t.OWN * bases.own[name][at] / whole
        own = bases.unspoilt[at] & (capped < allowed)
        allowed, rule = np.where(own, capped, allowed), np.where(own, Rule.MODEL, rule)
        if noise:
            seen = np.fmax.reduce([run.of(name, at) for run in noise])
            by_noise = slack * t.OF_NOISE[name] * np.maximum(seen, t.LEAST[name])
            # Other kernels may round more than a perturbed input does, and other precisions do.
            alone = ~known & ~np.isnan(seen) & (sources.evidence.mixed < t.MIXED)
            more = by_noise > allowed
            by_noise = np.where(more, by_noise, np.minimum(allowed, t.OTHER_NOISE * by_noise))
            told = alone | more
            allowed, rule = np.where(told, by_noise, allowed), np.where(told, Rule.NOISE, rule)
            others = np.where(told, seen, others)
        found.allowed[name][at] = allowed
        surprise = gain / allowed
        better = surprise > score[at]
        here = at[better]
        score[here] = surprise[better]
        found.measure[here] = MEASURES.index(name)
        found.error[here] = error[here]
        found.limit[here] = (allowed * whole)[better]
        found.given[here] = bases.given[name][here]
        found.gain[here] = others[better]
        found.siblings[here] = count[better]
        found.rule[here] = rule[better]
    score[score < 0] = np.nan
    return found
