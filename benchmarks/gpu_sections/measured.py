"""Counts what a recording measures: each tensor once, however often it is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from astray.capture.observer import Observer
from astray.capture.settings import Settings
from astray.device.devices import DeviceMeasurer
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
    """Counts what is measured inside, on all threads. Recordings that start here measure in Python, to be seen."""
    found, measure, apply = Measured(), DeviceMeasurer.measure, Observer.apply

    def counted(self: DeviceMeasurer, tensor: torch.Tensor, memory: Strided, *rest: Any, **named: Any) -> int | str:
        found.add(memory)
        return measure(self, tensor, memory, *rest, **named)

    def apply_oddly(self: Observer, settings: Settings) -> None:
        apply(self, settings)
        self.native.apply(False, settings.roles, True, False, False)  # every tensor counts as odd

    DeviceMeasurer.measure = counted  # type: ignore[method-assign]
    Observer.apply = apply_oddly  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DeviceMeasurer.measure = measure  # type: ignore[method-assign]
        Observer.apply = apply  # type: ignore[method-assign]
