"""What is measured of each place, over all its observations: head-room, its growth, zeros, subnormal numbers, motion.

From statistics alone. Places are in order of their first appearance; docs/risk.md explains every column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.dtype_limits import limits
from astray.headroom.lost import lost
from astray.headroom.motion import Motion, motion
from astray.headroom.observations import OF_CALL, OF_TENSOR, Observations
from astray.headroom.shares import Floats, Values
from astray.headroom.trend import growth

Ints = npt.NDArray[np.int64]

HORIZON = 10
"""A rate seen over so many steps is not followed further than ten times as many into the future."""


class Measured(NamedTuple):
    """The columns of all places, and what they were made from."""

    columns: dict[str, Any]
    values: Values  # of every row
    row: Ints  # for each place the row that its columns name
    largest_row: Ints  # and the one with its largest magnitude
    moving: Motion


def measure(seen: Observations) -> Measured:
    """All columns of a table of risks but the judgement."""
    values, at = seen.values(), seen.numbers
    bad = at["nan"] + at["inf"] > 0
    nonfinite = np.bincount(seen.place, weights=bad).astype(np.int64)
    largest_row = _first_of_each(seen, -values.absmax)
    row = np.where(nonfinite > 0, _first_of_each(seen, np.where(bad, at["step"], np.inf)), largest_row)
    words = {name: seen.words[name].take(seen.first) for name in (*OF_CALL, *OF_TENSOR)}
    ends = [limits(str(name)) for name in words["dtype"]]
    largest, tiny, eps = (np.array([getattr(end, name) for end in ends]) for name in ("largest", "tiny", "eps"))
    absmax = np.where(values.finite[largest_row] > 0, values.absmax[largest_row], np.nan)
    small, moving = lost(seen, values, tiny[seen.place]), motion(seen)
    columns: dict[str, Any] = {
        **words,
        **{name: at[name][row] for name in ("rank", "step", "micro", "call")},
        "observations": np.bincount(seen.place),
        "nonfinite": nonfinite,
        "nan": at["nan"][row],
        "inf": at["inf"][row],
        "absmax": absmax,
        "largest": largest,
        **_headroom(absmax, largest),
        **_growth(seen, values.absmax, absmax, largest),
        "zeros": _share_of_zeros(seen, values),
        **small.columns("subnormal"),
        "subnormal_step": at["step"][small.row],
        "half_ulp": eps / 2,
        **moving.columns(),
    }
    return Measured(columns, values, row, largest_row, moving)


def _first_of_each(seen: Observations, key: Floats) -> Ints:
    """The row of each place with the smallest key; of several the one in the earliest step, then of the lowest rank."""
    order = np.lexsort((np.arange(len(seen)), seen.numbers["step"], key, seen.place))
    return order[np.searchsorted(seen.place[order], np.arange(len(seen.first)))]


def _headroom(absmax: Floats, largest: Floats) -> dict[str, Floats]:
    """As a factor and in powers of two; null where there is no number but zero."""
    with np.errstate(divide="ignore", over="ignore"):
        some = absmax > 0
        factor = np.where(some, largest / np.where(some, absmax, 1), np.nan)
        bits = np.where(some, np.log2(largest) - np.log2(np.where(some, absmax, 1)), np.nan)
    return {"headroom": factor, "headroom_bits": np.maximum(bits, 0.0)}


def _growth(seen: Observations, absmax: Floats, worst: Floats, largest: Floats) -> dict[str, npt.NDArray[Any]]:
    """How many bits of head-room each step takes, and in how many more steps none would be left."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = growth(seen.place, seen.numbers["step"], np.log2(absmax), len(seen.first))
        left = np.log2(largest) - np.log2(worst)
        soonest, latest = left / found.high, left / found.low
    far = HORIZON * found.span
    return {
        "steps": found.steps,
        "growth_bits": found.rate,
        "growth_low": found.low,
        "growth_high": found.high,
        "gone_soonest": np.where(soonest <= far, soonest, np.nan),
        "gone_latest": np.where(latest <= far, latest, np.nan),
    }


def _share_of_zeros(seen: Observations, values: Values) -> Floats:
    """Zeros among all finite values of all observations, exact; null where none is finite."""
    zeros = np.bincount(seen.place, weights=values.finite - values.nonzero)
    finite = np.bincount(seen.place, weights=values.finite)
    return np.where(finite > 0, zeros / np.maximum(finite, 1), np.nan)
