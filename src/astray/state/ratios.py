"""Ratios of states: how large updates are beside the weights they change."""

from __future__ import annotations

from astray.state.naming import Pattern
from astray.state.state_dict import StateDict


def trust_ratio(update: StateDict, weight: StateDict, pattern: Pattern | None = None) -> StateDict:
    """|update| / |weight| of each parameter, by their L2 norms: a state of numbers.

    >>> astray.state.trust_ratio(update, weight, pattern=".*mlp.*").describe(lw=True)

    This is the reciprocal of what layer-wise adaptive optimizers call the trust ratio. Where a weight is 0 it is
    infinite, or NaN if nothing was to be updated either.
    """
    return update.norm2(True, pattern) / weight.norm2(True, pattern)
