"""Counts what a recording measures: each tensor once, however often it is seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

import astray.capture.pytorch  # noqa: F401 - decides how calls are taken: before `counting` says in Python
from astray.device.devices import Devices
from astray.stats import DTYPES, Strided


class Measured:
    """How many tensors on devices were measured, and how many bytes that were different ones were read for it."""

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0

    def add(self, memory: Strided) -> None:
        self.tensors += 1
        lengths = (size for size, step in zip(memory.shape, memory.stride, strict=True) if step)  # 0 repeats
        self.bytes += prod(lengths) * DTYPES[memory.dtype].itemsize if memory.size else 0


@contextmanager
def counting() -> Iterator[Measured]:
    """Counts what is measured inside, on all threads. Recordings that start here take tensors in Python, to be seen."""
    found, measure = Measured(), Devices.measure
    taps = os.environ.get("ASTRAY_TAPS")
    os.environ["ASTRAY_TAPS"] = "python"

    def counted(self: Devices, tensor: torch.Tensor, memory: Strided, *rest: Any, **named: Any) -> int | str:
        found.add(memory)
        return measure(self, tensor, memory, *rest, **named)

    Devices.measure = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Devices.measure = measure  # type: ignore[method-assign]
        del os.environ["ASTRAY_TAPS"]
        if taps is not None:
            os.environ["ASTRAY_TAPS"] = taps
