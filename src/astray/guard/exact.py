"""Looks at every row as it is recorded, and stops the program at the very call that made NaN or infinity.

Slow: every tensor is waited for, natively nothing is taken. An infinity is let pass where the call was given one, or
where its arguments hold one, as a mask's do; NaN never.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from astray.record import Statistics
from astray.store import FlightRecorder

_SEQ, _ROLE, _STATISTICS = 0, 1, 8  # places in a tensor's row
_ARGS = 10  # in a call's


class Stop(BaseException):
    """Leaves the program from the middle of a call; no exception that a program would think of catching."""


class ExactRecorder(FlightRecorder):
    """Raises `Stop` behind the row that a program should not go on from."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.stopped = False
        self._infinite: dict[int, bool] = {}  # calls that are under way: whether infinities are to be expected of them
        super().__init__(*args, **named)

    @property
    def lanes(self) -> None:
        """None: every row comes by here."""

    def call_row(self, row: Any) -> None:
        super().call_row(row)
        self._infinite[row[_SEQ]] = "inf" in (row[_ARGS] or "").lower()

    def tensor_row(self, row: Any) -> None:
        super().tensor_row(row)
        nan, inf = self._counts(row[_STATISTICS])
        if not nan and not inf:
            return
        seq = row[_SEQ]
        if row[_ROLE] in ("input", "state") and not nan:
            self._infinite[seq] = True
        elif nan or not self._infinite.get(seq):
            self.stopped = True
            raise Stop

    def step_done(self) -> None:
        super().step_done()
        self._infinite.clear()

    def _counts(self, statistics: tuple[Any, ...] | int | None) -> tuple[int, int]:
        if statistics is None:
            return 0, 0
        if isinstance(statistics, int):
            return self._arrived(statistics)
        measured = Statistics(*statistics)
        return measured.nan, measured.inf

    def _arrived(self, ticket: int) -> tuple[int, int]:
        """Waits for what a device measures."""
        if self._late is None:
            return 0, 0
        self._late.settle()
        found = self._late.redeem(np.array([ticket]))
        if not found.here[0] or not found.counted[0]:
            return 0, 0
        _, nan, inf, _ = found.found.counts[:, 0].tolist()
        return nan, inf
