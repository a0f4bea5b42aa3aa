"""Tickets for measurements that devices are making, and the results they stand for once these have arrived.

Measurements are fetched in segments: a measurer fills one, starts to fetch it at the end of a step or when it is full,
and opens the next. Measurers run in the program's threads, tickets are redeemed in the writer's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from astray.device.launcher import relax_capture
from astray.device.result_row import WIDTH, Rows, measurements
from astray.interrupts import pass_interrupt
from astray.store.deferred import RedeemedTickets

SLOTS = 4096
"""The most measurements in a segment."""

_KEPT = 64  # segments that a row written late may still refer to
_SHARED = 4  # one in so many of them has tickets that new rows may still be given; the rest is for rows on the way

CAPTURED = "it is being captured into a CUDA graph, of which nothing of ours may become a part"
UNSENT = "the recording ended before its measurement was sent for"
FORGOTTEN = "its measurement was let go before the row was written"


class Segment:
    """Measurements that are fetched together, by number: `count` of them so far."""

    __slots__ = ("_fetch", "_fetching", "_rows", "count", "lost", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.lost: str | None = None
        self._fetch: Callable[[], Rows] | None = None
        self._rows: Rows | None = None
        self._fetching = threading.Lock()

    def ticket(self, slot: int, statistics: bool) -> int:
        """The ticket for a slot; it also says whether statistics are measured beside the fingerprint."""
        return (self.number * SLOTS + slot) * 2 + statistics

    def send(self, fetch: Callable[[], Rows]) -> None:
        """Its copy to the host has begun: `fetch` waits until it has arrived. Nothing is added from now on."""
        self._fetch = fetch

    def lose(self, why: str) -> None:
        """It will never arrive."""
        self.lost = why

    @property
    def is_due(self) -> bool:
        return self._fetch is not None or self.lost is not None

    def rows(self) -> Rows | None:
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
