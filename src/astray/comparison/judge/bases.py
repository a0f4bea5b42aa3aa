"""What each row may be off by: its *base*, for each measure.

Reads `errors` and `sources`, feeds `surprise`. The base of a row is what it was given, ⊕ the rounding of its own call.
Four kinds of right difference come from no input, and are a part of the base: sums that are off by √n less than
elements; gates that flip a few elements of a gradient; an optimizer that moves elements whose gradient is rounding;
gradients that are sums of much larger terms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.errors import Errors
from astray.comparison.judge.sources import Producer, Sources
from astray.comparison.rows import Bools, Floats, Ints


class Bases(NamedTuple):
    """For each measure what a row may be off by of itself (`own`), and together with what it was given (`whole`)."""

    own: dict[str, Floats]
    moved: Floats  # weights, by what an optimizer may do to gradients that are nothing but rounding
    given: dict[str, Floats]
    whole: dict[str, Floats]
    spoilt: Bools  # rows of which something they came from is not bit-identical
    unspoilt: Bools  # rows that came from something that was recorded, all of which is bit-identical
    element: Floats  # what elements of what it came from are off by
    cancelled: Bools  # sums of terms that cancel, where only rounding may be left
    silent: dict[str, Bools]  # rows that a measure does not judge
    drifted: dict[str, Bools]  # rows that have come of weights which are not known to be the same


def find_bases(errors: Errors, sources: Sources, moved: Floats) -> Bases:
    """What each row may be off by: of itself, and because of what it came from.

    moved: what optimizers may have moved weights by.
    """
    unit = errors.unit
    bias = _is_bias(sources)
    real = sources.known & (unit > 0) & (errors.count > 1)
    element = np.where(real, np.maximum(errors.element, np.minimum(moved, errors.at_most)), 0.0)
    rms = np.maximum(errors.rms, np.finfo(np.float32).tiny)

    def given(column: Floats) -> Floats:
        """What was given is off by, a bias only as far as it weighs in the result."""
        plain = sources.largest(np.where(bias, 0.0, column))
        if not np.any(column[bias] > 0):
            return plain
        weighed = np.minimum(sources.largest(np.where(bias, column * errors.rms, 0.0)) / rms, t.LARGEST)
        whole = np.minimum(weighed, sources.largest(np.where(bias, column, 0.0)))
        forward = sources.is_unit(Producer.CALL, Producer.CODE) & ~sources.backward
        return np.maximum(plain, np.where(forward, whole, sources.largest(column)))

    element = np.where(np.isnan(errors.values), _no_less_than_given(element, sources), element)
    coarsest = _coarsest(errors, sources)
    rounding = np.where(coarsest <= t.FLOAT32, t.FINE_SUM * coarsest, coarsest)
    elements = given(element)
    flips, at_worst, flipped_sums = _gates(errors, sources, elements)
    gated = _one_further(at_worst, sources)
    after_gates = _after_gates(flips, errors, sources)
    elements = np.maximum(elements, gated)
    chosen, shares = _choices(errors, sources, elements)
    few, flips, flipped_sums = flips, np.maximum(flips, np.sqrt(shares)), np.maximum(flipped_sums, shares)
    buffer = sources.unit == Producer.BUFFER  # a mean over many numbers, which may be much smaller than they are
    if buffer.any():
        size = np.minimum(sources.largest(np.where(real, errors.rms, 0.0)) / rms, t.LARGEST)
        averaging = np.where(buffer, np.minimum(rounding * size, t.LARGEST), 0.0)
        few, flips, flipped_sums = (np.maximum(column, averaging) for column in (few, flips, flipped_sums))
    few, flips, flipped_sums = (
        np.maximum(few, moved),
        np.maximum(flips, moved),
        np.maximum(flipped_sums, moved / errors.root),
    )
    updates = _updates(errors, sources, elements)
    few, flips, flipped_sums = (np.maximum(column, updates) for column in (few, flips, flipped_sums))
    spread = t.SUMS * np.maximum(np.where(coarsest <= t.FLOAT32, coarsest, rounding), elements) / errors.root
    spread = np.maximum(spread, t.SUMS * unit / _rounded_weights(errors, sources))
    spread = np.maximum(spread, t.SUMS * _shared_by_positions(np.where(real, element, 0.0), errors, sources))
    spread = np.maximum(spread, sources.largest(np.where(real, t.SUMS * unit / errors.root, 0.0)))
    sliced = np.where(real, np.nan_to_num(np.minimum(errors.slices, t.LARGEST)), 0.0)
    typical = elements
    if np.any(errors.typical > 0):  # else no values were kept, and it judges nothing
        shown = np.where(np.isnan(errors.typical), element, np.minimum(errors.typical, t.LARGEST))
        typical = given(np.where(real, np.maximum(shown, np.minimum(moved, errors.at_most)), 0.0))
        # A gradient of a weight is a sum over rows, so that one that is off is in all of its own; attention mixes them.
        mixed = np.where(sources.unit == Producer.GRADIENT, elements, elements / t.MIXING)
        typical = np.maximum(typical, mixed)
    sums = np.where(real, np.nan_to_num(np.minimum(errors.sums, t.LARGEST)), 0.0)
    sums = _no_less_than_given(sums, sources)
    worst = np.where(real, np.nan_to_num(np.minimum(np.fmax(errors.worst, errors.extremes), t.LARGEST)), 0.0)
    summed = spread + shared_rounding(coarsest) + flipped_sums
    # Where few elements are large they make the norm, and a slice with them is as many times larger than the others.
    tail = np.maximum(errors.peak * errors.root / t.WORST, 1.0)
    in_norm = summed + (tail - 1) * t.SUMS * np.maximum(rounding, elements) / errors.root
    single = t.WORST * rounding + flips
    cancelled = _cancellation(errors, sources)
    terms = np.flatnonzero(cancelled > 1)
    far, together = np.maximum(elements, given(worst)), given(sums)
    of_itself = (
        rounding + flips,
        single,
        t.SLICED * tail * rounding + np.maximum(flips, at_worst),
        rounding + few,
        in_norm,
        summed,
    )
    because = (
        elements.copy(),
        far,
        np.maximum(tail * elements, given(sliced)),
        np.maximum(typical, gated),
        together.copy(),
        together,
    )
    for column in (*of_itself, *because):
        column[terms] *= cancelled[terms]
        np.minimum(column, t.LARGEST, out=column)
    own, levels = _by_measure(*of_itself), _by_measure(*because)
    whole = _by_measure(*(np.sqrt(one * one + other * other) for one, other in zip(of_itself, because, strict=True)))
    some = sources.is_explained
    differs = np.where(sources.known & ~errors.identical, 1.0, 0.0)
    spoilt = sources.largest(differs)
    moved_by = np.append(differs, 1.0)[sources.gradient_before]
    spoilt = np.where(sources.unit == Producer.WEIGHT, np.maximum(spoilt, moved_by), spoilt)
    singles = (
        _after_choices(errors, sources) | after_gates | (flips > 0) | sources.is_unit(Producer.WEIGHT, Producer.BUFFER)
    )
    # An optimizer brings rounding to scales of its own. What it makes of it shows in the weights.
    nothing = (spoilt > 0) & sources.in_update & ((sources.plane == 1) | (sources.plane == 2))
    rounded = _is_rounding_of_terms(errors, sources)
    nothing |= rounded
    return Bases(
        own,
        moved,
        levels,
        whole,
        spoilt=spoilt > 0,
        unspoilt=some & (spoilt == 0),
        element=elements,
        cancelled=rounded | ((cancelled > 1) & (t.OWN * own["values"] >= 1)),
        silent={
            "values": nothing | chosen,
            "norm": nothing,
            "mean": nothing,
            "worst": singles | nothing,
            "slices": nothing | chosen,
            "typical": nothing | chosen,
            "extremes": singles | nothing,
        },
        drifted=_find_drifted(errors, sources),
    )


def _find_drifted(errors: Errors, sources: Sources) -> dict[str, Bools]:
    """For each measure its rows of steps in which a weight differs, or none was recorded.

    Modules decide; functions where there are none. Sums over weights and their gradients, which are not made with
    weights, stay as close as they were.
    """
    distinct, step = np.unique(sources.step, return_inverse=True)

    def count(rows: Bools) -> Ints:
        return np.bincount(step[rows], minlength=len(distinct))

    of_modules, weights = sources.has_role("parameter"), sources.is_weight
    told = count(of_modules) > 0
    known = told | (count(weights) > 0)
    differs = np.where(told, count(of_modules & ~errors.identical), count(weights & ~errors.identical)) > 0
    all_ = np.asarray((~known | differs)[step])
    made = all_ & sources.is_unit(Producer.CALL, Producer.CODE)
    return {
        "values": all_,
        "worst": all_,
        "slices": all_,
        "typical": all_,
        "norm": made,
        "mean": made,
        "extremes": made,
    }


def _no_less_than_given(column: Floats, sources: Sources) -> Floats:
    """What results are off by, as far as later calls are explained by it: no less than the best of their inputs.

    Errors do not vanish. But statistics are single numbers, and now and then those of the two runs are the same by
    chance, though hardly an element is.
    """
    off = column > 0
    inputs = sources.has_role("input") & off
    smallest = np.full(sources.calls.count + 1, np.inf)
    np.minimum.at(smallest, sources.call[inputs], column[inputs])
    smallest[np.isinf(smallest)] = 0.0
    smallest[-1] = 0.0
    found = np.where((sources.unit == Producer.CALL) & off, np.maximum(column, smallest[sources.call]), column)
    carried = np.flatnonzero(sources.unit == Producer.CARRIED)
    found[carried] = np.maximum(found[carried], found[sources.carried_from[carried]])
    return found


def _shared_by_positions(element: Floats, errors: Errors, sources: Sources) -> Floats:
    """What sums over a result may be off by because of its weights, which are off alike at all positions.

    Activations have a large part in common. What a weight of d × d elements makes of that are d numbers, so sums
    average over d errors and not over all elements of the result: √d = n^¼ for n elements of the weight. The gradient
    of a weight is made without it.
    """
    weights = sources.is_weight & ~errors.identical
    shared = sources.largest(np.where(weights, element / np.sqrt(errors.root), 0.0))
    return np.where(sources.is_unit(Producer.CALL, Producer.CODE), shared, 0.0)


def _rounded_weights(errors: Errors, sources: Sources) -> Floats:
    """√n for the weights that a call rounds to the dtype of its result, as autocast does; ∞ where it rounds none.

    They are rounded once for all positions, so that its sums average over no more of these errors.
    """
    weights = sources.has_role("parameter") & (errors.unit > 0) & (errors.unit <= t.FLOAT32)
    count = np.append(sources.by_call(errors.count, weights), 0.0)[sources.call]
    rounds = (sources.unit == Producer.CALL) & ~sources.backward & (errors.unit > t.FLOAT32) & (count > 0)
    return np.where(rounds, np.sqrt(count), np.inf)


def _by_measure(
    values: Floats, single: Floats, slices: Floats, typical: Floats, norm: Floats, mean: Floats
) -> dict[str, Floats]:
    """For each measure its column: of all elements, of single ones, of slices, or of sums over all."""
    return {
        "values": values, "worst": single, "slices": slices, "typical": typical, "norm": norm, "mean": mean,
        "extremes": single,
    }  # fmt: skip


def shared_rounding(unit: Floats) -> Floats:
    """What all elements may be off by together, for dtypes of these unit roundoffs."""
    return t.SHARED * np.clip(unit, t.EXACT, t.FLOAT32)


def find_negligible(errors: Errors, sources: Sources) -> Bools:
    """Results that are smaller, in both runs, than the rounding of whatever their call was given: zero but for that.

    0 against 1e-9 is infinitely wrong, and fine beside ones. The smallest that was given counts: a mask of −1e38 must
    not make everything beside it small. Sums are taken in float32, whatever the dtype.
    """
    found = np.zeros(len(errors.unit), np.bool_)
    at = np.flatnonzero(sources.is_result & ~errors.identical & (errors.unit > 0) & (sources.unit == Producer.CALL))
    if len(at):
        size = np.fmax(*sources.evidence.numbers("absmax", at))
        rounding = 2 * np.minimum(errors.unit[at], t.FLOAT32)
        found[at] = size <= rounding * sources.smallest_given(errors.absmax)[at]
    return found


def _is_rounding_of_terms(errors: Errors, sources: Sources) -> Bools:
    """Gradients of biases that are smaller, in both runs, than one rounding of all the terms they are the sum of.

    What arrives behind a batch norm adds up to zero in each channel. Kernels round differently what they subtract from
    all of a channel, so such roundings add up too, and do not cancel.
    """
    found = np.zeros(len(errors.unit), np.bool_)
    at = np.flatnonzero(sources.unit_of_gradients & sources.is_vector & ~errors.identical & (errors.unit > 0))
    if len(at):
        size = np.fmax(*sources.evidence.numbers("l2", at))
        rms, count = (np.where(sources.known, column, 0.0) for column in (errors.rms, errors.count))
        terms = sources.arriving(rms)[at] * sources.arriving(count)[at] / np.sqrt(errors.count[at])
        found[at] = size <= errors.unit[at] * terms
    return found


def _cancellation(errors: Errors, sources: Sources) -> Floats:
    """How many times larger than a gradient the terms are that it is the sum of: its error is that of the terms.

    A weight's gradient is a sum over M positions of products of what arrives at its module and what entered it. Terms
    of random signs add up to √M times their size. One that is much smaller (that of a bias before a batch norm, or of
    the keys of an attention) holds little more than the rounding of its terms.
    """
    found = np.ones(len(errors.unit))
    size = np.maximum(errors.size, np.finfo(np.float32).tiny)
    vectors = np.flatnonzero((sources.unit == Producer.CALL) & sources.backward & (errors.unit > 0) & sources.is_vector)
    if len(vectors):  # what a function gives for a bias, as its module's gradient
        arrives = sources.largest(np.where(sources.backward & sources.has_role("input"), errors.size, 0.0))
        found[vectors] = arrives[vectors] / size[vectors]
    at = np.flatnonzero((sources.unit == Producer.GRADIENT) & (errors.unit > 0))
    if len(at):
        rows = np.where(sources.known, errors.rms, 0.0), np.where(sources.known, errors.count, 0.0)
        gradient, positions = (sources.arriving(column)[at] for column in rows)
        entered, inputs = (sources.entering(column)[at] for column in rows)
        count, matrix = errors.count[at], ~sources.is_vector[at]
        terms = np.where(matrix, np.sqrt(positions * inputs / count), positions / count)
        summed = np.sqrt(count * np.maximum(terms, 1.0)) * gradient * np.where(matrix, entered, 1.0)
        found[at] = summed / size[at]
    return np.clip(found, 1.0, t.LARGEST / t.FLOAT32)


def _one_further(flips: Floats, sources: Sources) -> Floats:
    """What flipped gates have done to gradients that come of theirs: few elements, which hardly show in statistics.

    A batch norm brings each channel to a scale of its own, and any of those few may be its largest. It holds for calls
    with no others inside: what is inside explains the rest.
    """
    if not flips.any():
        return flips
    carried = np.flatnonzero(sources.unit == Producer.CARRIED)
    seen = flips.copy()
    seen[carried] = flips[sources.carried_from[carried]]
    further = sources.backward & sources.is_unit(Producer.CALL, Producer.GRADIENT) & sources.is_innermost
    return np.where(further, sources.largest(seen), 0.0)


def _after_gates(flips: Floats, errors: Errors, sources: Sources) -> Bools:
    """Gradients that came of flipped gates, however many calls ago: any element of them may be the one that moved."""
    if not flips.any():
        return np.zeros(len(flips), np.bool_)
    rows = sources.backward & sources.known & ~errors.identical
    return np.asarray(_carried(np.where(flips > 0, 1.0, 0.0), rows, sources) > 0)


def _choices(errors: Errors, sources: Sources, elements: Floats) -> tuple[Bools, Floats]:
    """Rows inside of calls that were given a choice that fell another way, and for all of such calls how many did.

    Inside, what belongs to the same choice lies together: where one falls another way, all that is behind it moves.
    """
    nothing = np.zeros(len(elements), np.bool_), np.zeros(len(elements))
    given = sources.is_given & (errors.unit == 0) & ~errors.identical & (sources.unit == Producer.CARRIED)
    given[given] = sources.is_unit(Producer.CALL, Producer.CODE)[sources.carried_from[given]]
    if not given.any():
        return nothing
    count = np.append(sources.by_call(errors.count, given), 0.0)
    calls, call = sources.calls, sources.call
    outer = np.append(calls.enclosing, -1)[call]
    own, around = (np.maximum(count[one], count[np.append(calls.forward_of, -1)[one]]) for one in (call, outer))
    of = np.where(sources.is_unit(Producer.CALL, Producer.CODE), np.maximum(own, around), 0.0)
    many = np.maximum(of, 1.0)
    share = _likely(many * np.minimum(1.0, t.FLIPPED * elements), many) / many
    return (around > 0) & (of > 0), np.where(of > 0, share, 0.0)


def _after_choices(errors: Errors, sources: Sources) -> Bools:
    """Rows that came of a choice that fell another way, such as a router's: a few of their elements are others."""
    chosen: Bools = sources.known & (errors.unit == 0) & ~errors.identical & (sources.unit == Producer.CALL)
    if not chosen.any():
        return chosen
    return np.asarray(_carried(np.where(chosen, 1.0, 0.0), sources.known & ~errors.identical, sources) > 0)


