"""Staging of tensor values: copied on their device at once, and to the host while the program goes on.

`Staging.take` copies a tensor into a chunk of device memory, in the program's own stream, so that it is the tensor as
it is now, whatever is written to it later. A chunk goes to host memory in a stream of its own, and from there straight
to the disk. Both sides are bounded: when device memory is short the program's stream waits for earlier copies, and when
host memory is short the program does. `take` itself waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from astray.device.launcher import unobserved
from astray.device.streams import ALIGNMENT, LARGE, Chunks, DeviceStreams, device_for
from astray.device.tickets import CAPTURED
from astray.interrupts import pass_interrupt
from astray.store.deferred import PAGE, BytePiece

HOST_BYTES = 512 << 20
DEVICE_BYTES = 256 << 20

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the same size: they are copied and gathered alike for every dtype, and no bit changes."""

POLL_SECONDS = 1.0  # how often a wait for memory checks that there is still a writer to release some
CACHED_POSITIONS = 256  # sizes of tensors, of which a model has few


class NotStagedError(Exception):
    """A tensor's values could not be taken. The message says why in a few words."""


class Staging:
    """Takes the values of one device's tensors. Its methods may be called from any thread, in any stream.

    `host_bytes` and `device_bytes` are the most memory it uses, `waited` is called with the seconds that the program
    was blocked because host memory was full. What `take` returns is to be handed to the writer at once.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        host_bytes: int = HOST_BYTES,
        device_bytes: int = DEVICE_BYTES,
        waited: Callable[[float], None] | None = None,
        operations: DeviceStreams | None = None,
    ) -> None:
        self.device = device
        self._operations = operations or device_for(device)
        self.chunks = Chunks(self._operations, host_bytes, device_bytes)
        self._waited = waited
        self._positions: dict[bytes, _Positions] = {}

    @property
    def device_bytes(self) -> int:
        """The device memory taken so far."""
        return self.chunks.device_bytes

    def take(self, tensor: torch.Tensor, positions: npt.NDArray[np.int64] | None = None) -> Staged:
        """The values of a tensor as they are now, in row-major order; only those at `positions`, if there are any.

        Raises NotStagedError while a graph is being captured, and when the device has no memory left.
        """
        if self._operations.is_capturing():
            raise NotStagedError(CAPTURED)
        try:
            with unobserved():
                words = _words(tensor)
                if positions is not None:
                    words = self._gather(words, positions, tensor)
                staged = Staged(self, words)
                staged.begin()
        except RuntimeError as error:
            pass_interrupt(error)
            raise NotStagedError(str(error).partition("\n")[0]) from error
        return staged

    def send(self) -> None:
        """Starts to copy everything taken so far to the host. Waiting for it does this by itself."""
        with unobserved():
            self.chunks.send()

    def close(self) -> None:
        """Wait for copies under way, and release all memory."""
        self.chunks.close()
        self._positions.clear()

    def add_wait(self, seconds: float) -> None:
        if self._waited is not None:
            self._waited(seconds)

    def _gather(self, words: torch.Tensor, positions: npt.NDArray[np.int64], tensor: torch.Tensor) -> torch.Tensor:
        each = words.numel() // max(tensor.numel(), 1)  # words for an element
        if each > 1:
            positions = (positions[:, None] * each + np.arange(each)).ravel()
        return torch.take(words, self._on_device(positions))

    def _on_device(self, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """The positions in device memory. They are the same for every tensor of a size, and are cached."""
        stream = self._operations.current()
        key = positions.tobytes()
        cached = self._positions.get(key)
        if cached is None:
            host = self._operations.allocate_host(positions.nbytes).view(torch.int64)
            host.copy_(torch.from_numpy(positions.copy()))
            device = self._operations.upload(host)
            cached = _Positions(host, device, self._operations.record_event(stream))
            if len(self._positions) < CACHED_POSITIONS:
                self._positions[key] = cached
        self._operations.wait_event(stream, cached.arrived)
        return cached.device


class _Positions(NamedTuple):
    host: torch.Tensor
    device: torch.Tensor
    arrived: Any  # the event of their arrival


class Staged:
    """The values of one tensor on their way to the host: `DeferredBytes` for the writer."""

    held = 0  # the memory is bounded here, and not by the writer's queue

    def __init__(self, staging: Staging, words: torch.Tensor) -> None:
        self.nbytes = words.numel() * words.element_size()
        self._staging = staging
        self._chunks = staging.chunks
        self._left = boxes(words, self._chunks.size // words.element_size())
        self._next: torch.Tensor | None = None  # part of what is left, when there was no memory for it
        self._pieces: deque[BytePiece] = deque()  # not yielded yet
        self._complete = False
        self._wanted = True
        self._failure: Exception | None = None

    def fill(self, on_piece: Callable[[], None] | None = None) -> None:
        """Copy what is left of the tensor into chunks: as much as there is memory for, or, with `on_piece`, all of it.

        on_piece: called after each part and each wait for memory.
        """
        alignment = PAGE if self.nbytes >= LARGE else ALIGNMENT
        with self._chunks.changed:
            while self._wanted and not self._complete:
                part = next(self._left, None) if self._next is None else self._next
                if part is None:
                    self._complete = True
                elif (put := self._chunks.put(part, alignment)) is not None:
                    self._pieces.append(put[0])
                    self._next = put[1]
                else:
                    self._next = part
                    if on_piece is None:
                        return
                    self._wait()
                if on_piece is not None:
                    on_piece()
            self._drop()

    def begin(self) -> None:
        """Copy as much as is possible without waiting. When that fails, nothing is kept of it."""
        try:
            self.fill()
        except Exception:  # raised again, whatever it is
            self.release()
            raise

    def finish(self, on_piece: Callable[[], None]) -> None:
        if self._complete:
            return
        try:
            with unobserved():
                self.fill(on_piece)
        except Exception as error:  # noqa: BLE001 - `pieces` raises it in the writer, and the program goes on
            with self._chunks.changed:
                self._failure, self._complete = error, True
                self._drop()
            on_piece()
            pass_interrupt(error)

    def pieces(self) -> Iterator[BytePiece | None]:
        while True:
            with self._chunks.changed:
                if self._complete and not self._pieces:
                    break
                piece = self._pieces.popleft() if self._pieces else None
            yield piece
        if self._failure is not None:
            raise self._failure

    def release(self) -> None:
        with self._chunks.changed:
            self._wanted = False
            self._complete = True
            while self._pieces:
                release = self._pieces.popleft().release
                if release is not None:
                    release()
            self._chunks.changed.notify_all()

    def _wait(self) -> None:
        """Wait until memory is released."""
        start = time.perf_counter()
        self._chunks.changed.wait(POLL_SECONDS)  # the caller checks that there is still a writer
        self._staging.add_wait(time.perf_counter() - start)

    def _drop(self) -> None:
        """Drop the reference to the program's tensor."""
        self._left, self._next = iter(()), None


def boxes(words: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Cuts a tensor into parts that follow one another in row-major order.

    A contiguous one is a single part of one dimension, which can be cut anywhere. Others have `most` elements each.
    """
    if words.is_contiguous():
        yield from [words.view(-1)] if words.numel() else []
    elif words.numel() <= most:
        yield words
    else:
        rows = most // (words.numel() // len(words))
        if rows:
            yield from (words.narrow(0, start, min(rows, len(words) - start)) for start in range(0, len(words), rows))
        else:
            for row in words:
                yield from boxes(row, most)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as integers: of its own size, or two for an element of 16 bytes."""
    if tensor.is_conj() or tensor.is_neg():  # a sign that is only a flag so far
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.element_size() not in WORDS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(WORDS[tensor.element_size()])
