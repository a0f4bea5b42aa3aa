"""How surprising each row is: its gain, over the gain that a right call of its kind may have.

Reads `errors`, `sources` and `bases`, feeds `verdicts`. A row's *gain* is its error over its base. The *allowed gain*
is a multiple (from `thresholds`) of

- the largest gain among its siblings (rule `siblings`), or
- its own gain in a noise run, times how far its siblings' gains are beyond theirs there (rule `noise run`), or
- 1, where it has neither, or all its sources are bit-identical (rule `model`).

Surprise = gain / allowed gain; limit = allowed gain · base. A surprise above 1 is an error beyond the limit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import Bases
from astray.comparison.judge.errors import Errors
from astray.comparison.judge.provenance import Provenance
from astray.comparison.judge.siblings import Families, Gains
from astray.comparison.judge.sources import Sources
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import MEASURES, Rule

OF_ELEMENTS = ("values", "worst", "slices", "typical")
"""The measures that are averages over many elements or the largest of many: one noise run shows how large they are."""


class Surprise(NamedTuple):
    """One entry per row: the surprise by the measure where it is largest, and what that measure was decided by.

    score: NaN where no measure judges the row.
    measure: its place in `MEASURES`. error, limit, input_error: by that measure. rule: what set the limit.
    siblings: at how many other sites there are siblings.
    allowed_gain: of all measures; NaN where one does not judge the row.
    """

    score: Floats
    measure: Ints
    error: Floats
    limit: Floats
    input_error: Floats
    siblings: Ints
    rule: Ints
    allowed_gain: dict[str, Floats]


def find_surprise(errors: Errors, sources: Sources, bases: Bases, noise: list[Gains]) -> Surprise:
    """Score every row that has sources.

    The gain of a wrong row would raise the limit of its siblings and of all that comes of it. So rows are scored again
    without the gains of those that were found wrong.
    """
    wrong = np.zeros(len(errors.roundoff), np.bool_)
    rows = _rows_to_judge(errors, sources, bases)
    surprise = _score(errors, sources, bases, noise, wrong, rows)
    for _ in range(t.MAX_ROUNDS):
        more = (surprise.score > 1) & ~wrong
        if not more.any():
            break
        wrong |= more
        surprise = _score(errors, sources, bases, noise, wrong, rows)
    return surprise


class _JudgedRows(NamedTuple):
    """The rows that a measure judges, by their near families (the same position in other layers) and by their kind."""

    at: Ints
    near: Families
    kind: Families


def _rows_to_judge(errors: Errors, sources: Sources, bases: Bases) -> dict[str, _JudgedRows]:
    """For each measure its rows. Most measures have the same ones, which are sorted once."""
    judged = errors.roundoff > 0
    judged &= sources.has_provenance(
        Provenance.CALL, Provenance.CODE, Provenance.GRADIENT, Provenance.WEIGHT, Provenance.BUFFER
    )
    rows: dict[str, _JudgedRows] = {}
    for name in MEASURES:
        at = np.flatnonzero(judged & ~np.isnan(errors.measure(name)) & ~bases.not_judged[name])
        same = next((known for known in rows.values() if np.array_equal(known.at, at)), None)
        if len(at):
            rows[name] = same or _JudgedRows(
                at, *(Families(family[at], sources.site[at]) for family in sources.families)
            )
    return rows


class _GainsWithSlack(NamedTuple):
    """For each row the largest gain of its siblings, at how many sites they are, and a factor for few or distant."""

    largest: Floats
    sites: Ints
    slack: Floats


def _gains_of_siblings(rows: _JudgedRows, gain: Floats, by_call: Bools) -> _GainsWithSlack:
    """Of the near family, or else of all rows of the kind.

    by_call: rows made by calls, whose later siblings may be victims of this row: enough earlier ones count alone.
    """
    near, kind = rows.near.others(gain), rows.kind.others(gain)
    use_near = near.sites >= t.MIN_SIBLINGS
    largest = np.where(use_near, near.largest, kind.largest)
    sites = np.where(use_near, near.sites, kind.sites)
    before = rows.near.before(gain)
    use_before = by_call & (before.sites >= t.MIN_SIBLINGS_BEFORE)
    largest = np.where(use_before, np.minimum(largest, before.largest), largest)
    slack = np.where(use_near, 1.0, t.DISTANT_SIBLINGS_GAIN)
    return _GainsWithSlack(largest, sites, slack * np.where(sites < t.MIN_STEADY_SIBLINGS, t.FEW_SIBLINGS_GAIN, 1.0))


def _score(
    errors: Errors,
    sources: Sources,
    bases: Bases,
    noise: list[Gains],
    wrong: Bools,
    rows_by_measure: dict[str, _JudgedRows],
) -> Surprise:
    """The surprise of all rows. wrong: those whose gains are not evidence of what is right."""
    length = len(errors.roundoff)
    score = np.full(length, -1.0)
    surprise = Surprise(
        score,
        measure=np.zeros(length, np.int8),
        error=np.full(length, np.nan),
        limit=np.full(length, np.nan),
        input_error=np.full(length, np.nan),
        siblings=np.zeros(length, np.int32),
        rule=np.zeros(length, np.int8),
        allowed_gain={name: np.full(length, np.nan) for name in MEASURES},
    )
    # Other precisions round more than a perturbed input does, so then a noise run can only widen limits.
    noise_only_widens = bool(noise) and sources.evidence.mixed >= t.MIXED_DTYPE_SHARE
    for name, rows in rows_by_measure.items():
        at, of_elements = rows.at, name in OF_ELEMENTS
        error = np.minimum(errors.measure(name), t.MAX_ERROR)[at]
        base = bases.base[name][at]
        own_share = bases.own_rounding[name][at] / base
        gain = error / base
        trusted_gain = np.where(wrong[at], 0.0, gain)
        # A few rows that are off soon are in all later layers: which layers come before says nothing of a typical row.
        by_call = sources.has_provenance(Provenance.CALL, Provenance.CODE)[at] & (name != "typical")
        siblings = _gains_of_siblings(rows, trusted_gain, by_call)
        has_siblings = siblings.sites >= t.MIN_SIBLINGS

        # By siblings, or by the model where there are too few.
        averaged = sources.has_provenance(Provenance.GRADIENT)[at] & of_elements
        least = np.where(averaged, np.clip(own_share, t.MIN_SUMMED_GAIN, 1.0), t.MIN_SIBLING_GAIN[name])
        slack = siblings.slack * np.where(sources.backward[at], t.GRADIENT_GAIN[name], 1.0)
        drifted = bases.weights_drifted[name][at]
        nonlinear = np.where(bases.element_error[at] > t.LINEAR_RANGE, t.NONLINEAR_GAIN, 1.0)
        by_values = np.where(errors.by_values[at], t.SIBLING_GAIN_BY_VALUES.get(name, 1.0), 1.0)
        times = slack * np.where(drifted, t.DRIFTED_GAIN[name] * nonlinear, 1.0)
        times = times * by_values * np.maximum(siblings.largest, least)
        allowed = np.where(has_siblings, t.SIBLING_GAIN[name] * times, t.MODEL_GAIN[name])
        rule = np.where(has_siblings, Rule.SIBLINGS, Rule.MODEL)
        if name in ("norm", "mean"):  # elements that are off by δ, all in one direction, make sums off by δ
            in_one_direction = np.maximum(allowed, bases.element_error[at] / base)
            allowed = np.where(has_siblings, allowed, in_one_direction)
        if name == "typical":  # two tensors with a third of their rows off add up to two thirds: no model knows that
            allowed = np.where(has_siblings, allowed, np.inf)
        of_own = t.OWN_ROUNDINGS * own_share
        only_own = bases.inputs_identical[at] & (of_own < allowed)
        allowed, rule = np.where(only_own, of_own, allowed), np.where(only_own, Rule.MODEL, rule)

        if noise:
            unlike = ~has_siblings | only_own | noise_only_widens
            level = np.maximum(np.fmax.reduce([run.of(name, at, unlike) for run in noise]), least)
            if noise_only_widens:
                by_noise = slack * t.OTHER_PRECISION_NOISE_GAIN[name] * level
                replaces = np.zeros(len(at), np.bool_)
            else:
                beyond = _gains_of_siblings(rows, np.nan_to_num(trusted_gain / level), by_call).largest
                times = slack * by_values * np.maximum(beyond, 1.0)
                times = np.where(has_siblings, times, t.LONE_ROW_NOISE_GAIN if of_elements else 1.0)
                times *= np.where(drifted, t.DRIFTED_NOISE_GAIN if of_elements else nonlinear, 1.0)
                by_noise = t.NOISE_GAIN[name] * np.where(only_own, 1.0, times) * level
                replaces = ~only_own & (has_siblings | (of_elements & (name != "typical"))) & ~np.isnan(level)
            decides = replaces | (by_noise > allowed)  # false where the noise run has no such row, and so NaN
            allowed, rule = np.where(decides, by_noise, allowed), np.where(decides, Rule.NOISE, rule)

        surprise.allowed_gain[name][at] = allowed
        by_measure = gain / allowed
        larger = by_measure > score[at]
        most = at[larger]
        score[most] = by_measure[larger]
        surprise.measure[most] = MEASURES.index(name)
        surprise.error[most] = error[larger]
        surprise.limit[most] = (allowed * base)[larger]
        surprise.input_error[most] = bases.input_error[name][most]
        surprise.siblings[most] = siblings.sites[larger]
        surprise.rule[most] = rule[larger]
    score[score < 0] = np.nan
    return surprise
