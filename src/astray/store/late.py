"""Measurements that come after their rows: a device makes them, and the program does not wait.

A row then holds a ticket, a plain integer, in place of its statistics. The writer asks for what is behind it when the
row is written, in its own thread.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.stats import Measurements


class Redeemed(NamedTuple):
    """What was behind some tickets.

    `counted` says where statistics were asked for beside the fingerprint. Where nothing is `here`, `lost` says why.
    """

    found: Measurements
    counted: npt.NDArray[np.bool_]
    here: npt.NDArray[np.bool_]
    lost: str | None = None


class Late(Protocol):
    """Whoever gave the tickets. Its methods raise nothing; any thread may call them."""

    @property
    def is_used(self) -> bool:
        """Whether there has been a ticket yet."""

    def settle(self, own_thread: bool = False) -> None:
        """Sends for the measurements of all tickets given so far, without waiting.

        `own_thread` says that it is called in a thread of ours, and not in one of the program's.
        """

    def finish(self) -> None:
        """The same for the last time: everything is due from here on."""

    def due(self, tickets: npt.NDArray[np.int64]) -> int:
        """How many have been sent for, so that they can be redeemed, before the first that has not."""

    def redeem(self, tickets: npt.NDArray[np.int64]) -> Redeemed:
        """Waits for what is behind tickets that are due."""
