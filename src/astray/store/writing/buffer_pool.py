"""Host memory for tensors on their way to the disk: page-aligned, and used again and again.

New memory costs about as much as writing it: the kernel clears every page, and enters it into a table when it is
touched first. So what has been written is kept for the next tensor of about that size.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from astray.store.deferred import PAGE, Piece, cut


class Rooms:
    """All of it. At most `most_bytes` are kept that nobody uses; for any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Room:
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            self._kept -= size if memory is not None else 0
        return Room(mmap.mmap(-1, size) if memory is None else memory, nbytes, self._give_back)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._most_bytes, self._kept = 0, 0
            self._free.clear()

    def _give_back(self, memory: mmap.mmap) -> None:
        size = len(memory)
        with self._lock:
            while self._free and self._kept + size > self._most_bytes:  # other sizes are in demand now
                other, waiting = next(iter(self._free.items()))
                if waiting:
                    waiting.pop()
                    self._kept -= other
                if not waiting:
                    del self._free[other]
            if self._kept + size <= self._most_bytes:
                self._free.setdefault(size, []).append(memory)
                self._kept += size


class Room:
    """Memory for one tensor. Fill `array` and hand the room to the writer, which gives it back once it is written."""

    __slots__ = ("_give_back", "_memory", "array", "held", "nbytes")

    def __init__(self, memory: mmap.mmap, nbytes: int, give_back: Callable[[mmap.mmap], None]) -> None:
        self.nbytes = self.held = nbytes
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes)
        self._memory: mmap.mmap | None = memory
        self._give_back = give_back

    def pieces(self) -> Iterator[Piece | None]:
        return cut(self.array.data)

    def finish(self, told: Callable[[], None]) -> None:
        """Everything is there."""

    def release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._give_back(memory)


def _size_class(nbytes: int) -> int:
    """The size rounded up to one of four steps between powers of two, so that a fifth at most is wasted."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * PAGE
