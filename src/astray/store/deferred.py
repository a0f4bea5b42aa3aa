"""Where the bytes of a tensor come from when they are not a plain buffer.

A tensor may still be on its way from a device, or be so large that its first part has to be written before there is
memory for the last. So the writer takes bytes in pieces, waits for each, and gives it back as soon as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.stats import Measurements

PAGE = 4096
"""What memory and places in a file have to be multiples of for the kernel to move bytes between them without a copy."""

PIECE_BYTES = 16 << 20
"""What one thread writes at a time, of a larger tensor. Much less, and threads wait for the interpreter in between."""


class BytePiece(NamedTuple):
    """Some of a tensor's bytes. Both functions are called in a thread that writes."""

    data: memoryview
    ready: Callable[[], None] | None = None  # waits until the bytes are there; raises when they never will be
    release: Callable[[], None] | None = None  # the bytes are written, or nobody wants them: called once


class DeferredBytes(Protocol):
    """The bytes of one tensor, in the order of its elements. `held` of them count as memory taken by the queue."""

    nbytes: int
    held: int

    def pieces(self) -> Iterator[BytePiece | None]:
        """The pieces, in order. None says that the next one is yet to come, and to ask again later."""

    def finish(self, told: Callable[[], None]) -> None:
        """Called by the program once the writer has the source: makes the pieces there was no memory for before.

        `told` is called after each of them, and after the last.
        """

    def release(self) -> None:
        """Nobody wants the pieces that have not been asked for yet. May be called again."""


def cut(data: memoryview) -> Iterator[BytePiece]:
    """Bytes that are all there, in pieces for several threads."""
    for start in range(0, data.nbytes, PIECE_BYTES):
        yield BytePiece(data[start : start + PIECE_BYTES])


# -- late --------------------------------------------------------------------------------------------------------------
# Measurements that come after their rows: a device makes them, and the program does not wait.
#
# A row then holds a ticket, a plain integer, in place of its statistics. The writer asks for what is behind it when the
# row is written, in its own thread.


class RedeemedTickets(NamedTuple):
    """What was behind some tickets.

    `counted` says where statistics were asked for beside the fingerprint. Where nothing is `here`, `lost` says why.
    """

    found: Measurements
    counted: npt.NDArray[np.bool_]
    here: npt.NDArray[np.bool_]
    lost: str | None = None


class DeferredMeasurements(Protocol):
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

    def redeem(self, tickets: npt.NDArray[np.int64]) -> RedeemedTickets:
        """Waits for what is behind tickets that are due."""
