"""What counts as trouble: the level of each place, and the one cause it has it for.

The rules stand in their order; the first that fits decides. docs/risk.md explains them and their numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.dtype_limits import limits
from astray.store import Coded

LEVELS = ("non-finite", "overflow", "stuck", "underflow", "tight", "calm")
CAUSES = ("non-finite", "head-room", "growth", "limit", "unmoved", "subnormal", "zeros")

NEAR, TIGHT = 1.0, 4.0
"""Powers of two of head-room: a batch twice as unlucky would overflow; sixteen times is what one spike may bring."""

MOST, HALF, SOME = 0.9, 0.5, 0.01
"""Shares: nearly all elements do not move; half of them do not, or are subnormal; one in a hundred is."""


class Judged(NamedTuple):
    """For each place its level, the cause (null where it is calm), and a number that grows as it gets less severe."""

    level: Coded[str]
    cause: Coded[str]
    severity: npt.NDArray[np.float64]


class Room(NamedTuple):
    """Which tensors are close to the end of their dtype, and which are there on purpose."""

    near: npt.NDArray[np.bool_]
    few: npt.NDArray[np.bool_]
    limit: npt.NDArray[np.bool_]


def room_of(bits: npt.NDArray[np.float64], limit: npt.NDArray[np.bool_], coarse: npt.NDArray[np.bool_]) -> Room:
    """From head-room in powers of two (infinite where it is not known), and what is exactly at its dtype's largest.

    Arithmetic that goes too far gives infinity. What is exactly the largest number was put there: a mask, a clamp, or
    for 8-bit floats a scale that fills the range, which makes little head-room no news at all.
    """
    near = (bits < np.where(coarse, 0.0, NEAR)) & ~limit
    return Room(near, limit | (bits < np.where(coarse, NEAR, TIGHT)), limit)


def judge(columns: dict[str, Any]) -> Judged:
    """The level of each place, from what was measured of it."""
    bits, kinds = np.nan_to_num(columns["headroom_bits"], nan=np.inf), columns["dtype"]
    ends = [limits(str(name)) for name in kinds]
    coarse = np.array([end is not None and end.coarse for end in ends])
    narrow = np.array([end is not None and end.narrow for end in ends])
    backward = columns["phase"].codes == columns["phase"].code("backward")
    room = room_of(bits, columns["absmax"] == columns["largest"], coarse)
    # Elements without a gradient, such as the rows of an embedding that were not looked up, have no reason to move.
    stuck = np.nan_to_num(columns["unmoved_with_gradient"], nan=columns["unmoved"] == 1)
    # Where only whole weights can be told apart, one step may be a skipped or a warming-up one.
    stuck = np.where(np.isnan(columns["update_ratio"]) & (columns["watched_steps"] < 2), np.minimum(stuck, HALF), stuck)
    small = columns["subnormal_least"]
    soon = columns["gone_latest"] <= columns["steps"]
    rules = [
        ("non-finite", "non-finite", columns["nonfinite"] > 0),
        ("overflow", "head-room", room.near),
        ("overflow", "growth", soon & ~room.limit & ~coarse),
        ("stuck", "unmoved", stuck >= MOST),
        ("underflow", "subnormal", small >= HALF),
        ("tight", "limit", room.limit),
        ("tight", "head-room", room.few),
        ("tight", "growth", np.isfinite(columns["gone_soonest"]) & ~coarse),
        ("tight", "unmoved", stuck >= HALF),
        ("tight", "subnormal", small >= SOME),
        ("tight", "zeros", (columns["zeros"] == 1) & narrow & backward),
    ]
    masks = [mask for _, _, mask in rules]
    level = np.select(masks, [LEVELS.index(name) for name, _, _ in rules], len(LEVELS) - 1)
    cause = np.select(masks, [CAUSES.index(name) for _, name, _ in rules], -1)
    severity = np.select(
        [level == LEVELS.index(name) for name in ("non-finite", "stuck", "underflow")],
        [columns["step"].astype(np.float64), -stuck, -small],
        bits,
    )
    return Judged(Coded(level.astype(np.int32), list(LEVELS)), Coded(cause.astype(np.int32), list(CAUSES)), severity)
