"""How fast tensors are measured on the device, beside a plain read of the same memory, and what one launch costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from astray.device.devices import DeviceMeasurer
from astray.stats import Strided
from gpu_sections.bandwidth import best_read, device_seconds
from gpu_sections.work import Report, Work

ELEMENTS = 1 << 27
SIDE = 1 << 14  # the length of a row where there are rows

DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "complex64"]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda a: a.T,
    "heads": lambda a: a.view(-1, 1024, 16, 64).transpose(1, 2),
    "half of each row": lambda a: a[:, : a.shape[1] // 2],
    "every second": lambda a: a[:, ::2],
    "shifted by one": lambda a: a.view(-1)[1:],
    "expanded": lambda a: a[:64, None].expand(64, 128, a.shape[1]),
}
SMALL = [16, 1024, 65536, 1 << 20]
MANY = 500  # few enough that the device's queue never fills, and with one merging a realistic share of it


def run(work: Work, report: Report) -> None:
    report.write("### Kernels")
    if not work.has_gpu:
        report.write("Not measured: there is no GPU.")
        return
    devices = DeviceMeasurer()
    report.write(
        f"{ELEMENTS:,} contiguous elements: GB/s, and in brackets the fraction of the best plain read of that memory."
    )
    report.table(
        ["dtype", "read", "statistics + fingerprint", "fingerprint"], [large(devices, name) for name in DTYPES]
    )
    report.write(
        "Other layouts of as many elements, or half: GB/s of the elements with statistics and fingerprint, and in "
        "brackets the fraction of a plain read of the contiguous ones. Expanded ones repeat, so a cache may help."
    )
    names = ("bfloat16", "float32")
    columns = [[strided(devices, name, layout) for layout in LAYOUTS] for name in names]
    report.table(["layout", *names], [list(line) for line in zip(LAYOUTS, *columns, strict=True)])
    report.write(
        "One tensor after the other, float32, µs each: as fast as the host hands them over, and the host alone."
    )
    report.table(["elements", "device and host", "host"], [small(devices, count) for count in SMALL])


def fill(dtype: str, count: int) -> torch.Tensor:
    """Ordinary values: normal with mean 0, as weights and activations are; small integers for integers."""
    kind = getattr(torch, dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(-100, 100, (count,), dtype=kind, device="cuda")
    if kind.is_complex or kind.itemsize >= 4:
        return torch.randn(count, dtype=kind, device="cuda")
    return torch.randn(count, device="cuda").to(kind)


class Job:
    """Has one tensor measured, again and again."""

    def __init__(self, devices: DeviceMeasurer, tensor: torch.Tensor, statistics: bool = True) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._memory = Strided(tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride())
        self._devices, self._tensor, self._statistics = devices, tensor, statistics
        self._ticket = -1

    def __call__(self) -> None:
        ticket = self._devices.measure(self._tensor, self._memory, None, self._statistics)
        if isinstance(ticket, str):
            raise RuntimeError(f"{self._memory.dtype} {self._memory.shape} was not measured: {ticket}")
        self._ticket = ticket

    def fetch(self) -> None:
        """Has the results brought, as the end of a step does, so that their memory is free again."""
        self._devices.tickets.start_fetch()
        self._devices.tickets.redeem(np.array([self._ticket]))

    def seconds(self) -> float:
        return device_seconds(self, between=self.fetch)


def large(devices: DeviceMeasurer, dtype: str) -> list[str]:
    tensor = fill(dtype, ELEMENTS)
    bound = best_read(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    rates = [tensor.nbytes / Job(devices, tensor, statistics).seconds() for statistics in (True, False)]
    return [dtype, f"{bound / 1e9:,.0f}", *(f"{rate / 1e9:,.0f} ({rate / bound:.2f})" for rate in rates)]


def strided(devices: DeviceMeasurer, dtype: str, layout: str) -> str:
    whole = fill(dtype, ELEMENTS).view(-1, SIDE)
    tensor = LAYOUTS[layout](whole)
    rate = tensor.nbytes / Job(devices, tensor).seconds()
    return f"{rate / 1e9:,.0f} ({rate / best_read(whole):.2f})"


def small(devices: DeviceMeasurer, count: int) -> list[str]:
    job = Job(devices, fill("float32", count))
    both, alone = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(MANY):
            job()
        alone.append(time.perf_counter() - started)
        devices.tickets.start_fetch()
        torch.cuda.synchronize()
        both.append(time.perf_counter() - started)
        job.fetch()
    return [f"{count:,}", f"{min(both) / MANY * 1e6:.1f}", f"{min(alone) / MANY * 1e6:.1f}"]
