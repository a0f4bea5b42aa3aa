"""What reaches a writer after its row: a tensor's bytes (`TensorBytes`, `DeferredBytes`), its `DeferredMeasurements`.

A tensor may still be on its way from a device, or be so large that its first part has to be written before there is
memory for the last. So the writer takes bytes in pieces, waits for each, and releases it as soon as it is written.

The program does not wait for a device to measure either: the row holds a ticket, a plain integer, in place of its
statistics, and the writer's thread redeems it when the row is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.records import Blob
from astray.stats import Measurements

PAGE = 4096
"""Addresses and file offsets have to be multiples of this for the kernel to move bytes without a copy."""

PIECE_BYTES = 16 << 20
"""What a thread writes of a larger tensor at a time. With much less, threads wait for the interpreter in between."""


class BytePiece(NamedTuple):
    """Some of a tensor's bytes. Both functions are called in a thread that writes."""

    data: memoryview
    ready: Callable[[], None] | None = None  # waits until the bytes have arrived; raises when they never will
    release: Callable[[], None] | None = None  # the bytes are written or not needed any more: called once


class DeferredBytes(Protocol):
    """The bytes of one tensor, in the order of its elements. `held` of them count as memory taken by the queue."""

    nbytes: int
    held: int

    def pieces(self) -> Iterator[BytePiece | None]:
        """The pieces, in order. None means that the next one has not arrived yet: try again later."""

    def finish(self, on_piece: Callable[[], None]) -> None:
        """Makes the pieces for which there was no memory before. The program calls it once the writer has this object.

        `on_piece` is called after each piece, and after the last.
        """

    def release(self) -> None:
        """The pieces that were not taken yet are not needed. May be called again."""


def cut(data: memoryview) -> Iterator[BytePiece]:
    """Bytes that are all in memory, in pieces for several threads."""
    for start in range(0, data.nbytes, PIECE_BYTES):
        yield BytePiece(data[start : start + PIECE_BYTES])


class TensorBytes:
    """The bytes of one tensor on their way to the disk. Rows that share a tensor share this object, and so its blob."""

    __slots__ = ("blob", "data", "dtype", "name", "part", "resolved", "sampled", "shape", "size", "source", "stale")

    def __init__(
        self,
        data: memoryview | DeferredBytes,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> None:
        self.data: memoryview | None = data if isinstance(data, memoryview) else None  # dropped once written
        self.source: DeferredBytes | None = None if isinstance(data, memoryview) else data
        self.size = data.nbytes
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.sampled = sampled
        self.part = part
        self.blob: Blob | None = None  # set once written
        self.resolved = False  # it is written, or never will be
        self.stale = False  # when the tensor is observed again, its bytes have to be handed over again

    @property
    def held(self) -> int:
        """The bytes of memory it takes in the queue."""
        return self.size if self.source is None else self.source.held

    def pieces(self) -> Iterator[BytePiece | None]:
        """Its bytes, as `DeferredBytes.pieces` has them."""
        if self.source is not None:
            yield from self.source.pieces()
        elif self.data is not None:
            yield from cut(self.data)

    def resolve(self, blob: Blob | None) -> None:
        """Set where it was written, or None if it was not, and free its bytes."""
        self.blob, self.resolved = blob, True
        self.data = None
        source, self.source = self.source, None
        if source is not None:
            source.release()


class RedeemedTickets(NamedTuple):
    """The measurements that tickets stood for.

    `with_statistics`: where statistics were measured beside the fingerprint. `lost` says why a row is not `available`.
    """

    measurements: Measurements
    with_statistics: npt.NDArray[np.bool_]
    available: npt.NDArray[np.bool_]
    lost: str | None = None


class DeferredMeasurements(Protocol):
    """Hands out tickets and redeems them (`device/tickets.py`). Its methods raise nothing; any thread may call them."""

    @property
    def is_used(self) -> bool:
        """Whether a ticket has been given out yet."""

    def start_fetch(self, own_thread: bool = False) -> None:
        """Starts to fetch the measurements of all tickets given so far, without waiting.

        `own_thread` says that astray's thread calls it, not one of the program's.
        """

    def finish(self) -> None:
        """Like `start_fetch`, for the last time: every ticket is due from here on."""

    def due(self, tickets: npt.NDArray[np.int64]) -> int:
        """How many of the tickets can be redeemed, up to the first whose measurements are not being fetched yet."""

    def redeem(self, tickets: npt.NDArray[np.int64]) -> RedeemedTickets:
        """Waits for the measurements of tickets that are due."""
