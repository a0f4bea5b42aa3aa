"""Every device that holds tensors of a program, each with its measurer; the public class of this package.

The measurer of a device is chosen at its first tensor: `CudaMeasurer` with our kernels on a CUDA device with Triton,
`TorchMeasurer` with plain torch operations, at many times the cost, on all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from astray.device import torch_kernels
from astray.device.launcher import NoKernelsError, unobserved
from astray.device.staging import HOST_BYTES, NotStagedError, Staging
from astray.device.tickets import CAPTURED, SLOTS, WIDTH, ResultRows, Segment, Tickets
from astray.interrupts import interrupt_of, pass_interrupt
from astray.log import logger
from astray.stats import ShardPosition, Strided
from astray.store import DeferredBytes

if TYPE_CHECKING:
    from astray.device.cuda_measurer import CudaMeasurer


class DeviceMeasurer:
    """Measures tensors on their device without waiting: the result is redeemed by ticket."""

    def __init__(self) -> None:
        self.tickets = Tickets()
        self.cuda_measurers: dict[torch.device, CudaMeasurer] = {}
        """Of the CUDA devices that have our kernels. Native code reads this dict too, so it is never replaced."""
        self._plain: dict[torch.device, TorchMeasurer] = {}
        self._adding = threading.Lock()
        self._warned: set[str] = set()
        self._staging: dict[torch.device, Staging] = {}
        self._waited: Callable[[float], None] | None = None
        self._queue_bytes = HOST_BYTES

    def start(self, forget: Callable[[], None], waited: Callable[[float], None], queue_bytes: int) -> None:
        """`forget` is called when tickets handed out so far should not be reused, `waited` when values were waited for.

        No more than about `queue_bytes` of values are on their way at a time.
        """
        self.tickets.forget = forget
        self._waited = waited
        self._queue_bytes = queue_bytes

    def stop(self) -> None:
        """Releases all memory. Everything has been fetched."""
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()
        self.cuda_measurers.clear()
        self._plain.clear()

    def measure(
        self, tensor: torch.Tensor, memory: Strided, shard: ShardPosition | None = None, statistics: bool = True
    ) -> int | str:
        """Starts to measure a plain tensor: its `memory`, perhaps shaped as its `shard` has it. Returns the ticket.

        A string is the reason why that cannot be done.
        """
        device = tensor.device
        cuda = self.cuda_measurers.get(device)
        if cuda is not None:
            try:
                return cuda.measure(memory, shard, statistics)
            except ValueError as error:  # strides beyond what the kernel can walk
                pass_interrupt(error)
            except NoKernelsError as error:
                self._warn_slow(f"{memory.dtype} tensors on {device}", error)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return CAPTURED
        plain = self._plain.get(device)
        if plain is None:
            self._add(device, kernels=cuda is None)
            return self.measure(tensor, memory, shard, statistics)
        if memory.shape != tensor.shape:
            tensor = tensor.as_strided(memory.shape, memory.stride, tensor.storage_offset())
        return plain.measure(tensor, shard, statistics)

    def measure_together(self, device: torch.device, memories: Sequence[Strided], statistics: bool) -> list[int] | None:
        """Measures plain tensors of one dtype in one launch, and returns their tickets; None when that is not possible.

        It is not in distributed programs: they gather weights on streams of their own.
        """
        measurer = self.cuda_measurers.get(device)
        if measurer is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        return measurer.measure_together(memories, statistics)

    def fetch(self, tensor: torch.Tensor, positions: npt.NDArray[np.int64] | None) -> DeferredBytes | str:
        """The values of a plain tensor as they are now: all, or those at some positions. A string says why not."""
        staging = self._staging.get(tensor.device)
        if staging is None:
            with self._adding:
                staging = self._staging.get(tensor.device) or Staging(
                    tensor.device, host_bytes=self._queue_bytes, waited=self._waited
                )
                self._staging[tensor.device] = staging
        try:
            return staging.take(tensor, positions)
        except NotStagedError as error:
            return str(error)

    def _add(self, device: torch.device, kernels: bool) -> None:
        with self._adding:
            if device in self._plain or (kernels and device in self.cuda_measurers):
                return
            if kernels and device.type == "cuda":
                try:
                    from astray.device.cuda_measurer import CudaMeasurer

                    self.cuda_measurers[device] = CudaMeasurer(device, self.tickets)
                    return
                except (NoKernelsError, ImportError) as error:
                    self._warn_slow(f"tensors on {device}", error)
            self._plain[device] = TorchMeasurer(device, self.tickets)

    def _warn_slow(self, what: str, why: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(
                "astray measures %s in plain torch operations, which takes many times as long. %s", what, why
            )


class TorchMeasurer:
    """The measurements of one device in plain torch operations, for devices and dtypes that our kernels do not know.

    A row per tensor is made on the device, and all rows of a step come back in one copy.
    """

    def __init__(self, device: torch.device, tickets: Tickets) -> None:
        self._device = device
        self._tickets = tickets
        self._lock = threading.Lock()
        self._segment = tickets.open()
        self._rows: list[torch.Tensor] = []
        tickets.add(self)

    def measure(self, tensor: torch.Tensor, shard: ShardPosition | None, statistics: bool) -> int:
        """Starts to measure a plain strided tensor of this device, and returns the ticket."""
        with unobserved():
            row = torch_kernels.measure(tensor, statistics=statistics, shard=shard)
        with self._lock:
            segment = self._segment
            slot = segment.count
            segment.count = slot + 1
            self._rows.append(row)
            if segment.count == SLOTS:
                self._send()
        return segment.ticket(slot, statistics)

    def close(self) -> None:
        """Starts to fetch what was measured since the last time. Raises no failure of the device."""
        with self._lock:
            self._send()

    def abandon(self, why: str) -> None:
        """Does nothing: `close` has started to fetch every row, or lost it."""

    def _send(self) -> None:
        segment, rows = self._segment, self._rows
        if not rows:
            return
        interrupt = None
        try:
            with unobserved():
                _send(segment, torch.stack(rows))
        except Exception as error:  # noqa: BLE001 - a device that has failed must not end the program through us
            interrupt = interrupt_of(error)
            segment.lose(f"the device failed: {str(error).partition(chr(10))[0]}")
        self._segment, self._rows = self._tickets.open(), []
        self._tickets.sent(segment)
        if interrupt is not None:
            raise interrupt


def _send(segment: Segment, rows: torch.Tensor) -> None:
    """Starts the copy of a segment's rows. A device without events is waited for, once a step."""
    try:
        arrived = torch.Event(rows.device)
        host = rows.to("cpu", non_blocking=True)
        arrived.record()
    except (RuntimeError, NotImplementedError) as error:
        pass_interrupt(error)
        host, arrived = rows.cpu(), None

    def fetch() -> ResultRows:
        if arrived is not None:
            arrived.synchronize()
        fetched: ResultRows = host.numpy().T.copy()
        assert fetched.shape[0] == WIDTH
        return fetched

    segment.send(fetch)
