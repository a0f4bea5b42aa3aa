"""Which call a tensor comes from and who takes it: the same bits, seen elsewhere in the run.

Two sightings of one tensor share what `alarms.step_rows.StepRows.identity` takes for it: fingerprint, dtype and number
of elements. What only modules were recorded of may change between two calls unseen; then there is no link.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.store import RankRun

Ints = npt.NDArray[np.int64]

MOST = 12
"""Links that are told of one tensor; a learning rate or a mask may be taken by hundreds of calls."""

_GOES_IN = ("input", "parameter", "state")


class Linked(NamedTuple):
    """Rows of the rank's tensors: of calls that gave a tensor before, and of calls that took it or passed it on."""

    producers: list[int]
    consumers: list[int]


class Links:
    """The sightings of one rank."""

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank

    @cached_property
    def _goes_in(self) -> npt.NDArray[np.bool_]:
        roles = self._rank.tensors.coded("role")
        return np.isin(roles.codes, [roles.code(role) for role in _GOES_IN])

    @cached_property
    def _steps(self) -> Ints:
        return np.append(self._rank.calls.numbers("step"), -1)[self._rank.call_rows]

    def of(self, row: int) -> Linked | None:
        """Who gave and who takes or passes on the tensor of a row; None where its bits are not known or say nothing."""
        tensors = self._rank.tensors
        if not tensors.valid("fingerprint")[row] or not tensors.numbers("absmax")[row] > 0:
            return None  # tensors of zeros are all alike
        same = tensors.valid("fingerprint") & (tensors.numbers("fingerprint") == tensors.numbers("fingerprint")[row])
        same &= tensors.coded("dtype").codes == tensors.coded("dtype").codes[row]
        same &= (tensors.numbers("count") == tensors.numbers("count")[row]) & (self._rank.call_rows >= 0)
        sightings = np.flatnonzero(same & (self._rank.call_rows != self._rank.call_rows[row]))
        return Linked(
            self._near(sightings[(sightings < row) & ~self._goes_in[sightings]], row, last=True),
            self._near(sightings[sightings > row], row, last=False),
        )

    def _near(self, found: Ints, row: int, last: bool) -> list[int]:
        """Those of the same step, in order; else the nearest of another step, as for a weight that was updated."""
        here = found[self._steps[found] == self._steps[row]]
        near: list[int] = (here[:MOST] if len(here) else found[-1:] if last else found[:1]).tolist()
        return near
