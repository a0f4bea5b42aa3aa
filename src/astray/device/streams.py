"""What staging asks of a device: memory on both sides, and copies that wait for each other without the program waiting.

`Streams` is for devices that work through queues of their own (CUDA, ROCm, XPU, NPU), `Plain` for all others, where a
copy is over when its call returns. Threads that write call `adopt` first, so that they can wait for the device even
while the program captures a graph, without breaking that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from astray.device.launcher import relax
from astray.store.deferred import PAGE


class Device(Protocol):
    """The operations. A stream is whatever `current` returns, an event whatever `mark` and `fetch` do."""

    def adopt(self) -> None:
        """Makes this thread, which is one of our own, work with the device."""

    def capturing(self) -> bool:
        """Whether what this thread does now becomes part of a graph instead of being done."""

    def on_device(self, nbytes: int) -> torch.Tensor: ...

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Memory of the host, page-aligned, which the device can write to by itself."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device of memory that is not written to any more, to be used in this stream."""

    def current(self) -> Any:
        """The stream in which this thread works."""

    def mark(self, stream: Any, event: Any = None) -> Any:
        """An event that happens once all work so far in the stream is done; an older one is used again."""

    def follow(self, stream: Any, event: Any) -> None:
        """Lets whatever the stream is given from now on happen after the event."""

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:
        """Copies to the host once all these events have happened; returns the event that it is there."""

    def wait(self, event: Any) -> None:
        """Waits, in this thread, until the event has happened. Raises when the device failed."""

    def synchronize(self) -> None:
        """Waits for everything that `fetch` has begun."""


def device_for(device: torch.device) -> Device:
    """The operations for a device, by what torch can do with it."""
    module = getattr(torch, device.type, None)
    if all(hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream")) and device.type != "cpu":
        return Streams(device)
    return Plain(device)


class Streams:
    """A device with queues, by the module that torch has for its kind. Copies to the host have a queue of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._copies = self._module.Stream(device=device)
        self._adopted = threading.local()

    def adopt(self) -> None:
        if not hasattr(self._adopted, "now"):
            self._adopted.now = True
            relax()
            self._module.set_device(self._device)  # with any other, memory would be taken there

    def capturing(self) -> bool:
        return self._capturing()

    def on_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def on_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device, non_blocking=True)

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def mark(self, stream: Any, event: Any = None) -> Any:
        event = self._event() if event is None else event
        event.record(stream)
        return event

    def follow(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:
        for event in after:
            self._copies.wait_event(event)
        with self._module.stream(self._copies):
            host.copy_(device, non_blocking=True)
        return self.mark(self._copies)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self._copies.synchronize()

    def _event(self) -> Any:
        try:
            return self._module.Event(blocking=True)  # sleeps while it waits; the other kind keeps a processor busy
        except TypeError:
            return self._module.Event()


class Plain:
    """A device whose copies are over when they return; also the host itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def adopt(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def on_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def on_host(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device)

    def current(self) -> Any:
        return None

    def mark(self, stream: Any, event: Any = None) -> Any:
        pass

    def follow(self, stream: Any, event: Any) -> None:
        pass

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Any]) -> Any:  # noqa: ARG002 - all over
        host.copy_(device)

    def wait(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass
