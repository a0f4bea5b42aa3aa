"""What elements that flip add to the errors of a right run: gates, choices, and signs of an optimizer's steps.

Reads `errors` and `sources`, feeds `bases`. Where a number that is off by a rounding is compared with zero or with
another number, a few elements come out otherwise, and differ by far more than a rounding: a ReLU lets a gradient
through in one run alone, a router picks another expert, Adam moves a weight up in one run and down in the other. How
many elements flip follows from the error of what was compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.errors import Errors
from astray.comparison.judge.provenance import Provenance
from astray.comparison.judge.sources import Sources
from astray.comparison.rows import Bools, Floats, Ints


def _at_most(mean: Floats, count: Floats) -> Floats:
    """How many of `count` elements may flip where `mean` do on average."""
    return np.asarray(np.minimum(count, mean + t.FLIP_SIGMAS * np.sqrt(mean) + 1))


# -- gates -------------------------------------------------------------------------------------------------------------


class GateFlips(NamedTuple):
    """How far off flipped gates may make a gradient, relatively: by all elements, by its worst slice, and by sums."""

    elements: Floats
    worst: Floats
    sums: Floats


def find_gate_flips(errors: Errors, sources: Sources, elements: Floats) -> GateFlips:
    """What flipped gates (ReLU, max-pool) may do to the gradients that leave them.

    A gradient that gained zeros has passed a gate. How many flip follows from the error of what the forward call was
    given, and from how many zeros there are more or less now. Each of k changes it by an element: a few of them by as
    much as the largest, many by their root mean square, up to some standard deviations. As many gates open as close,
    but for the zeros that there are more: only those change the norm, and what chance leaves of the others.
    """
    nothing = np.zeros(len(elements))
    if not np.any(sources.backward & (errors.zero_share > t.GATE_ZERO_SHARE)):
        return GateFlips(nothing, nothing, nothing)
    arrived = sources.largest(np.where(sources.backward & sources.comparable, errors.zero_share, 0.0))
    at = np.flatnonzero(
        sources.backward & sources.comparable & (errors.roundoff > 0) & (errors.l2 > 0)
        & (errors.zero_share > arrived + t.GATE_ZERO_SHARE)
        & sources.has_provenance(Provenance.CALL, Provenance.CODE)
    )  # fmt: skip
    if not len(at):
        return GateFlips(nothing, nothing, nothing)
    forward = sources.largest(np.where(sources.backward, 0.0, errors.element))[at]
    mean = errors.count[at] * np.minimum(1.0, t.FLIP_DENSITY * forward) + errors.zeros_difference[at]
    count = np.where(mean > 0, _at_most(mean, errors.count[at]), 0.0)
    peak, root = errors.peak[at], np.sqrt(count)
    # The root mean square of the elements that are not zero, beside the norm.
    typical = 1 / np.sqrt(np.maximum(errors.count[at] * (1 - errors.zero_share[at]), 1.0))
    scatter = t.FLIP_SIGMAS * root * peak * typical  # of the squares of k elements, whose fourth power is at most this
    in_elements, in_worst, in_sums = nothing.copy(), nothing.copy(), nothing.copy()
    in_worst[at] = root * peak
    in_elements[at] = np.minimum(root * peak, np.sqrt(count * typical**2 + scatter + peak**2))  # one may be the largest
    in_norm = np.minimum(count * peak**2, errors.zeros_difference[at] * typical**2 + scatter) / 2
    in_mean = root * np.minimum(peak, t.FLIP_SIGMAS * typical) / np.sqrt(errors.count[at])
    in_sums[at] = in_norm + in_mean
    return GateFlips(in_elements, in_worst, in_sums)


def one_call_further(flips: Floats, sources: Sources) -> Floats:
    """What flipped gates do to the gradients made of theirs: few elements, which hardly show in statistics.

    A batch norm brings each channel to a scale of its own, and any of those few may be its largest. It holds for calls
    with no others inside: what is inside explains the rest.
    """
    if not flips.any():
        return flips
    repeated = np.flatnonzero(sources.provenance == Provenance.SEEN_BEFORE)
    known = flips.copy()
    known[repeated] = flips[sources.first_seen[repeated]]
    gradients = sources.backward & sources.has_provenance(Provenance.CALL, Provenance.GRADIENT)
    return np.where(gradients & sources.is_innermost, sources.largest(known), 0.0)


def follows_gates(flips: Floats, errors: Errors, sources: Sources) -> Bools:
    """Gradients that came of flipped gates, however many calls ago: any single element may be one that flipped."""
    if not flips.any():
        return np.zeros(len(flips), np.bool_)
    rows = sources.backward & sources.comparable & ~errors.identical
    return np.asarray(sources.largest_of_ancestors(np.where(flips > 0, 1.0, 0.0), rows) > 0)


# -- choices -----------------------------------------------------------------------------------------------------------


def find_choices(errors: Errors, sources: Sources, elements: Floats) -> tuple[Bools, Floats]:
    """Rows inside calls that were given a choice which fell another way; and the share of choices that may have.

    The share is known for all rows of such calls, else 0. Inside, what belongs to the same choice lies together: where
    one falls another way, all that is behind it moves.
    """
    nothing = np.zeros(len(elements), np.bool_), np.zeros(len(elements))
    made = sources.has_provenance(Provenance.CALL, Provenance.CODE)
    given = sources.is_operand & (errors.roundoff == 0) & ~errors.identical
    given &= sources.provenance == Provenance.SEEN_BEFORE
    given[given] = made[sources.first_seen[given]]
    if not given.any():
        return nothing
    count = np.append(sources.largest_by_call(errors.count, given), 0.0)
    calls, call = sources.calls, sources.call
    outer = np.append(calls.enclosing, -1)[call]
    own, around = (np.maximum(count[of], count[np.append(calls.forward_of, -1)[of]]) for of in (call, outer))
    choices = np.where(made, np.maximum(own, around), 0.0)
    many = np.maximum(choices, 1.0)
    share = _at_most(many * np.minimum(1.0, t.FLIP_DENSITY * elements), many) / many
    return (around > 0) & (choices > 0), np.where(choices > 0, share, 0.0)


def follows_choices(errors: Errors, sources: Sources) -> Bools:
    """Rows that came of a choice that fell another way, such as a router's: a few of their elements are others."""
    chosen: Bools = sources.comparable & (errors.roundoff == 0) & ~errors.identical
    chosen &= sources.provenance == Provenance.CALL
    if not chosen.any():
        return chosen
    rows = sources.comparable & ~errors.identical
    return np.asarray(sources.largest_of_ancestors(np.where(chosen, 1.0, 0.0), rows) > 0)


