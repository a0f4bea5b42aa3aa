"""Where the measurements of the open segment go: what a ring and the native taker count together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING


class PythonSlots:
    """What the native `Slots` are, in Python. Used as a lock, without which nothing here may be touched.

    There may be `most` measurements in a segment, whose kernels leave `partials` rows altogether: at `rows_at` on the
    device, with a table of them at `table_at`.
    """

    def __init__(self, most: int, partials: int, rows_at: int, table_at: int) -> None:
        self.most, self.partials, self.rows_at, self.table_at = most, partials, rows_at, table_at
        self.number = 0  # of the segment
        self.count = 0  # measurements in it
        self.used = 0  # partial rows
        self.stream: int | None = None
        """A stream that may launch without asking; the one that did so last, most often."""
        self._lock = threading.Lock()

    def __enter__(self) -> PythonSlots:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def open(self, number: int) -> None:
        """Begin the segment of that number."""
        self.number, self.count, self.used = number, 0, 0

    def take(self, programs: int, slots: int = 1) -> int:
        """Take the next slots, of which the first is returned, and so many partial rows for them."""
        first = self.count
        self.count, self.used = first + slots, self.used + programs
        return first


if TYPE_CHECKING:
    Slots = PythonSlots
else:
    try:
        from astray.device._launch import Slots
    except ImportError:  # installed where there was no compiler
        Slots = PythonSlots