def _carried(column: Floats, rows: Bools, sources: Sources) -> Floats:
    """A column of some rows, each with the largest number of all that it came from, however many calls ago."""
    carried = np.where(rows, column, 0.0)
    for _ in range(t.LONGEST):
        further = np.where(rows, np.maximum(carried, sources.largest(carried)), 0.0)
        if np.array_equal(further, carried):
            break
        carried = further
    return carried


def _coarsest(errors: Errors, sources: Sources) -> Floats:
    """The unit roundoff of the coarsest numbers that each row came from, however many calls ago.

    A float32 sum of bfloat16 products has bfloat16's noise, if those differ at all.
    """
    unit = np.where(sources.known, errors.unit, 0.0)
    units = unit[sources.known]
    if not len(units) or units.min() == units.max():
        return unit
    found = np.maximum(unit, sources.largest(unit))
    differs = sources.known & ~errors.identical & (unit > 0)
    if not differs.any() or unit[differs].min() == unit[differs].max():
        return found
    return np.maximum(found, _carried(found, differs, sources))


def _updates(errors: Errors, sources: Sources, elements: Floats) -> Floats:
    """What an optimizer's recorded results may be off by besides.

    An update is the difference of two weights, each rounded to its dtype. And where a gradient is off, elements of it
    that are nothing but rounding move up in one run and down in the other.
    """
    found = np.zeros(len(errors.unit))
    at = np.flatnonzero((sources.unit == Producer.CALL) & sources.of_optimizer & (errors.unit > 0) & (errors.size > 0))
    if not len(at):
        return found
    call, is_update = sources.call[at], sources.is_update[at]
    weight = sources.by_call(errors.size, sources.has_role("parameter"))[call]
    move = sources.by_call(errors.absmax, sources.is_update & sources.is_result)[call]
    count = errors.count[at]
    flipped = _likely(count * np.minimum(1.0, t.FLIPPED * (elements[at] + errors.unit[at])), count)
    flips = np.where(elements[at] > 0, t.MOVED * move * np.sqrt(flipped), 0.0)
    rounding = np.where(is_update, t.UPDATED * errors.unit[at] * weight, 0.0)
    found[at] = np.minimum((flips + rounding) / errors.size[at], t.LARGEST)
    return found


