"""Tickets for measurements that devices are making, and the results they stand for once these have arrived.

Measurements are fetched in segments: a measurer fills one, starts to fetch it at the end of a step or when it is full,
and opens the next. Measurers run in the program's threads, tickets are redeemed in the writer's thread. What arrives
are the rows of ten words that kernels leave, and `measurements` makes statistics of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from astray.device.launcher import relax_capture
from astray.interrupts import pass_interrupt
from astray.stats import Measurements
from astray.store.deferred import RedeemedTickets

SLOTS = 4096
"""The most measurements in a segment."""

_KEPT = 64  # segments that a row written late may still refer to
_SHARED = 4  # one in so many of them has tickets that new rows may still be given; the rest is for rows on the way

CAPTURED = "it is being captured into a CUDA graph, of which nothing of ours may become a part"
UNSENT = "the recording ended before its measurement was sent for"
FORGOTTEN = "its measurement was let go before the row was written"

# -- what a kernel leaves ----------------------------------------------------------------------------------------------
# Rows lie column by column in an int64 buffer of ten times its capacity, floats by their bits. A row describes a whole
# tensor, or the part of it that one program of a kernel has read. It holds the mean and the spread rather than sums, so
# that nothing overflows on the way.

FIELDS = ("finite", "mean", "spread", "low", "high", "zeros", "nan", "inf", "fingerprint", "first")
"""`finite` counts the elements that the next four describe; `spread` is the norm of their distances from the mean.

