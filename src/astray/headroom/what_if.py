"""What would become of the tensors of a run in another dtype, from their statistics alone.

What overflows is exact: the largest magnitude is known. What would be lost at the bottom is bounded. A scale that would
help is a power of two: one for all gradients, the largest without overflow, which is where `GradScaler` settles; or for
an 8-bit dtype one for each place, by its largest magnitude over all steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.dtype_limits import DtypeLimits
from astray.headroom.measures import PlaceMeasures, ShareBelow, lost
from astray.headroom.motion import WeightMotion
from astray.headroom.observations import Observations
from astray.headroom.shares import Floats, ShareBounds, StatisticColumns, at_least


class WhatIf(NamedTuple):
    """The places of a run in another dtype."""

    limits: DtypeLimits
    overflows: npt.NDArray[np.bool_]
    beyond: ShareBounds  # which share of non-zero values overflows, in the row with the largest magnitude
    bits: Floats  # head-room in powers of two, negative where it overflows; NaN where all values are zero
    flushed: ShareBelow  # what would become zero
    subnormal: ShareBelow  # what would lose digits, that included
    scale: Floats  # a power of two that would help; NaN where none is applied
    flushed_scaled: ShareBelow
    unmoved_least: Floats  # share of a weight's elements that would not have moved in its last recorded update
    unmoved_estimate: Floats
    loss_scale: float  # the one for all gradients; NaN where there are none

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of a table, each with the dtype behind its name."""
        found = {
            "overflows": self.overflows,
            "overflow_least": self.beyond.least,
            "overflow_most": self.beyond.most,
            "headroom_bits": self.bits,
            **self.flushed.columns("flushed"),
            **self.subnormal.columns("subnormal"),
            "scale": self.scale,
            **self.flushed_scaled.columns("scaled_flushed"),
            "unmoved_least": self.unmoved_least,
            "unmoved_estimate": self.unmoved_estimate,
        }
        return {f"{name}_{self.limits.name}": column for name, column in found.items()}


def imagine(seen: Observations, measured: PlaceMeasures, target: DtypeLimits) -> WhatIf:
    """Every place of a run in the target dtype."""
    values, worst = measured.values, measured.largest_row
    largest = values.absmax[worst]
    with np.errstate(divide="ignore", over="ignore"):
        bits = np.where(largest > 0, np.log2(target.largest) - np.log2(largest), np.nan)
    vanishes = np.nextafter(target.vanishes, np.inf)
    gradients = _gradients(seen) & (largest > 0)
    loss_scale = float(power_of_two(target, largest[gradients].max(keepdims=True))[0]) if gradients.any() else np.nan
    # An 8-bit dtype is used with a scale for each tensor.
    scale = power_of_two(target, largest) if target.coarse else np.where(gradients, loss_scale, np.nan)
    applied = np.nan_to_num(scale, nan=1.0)[seen.place]
    return WhatIf(
        target,
        largest >= target.overflows,
        at_least(values.take(worst), target.overflows),
        bits,
        lost(seen, values, vanishes),
        lost(seen, values, target.tiny),
        scale,
        lost(seen, values, vanishes / applied),
        *_unmoved(values, measured.moving, 2 * measured.columns["half_ulp"], target),
        loss_scale,
    )


def power_of_two(target: DtypeLimits, largest: Floats) -> Floats:
    """The largest power of two by which these magnitudes can be multiplied without overflow; NaN for zero."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = np.floor(np.log2(target.largest) - np.log2(largest))
        scale = np.exp2(exponent)
        # The logarithm is rounded: one up if that still fits, one down if it does not.
        scale = np.where(largest * scale * 2 < target.overflows, scale * 2, scale)
        scale = np.where(largest * scale >= target.overflows, scale / 2, scale)
    return np.where((largest > 0) & np.isfinite(scale), scale, np.nan)


def _unmoved(values: StatisticColumns, moving: WeightMotion, eps: Floats, target: DtypeLimits) -> tuple[Floats, Floats]:
    """Of each weight whose update was recorded, how many elements would not have moved: at least, and by estimate.

    An element stays when what is added is less than half the distance to its next number, which is between a quarter
    and half of ε of it. So those at least 4/ε times as large as the largest update stay for sure. The estimate takes
    weights and updates for normal and independent: |update/weight| is below c in (2/π)·arctan(c·σw/σu) of all cases.
    Half a distance is on average 0.36 ε of a number whose digits are spread evenly on a logarithmic scale.

    Only of weights that are finer as recorded: what a coarser one has not taken is in no update.
    """
    known = (moving.update_row >= 0) & (eps < target.eps)
    weight, update = values.take(np.maximum(moving.weight_row, 0)), values.take(np.maximum(moving.update_row, 0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        still = 1 - update.nonzero / update.finite  # these do not move as it is
        certain = at_least(weight, 4 / target.eps * (1 + target.eps) * update.absmax).least
        least = np.maximum(still, certain * weight.nonzero / weight.finite)
        sizes = (weight.l2 / np.sqrt(weight.nonzero)) / (update.l2 / np.sqrt(update.nonzero))
        guess = still + (1 - still) * 2 / np.pi * np.arctan(0.36 * target.eps * sizes)
        guess = np.where(update.nonzero > 0, np.maximum(guess, least), 1.0)
    return np.where(known, least, np.nan), np.where(known, guess, np.nan)


def _gradients(seen: Observations) -> npt.NDArray[np.bool_]:
    """Which places hold gradients. Not those of operators of the backward pass, which take weights too."""
    backward = seen.where(phase="backward") & ~seen.where(kind="op")
    return backward[seen.first]