def _is_bias(sources: Sources) -> Bools:
    """Parameters that are added: of one dimension, by their name."""
    words = np.array([*(path.rpartition(".")[2].endswith("bias") for path in sources.evidence.paths), False])
    return np.asarray(sources.has_role("parameter") & words[sources.path])


def _likely(mean: Floats, count: Floats) -> Floats:
    """How many elements may flip where so many do on average."""
    return np.asarray(np.minimum(count, mean + t.FLIPS_SPREAD * np.sqrt(mean) + 1))


def _gates(errors: Errors, sources: Sources, elements: Floats) -> tuple[Floats, Floats, Floats]:
    """What flipped gates may do to gradients, in elements, in the slice that has most of them, and in sums.

    A gradient that gained zeros has passed a gate. How many flip follows from the error of what the forward call saw,
    and from how many zeros there are more or less now. Each of k changes it by an element: a few of them by as much as
    the largest, many by their root mean square, up to some standard deviations. As many open as close, but for the
    zeros that there are more: only those change the norm, and what chance leaves of the others.
    """
    nothing = np.zeros(len(elements))
    if not np.any(sources.backward & (errors.sparse > t.GATED)):
        return nothing, nothing, nothing
    arrived = sources.largest(np.where(sources.backward & sources.known, errors.sparse, 0.0))
    at = np.flatnonzero(
        sources.backward & sources.known & (errors.unit > 0) & (errors.sparse > arrived + t.GATED) & (errors.size > 0)
        & sources.is_unit(Producer.CALL, Producer.CODE)
    )  # fmt: skip
    if not len(at):
        return nothing, nothing, nothing
    forward = sources.largest(np.where(sources.backward, 0.0, errors.element))[at]
    mean = errors.count[at] * np.minimum(1.0, t.FLIPPED * forward) + errors.flips[at]
    count = np.where(mean > 0, _likely(mean, errors.count[at]), 0.0)
    peak, root = errors.peak[at], np.sqrt(count)
    typical = 1 / np.sqrt(np.maximum(errors.count[at] * (1 - errors.sparse[at]), 1.0))  # of elements, beside the norm
    scatter = t.FLIPS_SPREAD * root * peak * typical  # of the squares of k elements, whose fourth power is at most this
    elements, at_worst, sums = nothing.copy(), nothing.copy(), nothing.copy()
    at_worst[at] = root * peak
    elements[at] = np.minimum(root * peak, np.sqrt(count * typical**2 + scatter + peak**2))  # one may be the largest
    in_norm = np.minimum(count * peak**2, errors.flips[at] * typical**2 + scatter) / 2
    in_mean = root * np.minimum(peak, t.FLIPS_SPREAD * typical) / np.sqrt(errors.count[at])
    sums[at] = in_norm + in_mean
    return elements, at_worst, sums


