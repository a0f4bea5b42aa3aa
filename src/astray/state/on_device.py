"""Moments of tensors on a device: by the kernel of `device.moments` on a GPU, by plain torch operations elsewhere.

Nothing waits while tensors are added: each leaves rows of numbers on its device, and `fetch` brings the rows of all
over at once. The plain way goes a block at a time, in float64 where the device has it. There numbers beyond 2^±200,
which only float64 has, overflow in the third and fourth moments; the CPU kernels are right for those too.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from astray.device import moments as kernel
from astray.device.torch_kernels import widest_float
from astray.device.unobserved import quietly
from astray.state.blocks import blocks
from astray.state.measurement import Measurement, moments_from, powers_from, unite

FIELDS = 16
"""The numbers that begin a row: those of a `Moments` without its exponent, which is 0 here."""

HELD_BYTES = 1 << 28
"""Tensors wait for each other, to be measured by one launch, up to so much memory that nobody else may want to keep."""


class Queue:
    """Tensors that are being measured, each on its device."""

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[tuple[list[str], list[int], torch.Tensor]]] = {}
        self._waiting: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        self._held = 0
        self._wanted: dict[str, tuple[tuple[float, ...], bool]] = {}

    def add(self, name: str, tensor: torch.Tensor, exponents: Collection[float]) -> None:
        """Have a plain tensor measured that has elements."""
        self._wanted[name] = tuple(exponents), tensor.is_complex()
        if not exponents and kernel.can_measure(tensor):
            self._waiting.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
            self._held += tensor.nbytes
            if self._held > HELD_BYTES:
                self._launch()
            return
        wide = widest_float(tensor.device)
        with quietly():
            for block in blocks(tensor):
                numbers = (block.abs() if block.is_complex() else block).to(wide)
                self._found([name], [1], _row(numbers, self._wanted[name][0]))

    def fetch(self) -> dict[str, Measurement]:
        """What was found, by name: one wait for each device."""
        self._launch()
        parts: dict[str, list[Measurement]] = {name: [] for name in self._wanted}
        for found in self._rows.values():
            with quietly():
                together = torch.cat([rows.reshape(-1) for _, _, rows in found]).cpu().numpy()
            place = 0
            for names, counts, rows in found:
                numbers = together[place : place + rows.numel()].reshape(-1, rows.shape[-1])
                place += rows.numel()
                if len(numbers) > len(names):
                    numbers = kernel.merged(numbers, counts)
                for name, row in zip(names, numbers.tolist(), strict=True):
                    parts[name].append(self._measurement(name, row))
        return {name: each[0] if len(each) == 1 else unite(each) for name, each in parts.items()}

    def _launch(self) -> None:
        """Start the kernel for all that wait."""
        for waiting in self._waiting.values():
            with quietly():
                rows, counts = kernel.measure([tensor for _, tensor in waiting])
            self._found([name for name, _ in waiting], counts, rows)
        self._waiting.clear()
        self._held = 0

    def _found(self, names: list[str], counts: list[int], rows: torch.Tensor) -> None:
        self._rows.setdefault(rows.device, []).append((names, counts, rows))

    def _measurement(self, name: str, numbers: list[float]) -> Measurement:
        exponents, magnitudes = self._wanted[name]
        moments = moments_from([*numbers[:FIELDS], 0.0])
        return Measurement(moments, powers_from(numbers[FIELDS:], exponents), magnitudes)


def _row(numbers: torch.Tensor, exponents: tuple[float, ...]) -> torch.Tensor:
    """The fields of a `Moments` in their order, then a unit and a sum of powers for each exponent."""
    inf = torch.inf
    finite = torch.isfinite(numbers)
    none = ~finite.any()
    values = torch.where(finite, numbers, 0.0)
    sizes = values.abs()
    count = finite.sum()
    total = values.sum()
    mean = total / count
    away = torch.where(finite, numbers - mean, 0.0)
    squares = away * away
    absmin, absmax = torch.where(finite, sizes, inf).min(), sizes.max()
    fields = [
        torch.full_like(total, numbers.numel()),
        count,
        torch.isnan(numbers).sum(),
        (numbers == inf).sum(),
        (numbers == -inf).sum(),
        (numbers == 0).sum(),
        _unless(none, torch.where(finite, numbers, inf).min()),
        _unless(none, torch.where(finite, numbers, -inf).max()),
        _unless(none, absmin),
        _unless(none, absmax),
        total,
        sizes.sum(),
        mean,
        squares.sum(),
        (squares * away).sum(),
        (squares * squares).sum(),
    ]
    for p in exponents:
        extreme = absmax if p > 0 else absmin
        unit = torch.where(torch.isfinite(extreme) & (extreme > 0), extreme, torch.ones_like(extreme))
        fields += [unit, torch.where(finite, (sizes / unit) ** p, 0.0).sum()]
    return torch.stack([field.to(numbers.dtype) for field in fields])


def _unless(none: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """NaN where there is no finite number to speak of."""
    return torch.where(none, torch.full_like(value, torch.nan), value)
