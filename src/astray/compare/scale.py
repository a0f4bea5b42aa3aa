"""How large the numbers were that a tensor came from: the scale beside which it may be nothing but rounding.

Only the reference is asked, so that a fault in the candidate cannot excuse itself.
"""

from __future__ import annotations

import numpy as np

from astray.compare import noise
from astray.compare.evidence import Evidence
from astray.compare.keys import one_key
from astray.compare.rows import Bools, Floats, Ints
from astray.record import ROOT


def scales(evidence: Evidence, at: Ints) -> Floats:
    """The scale of these pairs; 0 where it is not known.

    For a result it is the smallest of its call's inputs: a mask of −1e38 must not make everything beside it small. For
    the gradient of a parameter, which has no inputs, it is the largest gradient of the step; or, for that of a vector,
    which is a sum over what arrives at its module, a few times the norm of that. An optimizer brings its results to
    scales of its own, whatever the gradient's: none is known.
    """
    if not len(at):
        return np.empty(0)
    wanted = evidence.pairs.reference[at]
    of_gradient = _has_role(evidence, "gradient")[wanted]
    largest = np.maximum(_largest_gradient(evidence), noise.SUMMED * _arriving(evidence))
    found = np.where(of_gradient, largest[wanted], _smallest_input(evidence)[wanted])
    by_optimizer = (_of_optimizer(evidence) & _has_role(evidence, "output"))[wanted]
    return np.where(by_optimizer, 0.0, found)


def rounding_of_updates(evidence: Evidence, at: Ints) -> Floats:
    """What the rounding of a weight alone may make its update be off by, as a relative error; 0 for other tensors.

    An update is the difference of two weights, each rounded to its dtype. Where it is much smaller than they are,
    hardly any of its digits are sure, however exactly it was computed.
    """
    found = np.zeros(len(at))
    wanted = evidence.pairs.reference[at]
    updates = np.flatnonzero(is_update(evidence, at))
    if not len(updates):
        return found
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    weights = np.flatnonzero(_of_optimizer(evidence) & _has_role(evidence, "parameter") & _has_path(evidence, "weight"))
    weight_of = np.full(len(rows.run.calls), -1)
    weight_of[rows.call_row[weights]] = weights
    weight = weight_of[rows.call_row[wanted[updates]]]
    updates, weight = updates[weight >= 0], weight[weight >= 0]
    eps = evidence.precisions[rows.columns["dtype"][weight]]
    ratios = [
        rows.statistic(name, weight) / _positive(rows.statistic(name, wanted[updates])) for name in ("l2", "absmax")
    ]
    found[updates] = noise.UPDATE_ROUNDINGS * eps * np.nan_to_num(np.fmax(*ratios))
    return found


def is_update(evidence: Evidence, at: Ints) -> Bools:
    """Which pairs are what an optimizer has added to a weight."""
    return (_of_optimizer(evidence) & _has_path(evidence, "update"))[evidence.pairs.reference[at]]


def _smallest_input(evidence: Evidence) -> Floats:
    """For each reference row, the smallest absmax among the inputs of its call that are not all zeros."""
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    absmax = rows.statistic("absmax", np.arange(len(rows)))
    inputs = _has_role(evidence, "input") & (absmax > 0)
    smallest = np.full(len(rows.run.calls), np.inf)
    np.minimum.at(smallest, rows.call_row[inputs], absmax[inputs])
    return np.where(np.isfinite(smallest), smallest, 0.0)[rows.call_row]


def _largest_gradient(evidence: Evidence) -> Floats:
    """For each reference row, the largest absmax among the gradients of its step."""
    rows = evidence.reference
    absmax = rows.statistic("absmax", np.arange(len(rows)))
    gradients = _has_role(evidence, "gradient") & (absmax > 0)
    steps, number = np.unique(rows.columns["step"], return_inverse=True)
    largest = np.zeros(len(steps))
    np.maximum.at(largest, number[gradients], absmax[gradients])
    return largest[number]


def _arriving(evidence: Evidence) -> Floats:
    """For each reference row that is the gradient of a vector, the largest norm of what arrives at its module."""
    rows, found = evidence.reference, np.zeros(len(evidence.reference))
    assert rows.run is not None, "pairs have both sides"
    shape = rows.run.tensors.coded("shape")
    vectors = np.array([*(len(one) == 1 for one in shape.values), False])[shape.codes[rows.tensor]]
    gradients = np.flatnonzero(_has_role(evidence, "gradient") & vectors)
    backward = evidence.phases.index("backward") if "backward" in evidence.phases else -2
    inputs = np.flatnonzero(_has_role(evidence, "input") & (rows.columns["phase"] == backward))
    sites = rows.run.calls.coded("site")
    numbers: dict[str, int] = {}
    around = [numbers.setdefault(site.partition("/")[0], len(numbers)) for site in sites.values]
    owner = [numbers.setdefault(site.rpartition(".")[0] or ROOT, len(numbers)) for site in sites.values]
    site, step = sites.codes[rows.call_row], rows.columns["step"]
    modules = np.concatenate([np.array(around, np.int64)[site[inputs]], np.array(owner, np.int64)[site[gradients]]])
    key = one_key([modules, np.concatenate([step[inputs], step[gradients]])])
    _, number = np.unique(key, return_inverse=True)
    largest = np.zeros(len(number))
    np.fmax.at(largest, number[: len(inputs)], rows.statistic("l2", inputs))
    found[gradients] = largest[number[len(inputs) :]]
    return found


def _of_optimizer(evidence: Evidence) -> Bools:
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    kind = rows.run.calls.coded("kind")
    return np.asarray(kind.codes[rows.call_row] == kind.code("optimizer"))


def _has_path(evidence: Evidence, path: str) -> Bools:
    rows = evidence.reference
    assert rows.run is not None, "pairs have both sides"
    column = rows.run.tensors.coded("path")
    return np.asarray(column.codes[rows.tensor] == column.code(path))


def _positive(numbers: Floats) -> Floats:
    """With NaN where there is nothing to divide by."""
    return np.where(numbers > 0, numbers, np.nan)


def _has_role(evidence: Evidence, role: str) -> Bools:
    code = evidence.roles.index(role) if role in evidence.roles else -2
    return np.asarray(evidence.reference.columns["role"] == code)
