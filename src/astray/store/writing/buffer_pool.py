"""Host memory for the bytes of tensors: page-aligned buffers that are reused, and values held until written or dropped.

New memory costs about as much as writing it: the kernel clears every page, and maps it when it is first touched. So
`BufferPool` keeps the memory of what has been written for the next tensor of about that size.

`ArrivingValues` copies the bytes of tensors into our own memory, for the flight recorder and the writers of other
formats. Some come from a device through staging memory that is scarce and has to be released at once, and the rest of a
large tensor may not be on its way yet.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from astray.store.deferred import PAGE, BytePiece, TensorBytes, cut
from astray.store.run_format.shard_file import LARGE


class BufferPool:
    """Buffers of all sizes. At most `most_bytes` are kept unused. Any thread may call it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            self._kept -= size if memory is not None else 0
        return Buffer(mmap.mmap(-1, size) if memory is None else memory, nbytes, self._give_back)

    def close(self) -> None:
        """Free the unused memory, and keep none from now on."""
        with self._lock:
            self._most_bytes, self._kept = 0, 0
            self._free.clear()

    def _give_back(self, memory: mmap.mmap) -> None:
        size = len(memory)
        with self._lock:
            while self._free and self._kept + size > self._most_bytes:  # other sizes are in demand now
                oldest, unused = next(iter(self._free.items()))
                if unused:
                    unused.pop()
                    self._kept -= oldest
                if not unused:
                    del self._free[oldest]
            if self._kept + size <= self._most_bytes:
                self._free.setdefault(size, []).append(memory)
                self._kept += size


class Buffer:
    """Memory for one tensor. Fill `array` and hand the buffer to the writer, which returns it once it is written."""

    __slots__ = ("_give_back", "_memory", "array", "held", "nbytes")

    def __init__(self, memory: mmap.mmap, nbytes: int, give_back: Callable[[mmap.mmap], None]) -> None:
        self.nbytes = self.held = nbytes
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes)
        self._memory: mmap.mmap | None = memory
        self._give_back = give_back

    def pieces(self) -> Iterator[BytePiece | None]:
        return cut(self.array.data)

    def finish(self, on_piece: Callable[[], None]) -> None:
        """Nothing to do: all bytes are in memory."""

    def release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._give_back(memory)


def _size_class(nbytes: int) -> int:
    """The size rounded up to one of four steps between powers of two, so that a fifth at most is wasted."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * PAGE


class ArrivingValues:
    """Tensors whose bytes are still arriving. All of its methods are for one thread.

    written: called with the bytes of the queue's memory that became free.
    lost: called with the reason why a tensor's bytes could not be read.
    """

    def __init__(self, written: Callable[[int], None], lost: Callable[[str], None]) -> None:
        self._written = written
        self._lost = lost
        self._partial: list[tuple[TensorBytes, Iterator[None], int]] = []  # with what each takes of the queue

    @property
    def has_partial(self) -> bool:
        """Whether more of a tensor is still to come."""
        return bool(self._partial)

    def begin(self, values: TensorBytes) -> None:
        """Take the bytes of a tensor, as far as they have arrived. Once all have, `values.data` holds them."""
        self._advance(values, _gather(values), values.held)

    def collect(self) -> None:
        """Take what has arrived meanwhile."""
        partial, self._partial = self._partial, []
        for values, coming, held in partial:
            if values.resolved:  # dropped before it had arrived
                self._written(held)
            else:
                self._advance(values, coming, held)

    def reject(self, values: TensorBytes, why: str) -> None:
        """Drop a tensor for which there is no memory."""
        self._lose(values, values.held, why)

    def _advance(self, values: TensorBytes, coming: Iterator[None], held: int) -> None:
        try:
            for _ in coming:
                self._partial.append((values, coming, held))
                return
        except Exception as error:  # noqa: BLE001 - these bytes are lost, and no others
            self._lose(values, held, f"{type(error).__name__}: {error}")
        else:
            self._written(held)

    def _lose(self, values: TensorBytes, held: int, why: str) -> None:
        values.resolve(None)
        self._written(held)
        self._lost(why)


def _gather(values: TensorBytes) -> Iterator[None]:
    """Puts the bytes into `values.data`. Yields whenever the next of them are still to come."""
    source = values.source
    if source is None:
        return
    if isinstance(source, Buffer) and values.size >= LARGE:  # a smaller one takes a page however small it is
        values.data = source.array.data
        return
    data, end = memoryview(bytearray(values.size)), 0
    for piece in source.pieces():
        if piece is None:
            yield
            continue
        try:
            if piece.ready is not None:
                piece.ready()
            data[end : end + piece.data.nbytes] = piece.data
            end += piece.data.nbytes
        finally:
            if piece.release is not None:
                piece.release()
    values.data, values.source = data, None
    source.release()
