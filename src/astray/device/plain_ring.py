"""Measures the tensors of any device in plain torch operations: for those that our kernels do not know.

The same as the ring of a CUDA device, at many times the cost: a row per tensor is made on the device, and all rows of a
step come back in one copy.
"""

from __future__ import annotations

import threading

import torch

from astray.device import torch_kernels
from astray.device.result_row import WIDTH, Rows
from astray.device.tickets import SLOTS, Segment, Tickets
from astray.device.unobserved import quietly
from astray.interrupts import interrupt_of, pass_interrupt
from astray.stats import Shard


class PlainRing:
    """The measurements of one device."""

    def __init__(self, device: torch.device, tickets: Tickets) -> None:
        self._device = device
        self._tickets = tickets
        self._lock = threading.Lock()
        self._segment = tickets.open()
        self._rows: list[torch.Tensor] = []
        tickets.add(self)

    def measure(self, tensor: torch.Tensor, shard: Shard | None, statistics: bool) -> int:
        """Has a plain strided tensor of this device measured, and gives the ticket."""
        with quietly():
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
        """Sends for what has been measured since the last time. Raises nothing."""
        with self._lock:
            self._send()

    def abandon(self, why: str) -> None:
        """Nothing is ever left: what cannot be sent for is lost already."""

    def _send(self) -> None:
        segment, rows = self._segment, self._rows
        if not rows:
            return
        interrupt = None
        try:
            with quietly():
                _send(segment, torch.stack(rows))
        except Exception as error:  # noqa: BLE001 - a device that has failed must not end the program through us
            interrupt = interrupt_of(error)
            segment.lose(f"the device failed: {str(error).partition(chr(10))[0]}")
        self._segment, self._rows = self._tickets.open(), []
        self._tickets.sent(segment)
        if interrupt is not None:
            raise interrupt


def _send(segment: Segment, rows: torch.Tensor) -> None:
    """Starts the copy of a segment's rows. A device that has no events is waited for, once a step."""
    try:
        arrived = torch.Event(rows.device)
        host = rows.to("cpu", non_blocking=True)
        arrived.record()
    except (RuntimeError, NotImplementedError) as error:
        pass_interrupt(error)
        host, arrived = rows.cpu(), None

    def fetch() -> Rows:
        if arrived is not None:
            arrived.synchronize()
        here: Rows = host.numpy().T.copy()
        assert here.shape[0] == WIDTH
        return here

    segment.send(fetch)