def _at_least_typical(moves: Floats, steps: Ints) -> Floats:
    """The moves of weights; one whose extremes stayed where they were has moved as far as the others of its step."""
    found = moves.copy()
    for here in _by_step(steps):
        found[here] = np.maximum(moves[here], np.median(moves[here]))
    return found


def _by_step(steps: Ints) -> list[Ints]:
    """The places of each step, one step after another."""
    order = np.argsort(steps, kind="stable")
    begins = np.flatnonzero(np.diff(steps[order], prepend=-1))
    return np.split(order, begins[1:])


def moves_of_optimizers(errors: Errors, sources: Sources, asked: Bools, known: Floats) -> Floats:
    """What weights may be off by because an optimizer moved elements whose gradient is nothing but rounding.

    Adam moves every element by about its learning rate, be its gradient ever so small. How far, is taken from what the
    statistics of the weight moved in the reference; how many elements, from the error of the gradient. It is `known`
    of the rows that are not asked for.
    """
    found = known.copy()
    weights = np.flatnonzero((sources.unit == Producer.WEIGHT) & (sources.last_seen >= 0) & asked)
    if len(weights):
        before = sources.last_seen[weights]
        move = _at_least_typical(_move(sources, weights, before), sources.step[weights])
        own = _flipped(errors, sources, weights, move, np.ones(len(weights)))
        for here in _by_step(sources.step[weights]):  # what a step adds is there in the next
            found[weights[here]] = np.minimum(own[here] + found[before[here]], t.LARGEST)
    stepped = np.flatnonzero((sources.unit == Producer.CALL) & (sources.stepped_from >= 0) & (errors.unit > 0) & asked)
    if len(stepped):  # where the step itself was recorded
        before = sources.stepped_from[stepped]
        update = np.isin(
            sources.path[stepped], [n for n, path in enumerate(sources.evidence.paths) if path == "update"]
        )
        move = np.where(update, errors.rms[stepped], _move(sources, stepped, before))
        given = sources.largest(np.where(sources.known, errors.element, 0.0))[stepped]
        own = _flipped(errors, sources, stepped, move, np.minimum(1.0, t.FLIPPED * (given + errors.unit[stepped])))
        own[given == 0] = 0.0
        found[stepped] = np.minimum(own + np.where(update, 0.0, found[before]), t.LARGEST)
    return found