# -- optimizers --------------------------------------------------------------------------------------------------------


def find_optimizer_moves(errors: Errors, sources: Sources, current: Bools, known: Floats) -> Floats:
    """How far off weights may be because an optimizer moves elements whose gradient is nothing but rounding.

    Adam moves every element by about its learning rate, be its gradient ever so small. How far, is taken from what the
    statistics of the weight moved in the reference; how many elements, from the error of the gradient. It is found for
    the `current` rows; of the others it is `known`.
    """
    moves = known.copy()
    weights = np.flatnonzero((sources.provenance == Provenance.WEIGHT) & (sources.last_seen >= 0) & current)
    if len(weights):
        before = sources.last_seen[weights]
        distance = _at_least_median(_distance(sources, weights, before), sources.step[weights])
        added = _flipped(errors, sources, weights, distance, np.ones(len(weights)))
        for rows in _by_step(sources.step[weights]):  # what one step adds is still there in the next
            moves[weights[rows]] = np.minimum(added[rows] + moves[before[rows]], t.MAX_ERROR)
    recorded = (sources.provenance == Provenance.CALL) & (sources.stepped_weight >= 0) & (errors.roundoff > 0)
    stepped = np.flatnonzero(recorded & current)
    if len(stepped):  # where the optimizer's step itself was recorded
        before = sources.stepped_weight[stepped]
        update = np.isin(
            sources.path[stepped], [n for n, path in enumerate(sources.evidence.paths) if path == "update"]
        )
        distance = np.where(update, errors.rms[stepped], _distance(sources, stepped, before))
        given = sources.largest(np.where(sources.comparable, errors.element, 0.0))[stepped]
        share = np.minimum(1.0, t.FLIP_DENSITY * (given + errors.roundoff[stepped]))
        added = _flipped(errors, sources, stepped, distance, share)
        added[given == 0] = 0.0
        moves[stepped] = np.minimum(added + np.where(update, 0.0, moves[before]), t.MAX_ERROR)
    return moves


