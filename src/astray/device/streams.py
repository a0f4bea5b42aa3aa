"""What `Staging` copies values with: streams and events of a device, and `Chunks` of memory on both sides.

Copies wait for each other without the program waiting. `AsynchronousDevice` is for devices with streams of
their own (CUDA, ROCm, XPU, NPU), `SynchronousDevice` for all others, where a copy is over when its call returns.
Threads that write call `attach_thread` first: then their waits for the device do not break a graph that the program is
capturing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from astray.device.launcher import relax_capture
from astray.store.deferred import PAGE, BytePiece


class DeviceStreams(Protocol):
    """The operations. A stream is whatever `current` returns, an event whatever `record_event` and `fetch` do."""

    def attach_thread(self) -> None:
        """Prepares this thread, which is one of our own, to work with the device."""

    def is_capturing(self) -> bool:
        """Whether what this thread launches now becomes part of a graph instead of being executed."""

    def allocate_device(self, nbytes: int) -> torch.Tensor: ...

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Page-aligned host memory that the device can write to directly."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device of memory that is not written to any more, for use in this stream."""

    def current(self) -> Any:
        """The stream in which this thread works."""

    def record_event(self, stream: Any, event: Any = None) -> Any:
        """An event that happens once all work so far in the stream is done; `event` is reused."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Makes the stream wait for the event before whatever is launched from now on."""

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:
        """Copies to the host once all these events have happened; returns the event of its arrival."""

    def wait(self, event: Any) -> None:
        """Waits, in this thread, until the event has happened. Raises when the device failed."""

    def synchronize(self) -> None:
        """Waits for everything that `fetch` has begun."""


