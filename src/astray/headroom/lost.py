"""How much of each place lies below a magnitude, in the step where it is most: a bound, and an estimate within it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.observations import Observations
from astray.headroom.shares import Bounds, Floats, Values, below, normal_share


class Lost(NamedTuple):
    """The share of non-zero values below a magnitude, in the row of each place that has most of them."""

    bounds: Bounds
    normal: Floats  # if they were normally distributed, within the bounds
    row: npt.NDArray[np.int64]

    def columns(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Three columns of a table."""
        return {f"{name}_least": self.bounds.least, f"{name}_most": self.bounds.most, f"{name}_normal": self.normal}


def lost(seen: Observations, values: Values, threshold: Floats | float) -> Lost:
    """How much lies below a threshold (one for all, or one per row) where it is most: by lower bound, then by size."""
    thresholds = np.broadcast_to(np.asarray(threshold, np.float64), values.absmax.shape)
    bounds = below(values, thresholds)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.nan_to_num(thresholds / values.l2 * np.sqrt(values.nonzero), posinf=0.0)
    order = np.lexsort((-relative, -bounds.least, seen.place))
    row = order[np.searchsorted(seen.place[order], np.arange(len(seen.first)))]
    here = Bounds(bounds.least[row], bounds.most[row])
    return Lost(here, np.clip(normal_share(values.take(row), thresholds[row]), *here), row)