def _move(sources: Sources, rows: Ints, before: Ints) -> Floats:
    """How far the statistics of some rows have moved since others, in the reference."""
    numbers = sources.evidence.numbers
    moves = [np.abs(numbers(name, rows)[0] - numbers(name, before)[0]) for name in ("min", "max", "mean", "std")]
    return np.asarray(np.nan_to_num(np.fmax.reduce(moves)))


def _flipped(errors: Errors, sources: Sources, rows: Ints, move: Floats, share: Floats) -> Floats:
    """What rows are off by, relatively, if elements moved the other way: by the gradient, or else such a share."""
    gradient = sources.gradient_before[rows]
    known = gradient >= 0
    # The largest of normal numbers is four times as large as they are on average. Where it is more, most are smaller.
    tail = np.maximum(errors.peak[gradient] * errors.root[gradient] / t.WORST, 1.0)
    off = errors.element[gradient] + errors.unit[gradient]
    share = np.where(known, np.minimum(1.0, t.FLIPPED * tail * off), share)
    flipped = _likely(errors.count[rows] * share, errors.count[rows])
    size = np.maximum(errors.size[rows], np.finfo(np.float32).tiny)
    own = np.minimum(t.MOVED * move * np.sqrt(flipped) / size, t.LARGEST)
    own[known & errors.identical[gradient]] = 0.0
    return own