def device_for(device: torch.device) -> DeviceStreams:
    """The operations for a device, by what torch can do with it."""
    module = getattr(torch, device.type, None)
    if all(hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream")) and device.type != "cpu":
        return AsynchronousDevice(device)
    return SynchronousDevice(device)


class AsynchronousDevice:
    """A device with streams, by the module that torch has for its kind. Copies to the host have their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._copies = self._module.Stream(device=device)
        self._attached = threading.local()

    def attach_thread(self) -> None:
        if not hasattr(self._attached, "done"):
            self._attached.done = True
            relax_capture()
            self._module.set_device(self._device)  # with another, memory would be allocated on that one

    def is_capturing(self) -> bool:
        return self._capturing()

    def allocate_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device, non_blocking=True)

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def record_event(self, stream: Any, event: Any = None) -> Any:
        event = self._event() if event is None else event
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:
        for event in after:
            self._copies.wait_event(event)
        with self._module.stream(self._copies):
            host.copy_(device, non_blocking=True)
        return self.record_event(self._copies)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self._copies.synchronize()

    def _event(self) -> Any:
        try:
            return self._module.Event(blocking=True)  # sleeps while it waits; the other kind keeps a processor busy
        except TypeError:
            return self._module.Event()


class SynchronousDevice:
    """A device whose copies are complete when the call returns; also the host itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def attach_thread(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def allocate_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device)

    def current(self) -> Any:
        return None

    def record_event(self, stream: Any, event: Any = None) -> Any:
        pass

    def wait_event(self, stream: Any, event: Any) -> None:
        pass

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:  # noqa: ARG002 - all over
        host.copy_(device)

    def wait(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


ALIGNMENT = 64
LARGE = 64 << 10  # from here on a tensor begins on a page, so that the disk can read it from where it is
CHUNK_BYTES = 16 << 20
"""Large enough that a copy to the host runs at full speed, small enough that the disk does not wait for it."""
LEAST_BYTES = 1 << 20
"""The least size of a chunk. In less memory than a few of these the program would wait for the writer."""


class Chunks:
    """The memory that values pass through on their way from a device: chunks, each some device and as much host memory.

    Tensors are copied into the open chunk one after the other. What has gathered there goes to the host in one copy,
    when the chunk is full or its bytes are waited for. Device memory is reused once that copy is done, by the order of
    the streams; host memory once the writer has released its bytes. Both are allocated as they are needed.

    Every method is called with `changed` held, or takes it.
    """

    def __init__(self, device: DeviceStreams, host_bytes: int, device_bytes: int) -> None:
        self.changed = threading.Condition()
        self.size = max(min(CHUNK_BYTES, host_bytes // 4, device_bytes // 2) // PAGE * PAGE, LEAST_BYTES)
        self._device = device
        self._host_left = max(4, host_bytes // self.size)  # how many more may be allocated
        self._device_left = max(2, device_bytes // self.size)
        self._host: list[_Host] = []  # free
        self._slots: list[_Slot] = []  # in the order in which they are used
        self._open: _Chunk | None = None
        self._closed = False

    @property
    def device_bytes(self) -> int:
        return self.size * len(self._slots)

    def put(self, words: torch.Tensor, alignment: int) -> tuple[BytePiece, torch.Tensor | None] | None:
        """Copy a tensor into a chunk, or only its beginning if it has one dimension; returns the piece, and the rest.

        None when there is no memory, until a piece is released.
        """
        itemsize = words.element_size()
        size = words.numel() * itemsize
        chunk = self._chunk(min(size, LARGE) if words.dim() == 1 else size, alignment)
        if chunk is None:
            return None
        start = chunk.filled + -chunk.filled % alignment
        count = min(size, self.size - start) // itemsize
        now, rest = (words, None) if count * itemsize == size else (words[:count], words[count:])
        stream = self._device.current()
        chunk.enter(self._device, stream)
        chunk.slot.view(words.dtype)[start // itemsize :][:count].view(now.shape).copy_(now)
        chunk.marks[stream] = self._device.record_event(stream, chunk.marks.get(stream))
        chunk.filled = start + count * itemsize
        return self._piece(chunk, start), rest

    def send(self) -> None:
        """Start to copy what is in the open chunk."""
        with self.changed:
            if self._open is not None:
                self._send(self._open)

    def close(self) -> None:
        """Wait for copies under way, and release all memory."""
        with self.changed:
            self._close_chunk()
            self._device.synchronize()
            self._closed = True
            self._host.clear()
            self._slots.clear()
            self._host_left = 0
            self.changed.notify_all()

    def _chunk(self, least: int, alignment: int) -> _Chunk | None:
        """The open chunk, if it has that much room, or a new one."""
        chunk = self._open
        if chunk is not None and chunk.filled + -chunk.filled % alignment + least <= self.size:
            return chunk
        self._close_chunk()
        if self._closed:
            raise RuntimeError("the recording is over")
        if not self._host and self._host_left:
            self._host_left -= 1
            self._host.append(_Host(self._device.allocate_host(self.size)))
        if not self._host:
            return None
        self._open = _Chunk(self._host.pop(), self._slot())
        return self._open

    def _slot(self) -> _Slot:
        """The device memory that was used longest ago."""
        if self._device_left:
            memory = self._device.allocate_device(self.size)
            self._device_left -= 1
            # Memory that the program has freed may still be in use, in the stream it was freed in.
            self._slots.append(_Slot(memory, self._device.record_event(self._device.current())))
            return self._slots[-1]
        slot = self._slots.pop(0)
        self._slots.append(slot)
        return slot

    def _close_chunk(self) -> None:
        chunk, self._open = self._open, None
        if chunk is not None:
            self._send(chunk)
            chunk.closed = True
            self._recycle(chunk)

    def _send(self, chunk: _Chunk) -> None:
        if chunk.sent < chunk.filled:
            part = slice(chunk.sent, chunk.filled)
            event = self._device.fetch(chunk.host.memory[part], chunk.slot.memory[part], chunk.marks.values())
            chunk.segment.sent = True
            chunk.segment.arrived = chunk.slot.free = event
            chunk.sent, chunk.marks, chunk.segment = chunk.filled, {}, _ChunkSegment()

    def _piece(self, chunk: _Chunk, start: int) -> BytePiece:
        """What the writer gets: the bytes, how to wait for them, and how to release them."""
        segment = chunk.segment
        chunk.users += 1

        def ready() -> None:
            self._device.attach_thread()
            if not segment.sent:
                with self.changed:
                    if not segment.sent:
                        self._send(chunk)
            self._device.wait(segment.arrived)

        def release() -> None:
            with self.changed:
                chunk.users -= 1
                self._recycle(chunk)

        return BytePiece(chunk.host.view[start : chunk.filled], ready, release)

    def _recycle(self, chunk: _Chunk) -> None:
        if chunk.closed and not chunk.users and not self._closed:
            self._host.append(chunk.host)
            self.changed.notify_all()


class _Host:
    """A piece of host memory."""

    __slots__ = ("memory", "view")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.view = memory.numpy().data


class _Slot:
    """A piece of device memory, which is `free` once that event has happened."""

    __slots__ = ("_views", "free", "memory")

    def __init__(self, memory: torch.Tensor, free: Any) -> None:
        self.memory = memory
        self.free = free
        self._views = {torch.uint8: memory}

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.memory.view(dtype)
        return view


class _ChunkSegment:
    """The part of a chunk that goes to the host in one copy, complete once the event `arrived` has happened."""

    __slots__ = ("arrived", "sent")

    def __init__(self) -> None:
        self.sent = False
        self.arrived: Any = None


class _Chunk:
    """Device and host memory in use together, until everything in them is written."""

    __slots__ = ("_entered", "_free", "closed", "filled", "host", "marks", "segment", "sent", "slot", "users")

    def __init__(self, host: _Host, slot: _Slot) -> None:
        self.host = host
        self.slot = slot
        self.filled = self.sent = 0
        self.users = 0  # pieces not released
        self.closed = False
        self.segment = _ChunkSegment()
        self.marks: dict[Any, Any] = {}  # by stream, the event that its copies into the chunk are done
        self._free = slot.free
        self._entered: set[Any] = set()  # streams

    def enter(self, device: DeviceStreams, stream: Any) -> None:
        """Let a stream write into the chunk, not before what the device memory held has reached the host."""
        if stream not in self._entered:
            self._entered.add(stream)
            device.wait_event(stream, self._free)
