"""The base of each row, by each measure: how far off it is if its call passes on its input error with a gain of 1.

Reads `errors` and `sources`, feeds `surprise`. A row is right while

    error out ≤ gain · (error in ⊕ own rounding),        where a ⊕ b is √(a² + b²).

The parenthesis is the base. The input error is the largest error among the row's sources (`Sources.largest`). Own
rounding is that of the row's call, and whatever else a right call may add that no input shows: flipped gates, choices
and signs of optimizer steps (`flips`), sums of terms that cancel, a few large elements, and weights whose error all
positions share. Each of these widens the base where statistics say that it can occur, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.errors import Errors
from astray.comparison.judge.flips import (
    find_choices,
    find_gate_flips,
    follows_choices,
    follows_gates,
    one_call_further,
    update_errors,
)
from astray.comparison.judge.provenance import Provenance
from astray.comparison.judge.sources import Sources
from astray.comparison.rows import Bools, Floats, Ints

ByMeasure = dict[str, Floats]


class Bases(NamedTuple):
    """For each measure and row: base = input_error ⊕ own_rounding. And what else a verdict depends on, by row.

    optimizer_moves: how far apart weights may be because an optimizer moves elements whose gradient is rounding.
    inputs_differ: a source is not bit-identical. inputs_identical: there are recorded sources, and all of them are.
    element_error: how far off single elements of the sources are.
    is_cancelled: a sum of terms that cancel, of which only rounding may be left.
    not_judged: rows about which a measure says nothing.
    weights_drifted: rows of steps in which weights differ, or none was recorded.
    """

    own_rounding: ByMeasure
    input_error: ByMeasure
    base: ByMeasure
    optimizer_moves: Floats
    inputs_differ: Bools
    inputs_identical: Bools
    element_error: Floats
    is_cancelled: Bools
    not_judged: dict[str, Bools]
    weights_drifted: dict[str, Bools]


def find_bases(errors: Errors, sources: Sources, optimizer_moves: Floats) -> Bases:
    """What each row may be off by: because of its sources, and of itself."""
    floats = sources.comparable & (errors.roundoff > 0) & (errors.count > 1)
    bias = _is_bias(sources)
    rms = np.maximum(errors.rms, np.finfo(np.float32).tiny)

    def input_error(column: Floats) -> Floats:
        """The largest error among the sources; that of a bias counts only as far as the bias weighs in the result."""
        plain = sources.largest(np.where(bias, 0.0, column))
        if not np.any(column[bias] > 0):
            return plain
        weighed = np.minimum(sources.largest(np.where(bias, column * errors.rms, 0.0)) / rms, t.MAX_ERROR)
        of_bias = np.minimum(weighed, sources.largest(np.where(bias, column, 0.0)))
        forward = sources.has_provenance(Provenance.CALL, Provenance.CODE) & ~sources.backward
        return np.maximum(plain, np.where(forward, of_bias, sources.largest(column)))

    # How far off single elements are: of the row itself, then of its sources.
    element = np.where(floats, np.maximum(errors.element, np.minimum(optimizer_moves, errors.element_bound)), 0.0)
    element = np.where(np.isnan(errors.values), _no_less_than_inputs(element, sources), element)
    coarsest = _coarsest_roundoff(errors, sources)
    rounding = np.where(coarsest <= t.FLOAT32, t.FINE_SUM * coarsest, coarsest)
    elements = input_error(element)

    # What no input shows: by elements (a few, or all of a slice of them), and by sums.
    gates = find_gate_flips(errors, sources, elements)
    after_gate = one_call_further(gates.worst, sources)
    elements = np.maximum(elements, after_gate)
    in_choice, choice_share = find_choices(errors, sources, elements)
    extra = _mean_of_buffers(errors, sources, floats, rounding, rms)
    extra = np.maximum(extra, update_errors(errors, sources, elements))
    single = np.maximum.reduce([gates.elements, optimizer_moves, extra])
    every = np.maximum(single, np.sqrt(choice_share))
    summed = np.maximum.reduce([gates.sums, choice_share, optimizer_moves / errors.sqrt_count, extra])

    # Rounding averages out in sums over n elements, or over the fewer errors that these have in common.
    spread = t.SUM_SIGMAS * np.maximum(np.where(coarsest <= t.FLOAT32, coarsest, rounding), elements)
    spread = spread / errors.sqrt_count
    spread = np.maximum(spread, t.SUM_SIGMAS * errors.roundoff / _rounded_weights(errors, sources))
    spread = np.maximum(
        spread, t.SUM_SIGMAS * _error_shared_by_positions(np.where(floats, element, 0.0), errors, sources)
    )
    of_sources = np.where(floats, t.SUM_SIGMAS * errors.roundoff / errors.sqrt_count, 0.0)
    sums_rounding = np.maximum(spread, sources.largest(of_sources)) + shared_rounding(coarsest) + summed
    # Where few elements are large they make the norm, and a slice that holds them is as many times further off.
    tail = np.maximum(errors.peak * errors.sqrt_count / t.WORST_ELEMENT, 1.0)
    tail_rounding = (tail - 1) * t.SUM_SIGMAS * np.maximum(rounding, elements) / errors.sqrt_count
    own_rounding = {
        "values": rounding + every,
        "worst": t.WORST_ELEMENT * rounding + every,
        "slices": t.WORST_SLICE * tail * rounding + np.maximum(every, gates.worst),
        "typical": rounding + single,
        "norm": sums_rounding + tail_rounding,
        "mean": sums_rounding,
        "extremes": t.WORST_ELEMENT * rounding + every,
    }

    def shown(column: Floats) -> Floats:
        return np.where(floats, np.nan_to_num(np.minimum(column, t.MAX_ERROR)), 0.0)

    worst = np.maximum(elements, input_error(shown(np.fmax(errors.worst, errors.extremes))))
    sums = input_error(_no_less_than_inputs(shown(errors.sums), sources))
    errors_in = {
        "values": elements.copy(),
        "worst": worst,
        "slices": np.maximum(tail * elements, input_error(shown(errors.slices))),
        "typical": np.maximum(elements, after_gate),
        "norm": sums.copy(),
        "mean": sums,
        "extremes": worst.copy(),
    }
    if np.any(errors.typical > 0):  # else no values were kept, and this measure judges nothing
        typical = np.where(np.isnan(errors.typical), element, np.minimum(errors.typical, t.MAX_ERROR))
        typical = np.maximum(typical, np.minimum(optimizer_moves, errors.element_bound))
        # Attention mixes rows; and a weight's gradient is a sum over rows, so that a single wrong row is in all of it.
        mixed = np.where(sources.provenance == Provenance.GRADIENT, elements, elements / t.ROWS_MIXED)
        errors_in["typical"] = np.maximum.reduce([input_error(np.where(floats, typical, 0.0)), mixed, after_gate])

    cancellation = _find_cancellation(errors, sources)
    terms = np.flatnonzero(cancellation > 1)
    for column in (*own_rounding.values(), *errors_in.values()):
        column[terms] *= cancellation[terms]
        np.minimum(column, t.MAX_ERROR, out=column)
    base = {name: np.sqrt(own**2 + errors_in[name] ** 2) for name, own in own_rounding.items()}

    differs = np.where(sources.comparable & ~errors.identical, 1.0, 0.0)
    difference = sources.largest(differs)
    by_gradient = np.append(differs, 1.0)[sources.applied_gradient]  # without a recorded one, it may have differed
    is_weight = sources.provenance == Provenance.WEIGHT
    inputs_differ: Bools = np.where(is_weight, np.maximum(difference, by_gradient), difference) > 0
    rounding_of_terms = _is_rounding_of_terms(errors, sources)
    # Inside of an optimizer's step rounding gets scales of its own; its effect is judged by the weights.
    nothing = inputs_differ & sources.in_update & ((sources.plane == 1) | (sources.plane == 2))
    nothing |= rounding_of_terms
    few_elements = follows_choices(errors, sources) | follows_gates(gates.elements, errors, sources) | (every > 0)
    few_elements |= sources.has_provenance(Provenance.WEIGHT, Provenance.BUFFER)
    return Bases(
        own_rounding,
        errors_in,
        base,
        optimizer_moves,
        inputs_differ=inputs_differ,
        inputs_identical=sources.has_sources & ~inputs_differ,
        element_error=elements,
        is_cancelled=rounding_of_terms | ((cancellation > 1) & (t.OWN_ROUNDINGS * own_rounding["values"] >= 1)),
        not_judged={
            "values": nothing | in_choice,
            "worst": nothing | few_elements,
            "slices": nothing | in_choice,
            "typical": nothing | in_choice,
            "norm": nothing,
            "mean": nothing,
            "extremes": nothing | few_elements,
        },
        weights_drifted=_find_drift(errors, sources),
    )


def _is_bias(sources: Sources) -> Bools:
    """Parameters that are added: of one dimension, by their name."""
    names = np.array([*(path.rpartition(".")[2].endswith("bias") for path in sources.evidence.paths), False])
    return np.asarray(sources.has_role("parameter") & names[sources.path])


def _no_less_than_inputs(column: Floats, sources: Sources) -> Floats:
    """The errors of results, raised to that of their best input: as sources of later calls they count as no less.

    Errors do not vanish. But statistics are single numbers, and now and then those of the two runs are the same by
    chance, though hardly an element is.
    """
    off = column > 0
    inputs = sources.has_role("input") & off
    smallest = np.full(sources.calls.count + 1, np.inf)
    np.minimum.at(smallest, sources.call[inputs], column[inputs])
    smallest[np.isinf(smallest)] = 0.0
    smallest[-1] = 0.0
    is_result = (sources.provenance == Provenance.CALL) & off
    raised = np.where(is_result, np.maximum(column, smallest[sources.call]), column)
    repeated = np.flatnonzero(sources.provenance == Provenance.SEEN_BEFORE)
    raised[repeated] = np.maximum(raised[repeated], raised[sources.first_seen[repeated]])
    return raised


def _coarsest_roundoff(errors: Errors, sources: Sources) -> Floats:
    """The unit roundoff of the coarsest numbers that each row came from, however many calls ago.

    A float32 sum of bfloat16 products has bfloat16's noise, if those differ at all.
    """
    roundoff = np.where(sources.comparable, errors.roundoff, 0.0)
    roundoffs = roundoff[sources.comparable]
    if not len(roundoffs) or roundoffs.min() == roundoffs.max():
        return roundoff
    coarsest = np.maximum(roundoff, sources.largest(roundoff))
    differs = sources.comparable & ~errors.identical & (roundoff > 0)
    if not differs.any() or roundoff[differs].min() == roundoff[differs].max():
        return coarsest
    return np.maximum(coarsest, sources.largest_of_ancestors(coarsest, differs))


def shared_rounding(roundoff: Floats) -> Floats:
    """What all elements may be off by together, for dtypes of these unit roundoffs."""
    return t.SHARED_ROUNDINGS * np.clip(roundoff, t.STATISTICS_ROUNDOFF, t.FLOAT32)


def _mean_of_buffers(errors: Errors, sources: Sources, floats: Bools, rounding: Floats, rms: Floats) -> Floats:
    """The rounding of buffers that are means over many numbers, which may be much smaller than those numbers are."""
    buffers = sources.provenance == Provenance.BUFFER
    if not buffers.any():
        return np.zeros(len(buffers))
    ratio = np.minimum(sources.largest(np.where(floats, errors.rms, 0.0)) / rms, t.MAX_ERROR)
    return np.where(buffers, np.minimum(rounding * ratio, t.MAX_ERROR), 0.0)


def _rounded_weights(errors: Errors, sources: Sources) -> Floats:
    """√n for the weights that a call rounds to the dtype of its result, as autocast does; ∞ where it rounds none.

    They are rounded once for all positions, so that sums over the result average over no more than n errors.
    """
    weights = sources.has_role("parameter") & (errors.roundoff > 0) & (errors.roundoff <= t.FLOAT32)
    count = np.append(sources.largest_by_call(errors.count, weights), 0.0)[sources.call]
    rounds = (sources.provenance == Provenance.CALL) & ~sources.backward & (errors.roundoff > t.FLOAT32) & (count > 0)
    return np.where(rounds, np.sqrt(count), np.inf)


def _error_shared_by_positions(element: Floats, errors: Errors, sources: Sources) -> Floats:
    """What sums over a result may be off by because of its weights, which are off alike at all positions.

    Activations have a large part in common. What a weight of d × d elements makes of that are d numbers, so sums
    average over d errors and not over all elements of the result: √d = n^¼ for n elements of the weight. The gradient
    of a weight is made without it.
    """
    weights = sources.is_weight & ~errors.identical
    shared = sources.largest(np.where(weights, element / np.sqrt(errors.sqrt_count), 0.0))
    return np.where(sources.has_provenance(Provenance.CALL, Provenance.CODE), shared, 0.0)


def _find_drift(errors: Errors, sources: Sources) -> dict[str, Bools]:
    """For each measure its rows of steps in which a weight differs, or none was recorded.

    The parameters of modules decide; those of functions where there are none. Sums over weights and their gradients,
    which are not made with weights, stay as close as they were.
    """
    distinct, step = np.unique(sources.step, return_inverse=True)

    def per_step(rows: Bools) -> Ints:
        return np.bincount(step[rows], minlength=len(distinct))

    parameters, weights = sources.has_role("parameter"), sources.is_weight
    has_parameters = per_step(parameters) > 0
    has_weights = has_parameters | (per_step(weights) > 0)
    differing = np.where(
        has_parameters, per_step(parameters & ~errors.identical), per_step(weights & ~errors.identical)
    )
    drifted = np.asarray((~has_weights | (differing > 0))[step])
    by_sums = drifted & sources.has_provenance(Provenance.CALL, Provenance.CODE)
    return {
        "values": drifted,
        "worst": drifted,
        "slices": drifted,
        "typical": drifted,
        "norm": by_sums,
        "mean": by_sums,
        "extremes": by_sums,
    }


# -- results that are little more than rounding ------------------------------------------------------------------------


def find_negligible(errors: Errors, sources: Sources) -> Bools:
    """Results that are smaller, in both runs, than the rounding of everything their call was given.

    0 against 1e-9 is infinitely wrong, and fine beside ones. The smallest that was given counts: a mask of −1e38 must
    not make everything beside it small. Sums are taken in float32, whatever the dtype. An update is the difference of
    two weights: one run may move none of them where the other moves one by a rounding.
    """
    negligible = np.zeros(len(errors.roundoff), np.bool_)
    differs = sources.is_result & ~errors.identical & (errors.roundoff > 0)
    at = np.flatnonzero(differs & (sources.provenance == Provenance.CALL))
    if len(at):
        size = np.fmax(*sources.evidence.numbers("absmax", at))
        rounding = 2 * np.minimum(errors.roundoff[at], t.FLOAT32)
        negligible[at] = size <= rounding * sources.smallest_operand(errors.absmax)[at]
    unmoved = at[sources.is_update[at] & (errors.l2[at] == 0)]
    if len(unmoved):  # `update_errors` has the same limit, beside the size of the reference's
        weight = sources.largest_by_call(errors.l2, sources.has_role("parameter"))[sources.call[unmoved]]
        moved = sources.evidence.numbers("l2", unmoved)[1]
        negligible[unmoved] |= moved <= t.UPDATE_ROUNDINGS * errors.roundoff[unmoved] * weight
    return negligible


def _is_rounding_of_terms(errors: Errors, sources: Sources) -> Bools:
    """Gradients of biases that are smaller, in both runs, than one rounding of all the terms they are the sum of.

    What arrives behind a batch norm adds up to zero in each channel. Kernels round differently what they subtract from
    all of a channel, so such roundings add up too, and do not cancel.
    """
    is_rounding = np.zeros(len(errors.roundoff), np.bool_)
    biases = sources.is_parameter_gradient & sources.is_vector
    at = np.flatnonzero(biases & ~errors.identical & (errors.roundoff > 0))
    if len(at):
        size = np.fmax(*sources.evidence.numbers("l2", at))
        rms, count = (np.where(sources.comparable, column, 0.0) for column in (errors.rms, errors.count))
        arriving = sources.largest_arriving_gradient(rms)[at] * sources.largest_arriving_gradient(count)[at]
        terms = arriving / np.sqrt(errors.count[at])
        is_rounding[at] = size <= errors.roundoff[at] * terms
    return is_rounding


def _find_cancellation(errors: Errors, sources: Sources) -> Floats:
    """How many times larger than a gradient the terms are that it is the sum of: its error is that of the terms.

    A weight's gradient is a sum over M positions of products of what arrives at its module and what entered it. Terms
    of random signs add up to √M times their size. One that is much smaller (that of a bias before a batch norm, or of
    the keys of an attention) holds little more than the rounding of its terms.
    """
    ratio = np.ones(len(errors.roundoff))
    l2 = np.maximum(errors.l2, np.finfo(np.float32).tiny)
    has_rounding = errors.roundoff > 0
    # What a function returns as the gradient of a bias is recorded as a result of its backward.
    in_backward = (sources.provenance == Provenance.CALL) & sources.backward
    vectors = np.flatnonzero(in_backward & has_rounding & sources.is_vector)
    if len(vectors):
        arriving = sources.largest(np.where(sources.backward & sources.has_role("input"), errors.l2, 0.0))
        ratio[vectors] = arriving[vectors] / l2[vectors]
    at = np.flatnonzero((sources.provenance == Provenance.GRADIENT) & has_rounding)
    if len(at):
        columns = np.where(sources.comparable, errors.rms, 0.0), np.where(sources.comparable, errors.count, 0.0)
        gradient, positions = (sources.largest_arriving_gradient(column)[at] for column in columns)
        entered, inputs = (sources.largest_module_input(column)[at] for column in columns)
        count, is_matrix = errors.count[at], ~sources.is_vector[at]
        terms = np.where(is_matrix, np.sqrt(positions * inputs / count), positions / count)
        summed = np.sqrt(count * np.maximum(terms, 1.0)) * gradient * np.where(is_matrix, entered, 1.0)
        ratio[at] = summed / l2[at]
    return np.clip(ratio, 1.0, t.MAX_ERROR / t.FLOAT32)