`first` is 4 × the index of the first element that is not finite, plus 0, 1 or 2: it is NaN, inf or −inf. So the least
of several is that of them all. It is `NONE`, or anything, where the counts say that everything is finite.
"""

NONE = 2**63 - 1

WIDTH = len(FIELDS)

_BAD = np.array([np.nan, np.inf, -np.inf, 0.0])  # no row has the last

ResultRows = npt.NDArray[np.int64]
"""Shaped (WIDTH, number of rows)."""


def measurements(rows: ResultRows) -> Measurements:
    """The statistics and fingerprints of whole tensors."""
    finite, zeros, nan, inf = (rows[FIELDS.index(name)] for name in ("finite", "zeros", "nan", "inf"))
    mean, spread, low, high = (rows[FIELDS.index(name)].view(np.float64) for name in ("mean", "spread", "low", "high"))
    root = np.sqrt(np.maximum(finite, 1).astype(np.float64))
    even = low == high  # the mean is that number then and nothing spreads, whatever rounding says
    mean, spread = np.where(even, low, mean), np.where(even, 0.0, spread)
    with np.errstate(over="ignore", invalid="ignore"):  # a norm beyond float64 is infinite
        moments = np.stack(
            [low, high, mean, spread / root, np.hypot(spread, root * mean), np.maximum(np.maximum(-low, high), 0.0)]
        )
    moments += 0.0  # −0 is reported as 0
    moments[:, finite == 0] = np.nan
    counts = np.stack([zeros, nan, inf, finite + nan + inf])
    first, bad = rows[FIELDS.index("first")], nan + inf > 0
    return Measurements(
        moments,
        counts,
        rows[FIELDS.index("fingerprint")].view(np.uint64),
        np.where(bad, first >> 2, -1),
        np.where(bad, _BAD[first & 3], 0.0),
    )


# -- tickets -----------------------------------------------------------------------------------------------------------


class Segment:
    """Measurements that are fetched together, by number: `count` of them so far."""

    __slots__ = ("_fetch", "_fetching", "_rows", "count", "lost", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.lost: str | None = None
        self._fetch: Callable[[], ResultRows] | None = None
        self._rows: ResultRows | None = None
        self._fetching = threading.Lock()

    def ticket(self, slot: int, statistics: bool) -> int:
        """The ticket for a slot; it also says whether statistics are measured beside the fingerprint."""
        return (self.number * SLOTS + slot) * 2 + statistics

    def send(self, fetch: Callable[[], ResultRows]) -> None:
        """Its copy to the host has begun: `fetch` waits until it has arrived. Nothing is added from now on."""
        self._fetch = fetch

    def lose(self, why: str) -> None:
        """It will never arrive."""
        self.lost = why

    @property
    def is_due(self) -> bool:
        return self._fetch is not None or self.lost is not None

    def rows(self) -> ResultRows | None:
        """Its rows, once they have arrived; None when they are lost."""
        with self._fetching:
            if self._rows is None and self.lost is None and self._fetch is not None:
                try:
                    self._rows = self._fetch()
                except Exception as error:  # noqa: BLE001 - a device that has failed must not stop the writer
                    pass_interrupt(error)
                    self.lost = f"the device failed before its measurement came: {_first_line(error)}"
            return self._rows


class Measurer(Protocol):
    """Measures the tensors of one device."""

    def close(self) -> None:
        """Starts to fetch what was measured since the last time. Raises nothing."""

    def abandon(self, why: str) -> None:
        """Marks as lost what could not be fetched."""


class Tickets:
    """Opens segments for measurers, and redeems tickets for the writer.

    `forget` is called when nothing that was measured before should be used for new rows, since segments are not kept
    forever: when the program fetches everything, and after many segments. It is not called when a segment happens to be
    sent early, because it is full or the program was slow: a tensor that is seen again then would have its values
    stored again, so that what is stored would depend on the time.
    """

    def __init__(self, forget: Callable[[], None] = lambda: None) -> None:
        self.forget = forget
        self._since = 0  # segments sent since `forget` was called
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        self._measurers: list[Measurer] = []

    @property
    def is_used(self) -> bool:
        return bool(self._measurers)

    def add(self, measurer: Measurer) -> None:
        self._measurers.append(measurer)

    def open(self) -> Segment:
        """The next segment of a measurer."""
        number = next(self._numbers)
        segment = self._segments[number] = Segment(number)
        return segment

    def start_fetch(self, own_thread: bool = False) -> None:
        """Starts to fetch the measurements of all tickets handed out so far, without waiting."""
        if own_thread:
            relax_capture()
        for measurer in self._measurers:
            measurer.close()
        if self._since and not own_thread:
            self._forget()

    def sent(self, segment: Segment) -> None:
        """A measurer has sent a segment and opened the next."""
        self._since += 1
        if segment.lost is not None or self._since >= _KEPT // _SHARED:
            self._forget()

    def _forget(self) -> None:
        self._since = 0
        self.forget()

    def finish(self) -> None:
        """The same for the last time. What still cannot be fetched is lost."""
        self.start_fetch()
        for measurer in self._measurers:
            measurer.abandon(UNSENT)

    def is_due(self, ticket: int) -> bool:
        segment = self._segments.get(ticket // (2 * SLOTS))
        return segment is None or segment.is_due

    def due(self, tickets: npt.NDArray[np.int64]) -> int:
        """How many are due before the first that is not."""
        numbers = tickets // (2 * SLOTS)
        for first in np.flatnonzero(np.diff(numbers, prepend=-1)).tolist():  # of each run of one segment
            if not self.is_due(int(tickets[first])):
                return int(first)
        return len(tickets)

    def redeem(self, tickets: npt.NDArray[np.int64]) -> RedeemedTickets:
        """Waits for the results of tickets that are due."""
        indices, with_statistics = tickets // 2, tickets % 2 == 1
        numbers, slots = indices // SLOTS, indices % SLOTS
        rows = np.zeros((WIDTH, len(tickets)), np.int64)
        available = np.zeros(len(tickets), np.bool_)
        lost = None
        for number in np.unique(numbers).tolist():
            segment = self._segments.get(number)
            of_segment = None if segment is None else segment.rows()
            if of_segment is None:
                lost = FORGOTTEN if segment is None else segment.lost
                continue
            mask = numbers == number
            rows[:, mask] = of_segment[:, slots[mask]]
            available |= mask
        self._drop(int(numbers.max(initial=0)) - _KEPT)
        return RedeemedTickets(measurements(rows), with_statistics & available, available, lost)

    def _drop(self, before: int) -> None:
        for number in [number for number in list(self._segments) if number < before]:
            if self._segments[number].is_due:
                del self._segments[number]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