def _flipped(errors: Errors, sources: Sources, rows: Ints, distance: Floats, share: Floats) -> Floats:
    """How far off rows are, relatively, if some elements moved the other way.

    How many, is taken from the gradient; where none is known, it is `share` of them.
    """
    gradient = sources.applied_gradient[rows]
    known = gradient >= 0
    # The largest of normal numbers is four times as large as they are on average. Where it is more, most are smaller.
    tail = np.maximum(errors.peak[gradient] * errors.sqrt_count[gradient] / t.WORST_ELEMENT, 1.0)
    off = errors.element[gradient] + errors.roundoff[gradient]
    share = np.where(known, np.minimum(1.0, t.FLIP_DENSITY * tail * off), share)
    count = _at_most(errors.count[rows] * share, errors.count[rows])
    l2 = np.maximum(errors.l2[rows], np.finfo(np.float32).tiny)
    error = np.minimum(t.SIGN_FLIP_MOVES * distance * np.sqrt(count) / l2, t.MAX_ERROR)
    error[known & errors.identical[gradient]] = 0.0
    return error


def _distance(sources: Sources, rows: Ints, before: Ints) -> Floats:
    """How far the statistics of some rows have moved since others, in the reference."""
    numbers = sources.evidence.numbers
    moves = [np.abs(numbers(name, rows)[0] - numbers(name, before)[0]) for name in ("min", "max", "mean", "std")]
    return np.asarray(np.nan_to_num(np.fmax.reduce(moves)))


def _at_least_median(distance: Floats, steps: Ints) -> Floats:
    """A weight whose extremes stayed where they were has moved as far as the others of its step."""
    raised = distance.copy()
    for rows in _by_step(steps):
        raised[rows] = np.maximum(distance[rows], np.median(distance[rows]))
    return raised


def _by_step(steps: Ints) -> list[Ints]:
    """The places of each step, one step after another."""
    order = np.argsort(steps, kind="stable")
    begins = np.flatnonzero(np.diff(steps[order], prepend=-1))
    return np.split(order, begins[1:])


def update_errors(errors: Errors, sources: Sources, elements: Floats) -> Floats:
    """How far off the recorded results of an optimizer may be besides.

    An update is the difference of two weights, each rounded to its dtype. And where a gradient is off, elements of it
    that are nothing but rounding move up in one run and down in the other.
    """
    error = np.zeros(len(errors.roundoff))
    results = (sources.provenance == Provenance.CALL) & sources.of_optimizer
    at = np.flatnonzero(results & (errors.roundoff > 0) & (errors.l2 > 0))
    if not len(at):
        return error
    call, is_update = sources.call[at], sources.is_update[at]
    weight = sources.largest_by_call(errors.l2, sources.has_role("parameter"))[call]
    distance = sources.largest_by_call(errors.absmax, sources.is_update & sources.is_result)[call]
    count = errors.count[at]
    flipped = _at_most(count * np.minimum(1.0, t.FLIP_DENSITY * (elements[at] + errors.roundoff[at])), count)
    flips = np.where(elements[at] > 0, t.SIGN_FLIP_MOVES * distance * np.sqrt(flipped), 0.0)
    rounding = np.where(is_update, t.UPDATE_ROUNDINGS * errors.roundoff[at] * weight, 0.0)
    error[at] = np.minimum((flips + rounding) / errors.l2[at], t.MAX_ERROR)
    return error
