"""What waits to be written: a queue between the program's threads and the writer's, bounded in bytes and in rows.

Appending costs a tenth of a microsecond as long as there is room. When there is none the caller waits, and the time is
added up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from astray.store.native.files import Item
from astray.store.native.values import Values

BATCH_ROWS = 1 << 16
QUEUE_ROWS = 4 * BATCH_ROWS
GROUP_BYTES = 32 << 20  # bytes written before waiting callers hear that there is room again
WAKE_BYTES = 1 << 20  # fewer bytes wait for company: one update of a shard's header serves them all


class Backlog:
    """The queue. The program's threads put, the writer's takes, answers and in the end drops."""

    def __init__(self, most_bytes: int) -> None:
        self.wake = threading.Event()  # there is something to write now
        self.waited_seconds = 0.0
        self._most_bytes = most_bytes
        self._items: deque[Item | threading.Event] = deque()
        self._held = 0  # bytes of the values in the queue
        self._flushes: list[threading.Event] = []  # taken, to be set once what came before them is written
        self._open = True
        self._room = threading.Condition()

    def put(self, item: Item) -> None:
        """Append an item; wait when there are too many."""
        self._items.append(item)
        if len(self._items) >= BATCH_ROWS:
            self.wake.set()
            if len(self._items) >= QUEUE_ROWS:
                with self._room:
                    self._wait(lambda: len(self._items) < QUEUE_ROWS)

    def put_values(self, values: Values) -> None:
        """Append values; wait when they are too many bytes. A tensor larger than the limit gets in alone."""
        size = values.size
        with self._room:
            if self._held and self._held + size > self._most_bytes:
                self.wake.set()
                self._wait(lambda: not self._held or self._held + size <= self._most_bytes)
            self._held += size
            if self._held >= WAKE_BYTES:
                self.wake.set()
        self.put(values)

    def put_flush(self) -> threading.Event:
        """Append a mark, which is set once everything before it is written."""
        flush = threading.Event()
        self._items.append(flush)
        self.wake.set()
        return flush

    @property
    def flushes(self) -> bool:
        """Whether somebody waits for what was taken to be written."""
        return bool(self._flushes)

    def take(self) -> Iterator[list[Item]]:
        """Take what is in the queue now, a part at a time. A part counts as written when the next is asked for."""
        left = len(self._items)
        while left:
            part: list[Item] = []
            size = 0
            while left and size < GROUP_BYTES and len(part) < BATCH_ROWS:
                item = self._items.popleft()
                left -= 1
                if isinstance(item, threading.Event):
                    self._flushes.append(item)
                else:
                    part.append(item)
                    size += item.size if isinstance(item, Values) else 0
            yield part
            with self._room:
                self._held -= size
                self._room.notify_all()

    def answer(self) -> None:
        """Tell those who asked for a flush that it is done."""
        for flush in self._flushes:
            flush.set()
        self._flushes.clear()

    def drop(self) -> None:
        """Forget what is left, and let nobody wait any more."""
        with self._room:
            self._open = False
            self._held = 0
            self._room.notify_all()
        self._flushes += [item for item in self._items if isinstance(item, threading.Event)]
        self._items.clear()
        self.answer()

    def _wait(self, has_room: Callable[[], bool]) -> None:
        start = time.perf_counter()
        self._room.wait_for(lambda: has_room() or not self._open)
        self.waited_seconds += time.perf_counter() - start
