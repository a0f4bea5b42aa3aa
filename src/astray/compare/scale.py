"""How large the numbers were that a tensor came from: the scale beside which it may be nothing but rounding.

Only the reference is asked, so that a fault in the candidate cannot excuse itself.
"""

from __future__ import annotations

import numpy as np

from astray.compare.evidence import Evidence
from astray.compare.rows import Bools, Floats, Ints


def scales(evidence: Evidence, at: Ints) -> Floats:
    """The scale of these pairs; 0 where it is not known.

    For a result it is the smallest of its call's inputs: a mask of −1e38 must not make everything beside it small. For
    the gradient of a parameter, which has no inputs, it is the largest gradient of the step.
    """
    if not len(at):
        return np.empty(0)
    wanted = evidence.pairs.reference[at]
    of_gradient = _has_role(evidence, "gradient")[wanted]
    return np.where(of_gradient, _largest_gradient(evidence)[wanted], _smallest_input(evidence)[wanted])


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


def _has_role(evidence: Evidence, role: str) -> Bools:
    code = evidence.roles.index(role) if role in evidence.roles else -2
    return np.asarray(evidence.reference.columns["role"] == code)
