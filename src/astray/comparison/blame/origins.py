"""Which wrong rows have healed, because the call around them computes the same result in another way."""

from __future__ import annotations

import numpy as np

from astray.comparison.rows import Bools
from astray.comparison.verdict import AGREEING, Verdict
from astray.graph import graph_of
from astray.store import RankRun, Table


def healed(pairs: Table, bad: Bools, run: RankRun) -> Bools:
    """Wrong rows right inside a forward call that computes the same result in another way, as other calls show."""
    call = pairs.numbers("call_reference")
    role, verdict, phase = pairs.coded("role"), pairs.coded("verdict").codes, run.calls.coded("phase")
    parent = graph_of(run).parent
    forward = phase.codes != phase.code("backward")
    is_result = np.isin(role.codes, [role.code("output"), role.code("gradient")])
    is_given = np.isin(role.codes, [role.code("parameter"), role.code("state")])

    def has(rows: Bools) -> Bools:
        found = np.zeros(len(run.calls), np.bool_)
        found[call[rows & (call >= 0)]] = True
        return found

    agrees = has(is_result & np.isin(verdict, AGREEING)) & ~has(bad & is_result)
    missing = has(np.ones(len(bad), np.bool_)) & ~has(verdict != Verdict.ONLY_IN_REFERENCE)
    otherwise = np.unique(parent[(missing | has(verdict == Verdict.SHAPE)) & forward])
    contains = np.zeros(len(run.calls), np.bool_)
    contains[otherwise[otherwise >= 0]] = True
    agrees &= contains & forward
    inside = forward & np.append(agrees, False)[parent]
    known = call >= 0
    found = np.zeros(len(bad), np.bool_)
    found[known] = inside[call[known]]
    return found & bad & ~is_given
