"""How surprising each row is: what it is off by, over what the rows it came from explain.

Reads `errors`, `sources` and `bases`, feeds `verdicts`. A row's *gain* is its error over its base. It may have so many
times the largest gain among its siblings; with a noise run, so many times its own gain there, and as many times more as
its siblings have beyond theirs; without either, what a model allows. A surprise above 1 is beyond that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import Bases
from astray.comparison.judge.errors import Errors
from astray.comparison.judge.siblings import Families, Gains
from astray.comparison.judge.sources import Producer, Sources
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import MEASURES, Rule

OF_ELEMENTS = ("values", "worst", "slices", "typical")
"""The measures that are averages over many elements or the largest of many: one noise run shows how large they are."""


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
    allowed: dict[str, Floats]  # by measure, how many times its base a row may be off by; NaN where it does not judge


def find_surprise(errors: Errors, sources: Sources, bases: Bases, noise: list[Gains]) -> Surprise:
    """Judge every row that came from something by its siblings, or by runs that show the noise.

    The gain of a wrong row would raise the limit of its siblings and of all that comes of it. So rows are judged once
    more without those that were found wrong.
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
    """The rows that a measure judges, by their nearest families and by all of their kind."""

    at: Ints
    near: Families
    kin: Families


def _rows_to_judge(errors: Errors, sources: Sources, bases: Bases) -> dict[str, _Rows]:
    """For each measure its rows; most measures have the same ones, which are sorted once."""
    units = (Producer.CALL, Producer.CODE, Producer.GRADIENT, Producer.WEIGHT, Producer.BUFFER)
    judged = sources.is_unit(*units) & (errors.unit > 0)
    found: dict[str, _Rows] = {}
    for name in MEASURES:
        at = np.flatnonzero(judged & ~np.isnan(errors.measure(name)) & ~bases.silent[name])
        same = next((one for one in found.values() if np.array_equal(one.at, at)), None)
        if len(at):
            found[name] = same or _Rows(at, *(Families(family[at], sources.site[at]) for family in sources.families))
    return found


class _Asked(NamedTuple):
    """What the siblings of each row show: the largest of their numbers, how many they are, and how little they show."""

    largest: Floats
    sites: Ints
    slack: Floats


def _asked(rows: _Rows, shown: Floats, made: Bools) -> _Asked:
    """Read the nearest siblings of each row, or else all of its kind. made: by calls, which may have later victims."""
    near, kin = rows.near.others(shown), rows.kin.others(shown)
    use_near = near.sites >= t.SIBLINGS
    largest = np.where(use_near, near.largest, kin.largest)
    count = np.where(use_near, near.sites, kin.sites)
    before = rows.near.before(shown)
    earlier = made & (before.sites >= t.BEFORE)
    largest = np.where(earlier, np.minimum(largest, before.largest), largest)
    slack = np.where(use_near, 1.0, t.OF_KIND) * np.where(count < t.STEADY, t.OF_FEW, 1.0)
    return _Asked(largest, count, slack)


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
    for name, here in rows.items():
        at = here.at
        error = np.minimum(errors.measure(name), t.LARGEST)
        whole = bases.whole[name][at]
        gain = error[at] / whole
        shown = np.where(wrong[at], 0.0, gain)
        # Rows that are off here and there are soon off everywhere: in which layer, siblings before it need not show.
        made = sources.is_unit(Producer.CALL, Producer.CODE)[at] & (name != "typical")
        summed = sources.is_unit(Producer.GRADIENT)[at] & (name in OF_ELEMENTS)
        least = np.where(summed, np.clip(bases.own[name][at] / whole, t.LEAST_SUMMED, 1.0), t.LEAST[name])
        others, count, slack = _asked(here, shown, made)
        known = count >= t.SIBLINGS
        slack *= np.where(sources.backward[at], t.OF_GRADIENTS[name], 1.0)
        drifted = bases.drifted[name][at]
        far = np.where(bases.element[at] > t.LINEAR, t.FAR, 1.0)
        wide = slack * np.where(drifted, t.DRIFTED[name] * far, 1.0)
        sure = np.where(errors.by_values[at], t.BY_VALUES.get(name, 1.0), 1.0)
        times = wide * sure * np.maximum(others, least)
        allowed = np.where(known, t.GAIN[name] * times, t.LONELY[name])
        rule = np.where(known, Rule.SIBLINGS, Rule.MODEL)
        if name in ("norm", "mean"):  # sums of what is off by δ may be off by as much, if it is all in one direction
            allowed = np.where(known, allowed, np.maximum(allowed, bases.element[at] / whole))
        if name == "typical":  # two sums of which a third of the rows is off have two thirds that are: siblings decide
            allowed = np.where(known, allowed, np.inf)
        capped = t.OWN * bases.own[name][at] / whole
        own = bases.unspoilt[at] & (capped < allowed)
        allowed, rule = np.where(own, capped, allowed), np.where(own, Rule.MODEL, rule)
        if noise:
            mixed = sources.evidence.mixed >= t.MIXED
            shows = [run.of(name, at, ~known | own | mixed) for run in noise]
            level = np.maximum(np.fmax.reduce(shows), least)
            if mixed:  # other precisions round more than a perturbed input does, so it can only loosen
                by_noise = slack * t.OF_NOISE[name] * level
                replaced = np.zeros(len(at), np.bool_)
            else:
                by_elements = name in OF_ELEMENTS
                beyond = np.maximum(_asked(here, np.nan_to_num(shown / level), made).largest, 1.0)
                times = np.where(known, slack * sure * beyond, t.OTHER_NOISE if by_elements else 1.0)
                times *= np.where(drifted, t.DRIFTED_NOISE if by_elements else far, 1.0)
                by_noise = t.BESIDE_NOISE[name] * np.where(own, 1.0, times) * level
                replaced = ~own & (known | (by_elements & (name != "typical"))) & ~np.isnan(level)
            told = replaced | (by_noise > allowed)  # false where the noise run has no such row
            allowed, rule = np.where(told, by_noise, allowed), np.where(told, Rule.NOISE, rule)
            others = np.where(told, level, others)
        found.allowed[name][at] = allowed
        surprise = gain / allowed
        better = surprise > score[at]
        most = at[better]
        score[most] = surprise[better]
        found.measure[most] = MEASURES.index(name)
        found.error[most] = error[most]
        found.limit[most] = (allowed * whole)[better]
        found.given[most] = bases.given[name][most]
        found.gain[most] = others[better]
        found.siblings[most] = count[better]
        found.rule[most] = rule[better]
    score[score < 0] = np.nan
    return found
