"""Looks at every row as it is recorded, and stops the program at the very call that made NaN or infinity.

Slow: every measurement is waited for, and every row passes through Python. An infinity is allowed where the call was
given one, or where its arguments hold one, as a mask's do; NaN never. Two things are not judged here but at the end of
the step. An op of the backward pass may divide by zero when the next op replaces the result, so only the gradient
counts. And once a GradScaler has scaled a loss, gradients may overflow: only then is it known whether the update was
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from astray.records import Call, Statistics, Tensor
from astray.store import FlightRecorder

_SEQ, _KIND, _PHASE, _SITE, _ARGS = map(Call._fields.index, ("seq", "kind", "phase", "site", "args"))
_CALL_SEQ, _ROLE, _STATISTICS = map(Tensor._fields.index, ("seq", "role", "statistics"))
_INFINITE_CONSTANT = re.compile(r'"-?inf"', re.IGNORECASE)


class ExactStop(BaseException):
    """Ends the program in the middle of a call; a BaseException, so that `except Exception` does not catch it."""


class ExactFlightRecorder(FlightRecorder):
    """A flight recorder that raises `ExactStop` after the row of a bad tensor.

    is_scaled: returns whether a loss of this step was scaled.
    """

    def __init__(self, *args: Any, is_scaled: Callable[[], bool], **named: Any) -> None:
        self.stopped = False
        self._is_scaled = is_scaled
        self._may_be_infinite: set[int] = set()  # calls whose results may hold infinities
        self._judged_later: set[int] = set()  # calls that are judged at the end of the step
        super().__init__(*args, **named)

    @property
    def row_buffers(self) -> None:
        """None, so that every row comes through `call_row` and `tensor_row`."""

    def call_row(self, row: Any) -> None:
        super().call_row(row)
        if _INFINITE_CONSTANT.search(row[_ARGS] or ""):
            self._may_be_infinite.add(row[_SEQ])
        backward = row[_PHASE] == "backward"
        if (backward and row[_KIND] == "op") or ((backward or row[_SITE].startswith("/")) and self._is_scaled()):
            self._judged_later.add(row[_SEQ])

    def tensor_row(self, row: Any) -> None:
        row = self._redeemed(row) if isinstance(row[_STATISTICS], int) else row
        super().tensor_row(row)
        measured = None if row[_STATISTICS] is None else Statistics(*row[_STATISTICS])
        seq = row[_CALL_SEQ]
        if measured is None or not (measured.nan or measured.inf) or seq in self._judged_later:
            return
        if row[_ROLE] in ("input", "state") and not measured.nan:
            self._may_be_infinite.add(seq)
        elif measured.nan or seq not in self._may_be_infinite:
            self.stopped = True
            raise ExactStop

    def step_done(self) -> None:
        super().step_done()
        self._may_be_infinite.clear()
        self._judged_later.clear()

    def _redeemed(self, row: Any) -> Any:
        """The row with its measurement in place of the ticket; waits for the device.

        A redeemed ticket is not valid for long, so from here on the row holds the measurement.
        """
        if self._deferred is None:
            return row
        self._deferred.start_fetch()
        measurements, counted, known, _ = self._deferred.redeem(np.array([row[_STATISTICS]]))
        if not known[0]:
            return row
        measured, fingerprint = measurements.at(0)
        return (*row[:_STATISTICS], tuple(measured) if counted[0] else None, fingerprint, *row[_STATISTICS + 2 :])
