"""A factor that all gradients of a step have in common: a loss scale, a mean for a sum, ranks that add up.

Reads `sources` and the norms of both sides, feeds `errors`. It is one finding, said where gradients come in from
outside; what agrees after dividing by it agrees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.sources import Sources
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Floats


class Scaling(NamedTuple):
    """For each row the factor by which its candidate is divided, 1 for most; and the rows where it comes in."""

    factor: Floats
    entries: Bools

    @property
    def found(self) -> bool:
        return bool(self.entries.any())


def find_scaling(evidence: Evidence, sources: Sources) -> Scaling:
    """Compare the norms of all gradients, step by step."""
    factor = np.ones(len(sources.call))
    entries = np.zeros(len(sources.call), np.bool_)
    gradients = sources.backward & sources.known
    outermost = gradients & sources.has_role("input") & (sources.enclosing < 0)
    ratio = _ratios(evidence, gradients)
    for step in np.unique(sources.step[outermost]).tolist():
        here = gradients & (sources.step == step) & ~np.isnan(ratio)
        common = _common(ratio[here])
        begins = here & outermost
        if common is None or not begins.any() or np.any(np.abs(ratio[begins] - common) > abs(common - 1) / 4):
            continue
        factor[here] = common
        entries |= begins
    return Scaling(factor, entries)


def _ratios(evidence: Evidence, rows: Bools) -> Floats:
    """By how much the norms of some rows differ; NaN where they do not tell, or no float is that factor."""
    found = np.full(len(rows), np.nan)
    at = np.flatnonzero(rows)
    if len(at):
        reference, candidate = evidence.numbers("l2", at)
        told = (reference > 0) & (candidate > 0)
        ratio = candidate[told] / reference[told]
        found[at[told]] = np.where((ratio > 0) & np.isfinite(ratio), ratio, np.nan)
    return found


def _common(ratios: Floats) -> float | None:
    """The factor that nearly all ratios are; None where they have none in common but one."""
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    alike = np.abs(ratios / middle - 1) <= t.FACTOR_SPREAD
    return middle if abs(middle - 1) > t.FACTOR_LEAST and alike.mean() >= t.FACTOR_SHARE else None
