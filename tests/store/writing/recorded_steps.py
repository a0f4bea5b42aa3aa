"""Steps of rows by hand for the tests of writers, and measurements that come late."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from astray.records import Call, Frame, Statistics, Tensor
from astray.stats import Measurements
from astray.store import BackgroundWriter
from astray.store.deferred import RedeemedTickets

GOOD = Statistics(-1.0, 2.0, 0.5, 1.0, 3.0, 2.0, 1, 0, 0, 6)


def record_step(writer: BackgroundWriter, step: int, *, values: bool = False, statistics: Any = GOOD) -> None:
    """Three calls, each with an output and half of them with its values; stack 100 is that of every step."""
    if step == 0:
        writer.stack(100, [Frame("train.py", 3, "<module>", "train()")])
    writer.stack(step, [Frame("model.py", step, "forward", "y = fc(x)")])
    for seq in range(3 * step, 3 * step + 3):
        stack = None if seq % 3 == 2 else (100, step)[seq % 3]
        writer.call(Call(seq, step, 0, "module", f"layers.{seq % 3}", "Linear", 0, "forward", stack=stack))
        row = Tensor(seq, "output", "0", "float32", (2, 3), (3, 1), "cpu", False, statistics, 2**64 - 1 - seq)
        writer.tensor(row, np.full((2, 3), seq, np.float32) if values and seq % 2 else None)
    writer.step_done()


class Tickets:
    """Deferred measurements: a ticket's number is its count of NaNs. They are due once `start_fetch` was called."""

    def __init__(self) -> None:
        self.sent = self.given = 0
        self.stuck = False

    @property
    def is_used(self) -> bool:
        return self.given > 0

    def ticket(self) -> int:
        self.given += 1
        return self.given

    def start_fetch(self, own_thread: bool = False) -> None:
        self.sent = self.sent if self.stuck else self.given

    def finish(self) -> None:
        self.sent = self.given

    def due(self, tickets: npt.NDArray[np.int64]) -> int:
        return int(np.count_nonzero(tickets <= self.sent))

    def redeem(self, tickets: npt.NDArray[np.int64]) -> RedeemedTickets:
        available = np.ones(len(tickets), np.bool_)
        counts = np.zeros((4, len(tickets)), np.int64)
        counts[Statistics._fields.index("nan") - 6] = counts[Statistics._fields.index("count") - 6] = tickets
        first = np.zeros(len(tickets), np.int64), np.full(len(tickets), np.nan)
        found = Measurements(np.zeros((6, len(tickets))), counts, tickets.astype(np.uint64), *first)
        return RedeemedTickets(found, available, available)
