"""Two tensors of one name, read together: how large each is, how far apart they are, and the angle between them.

In CPU memory by the kernel that compares recordings, without a copy; elsewhere in float64 on the device, and fetched
with one wait for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from astray.capture.pytorch.shards import is_distributed
from astray.errors import StateError
from astray.state.base import Base
from astray.state.blocks import blocks
from astray.state.measuring import NAMES, readable
from astray.stats import Strided, contrast


class Pair(NamedTuple):
    """Sums over the elements that are finite on both sides, in float64; they add up over parameters."""

    count: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody misses
    finite: int
    one: float
    """Σa²."""
    other: float
    """Σb²."""
    apart: float
    """Σ(b − a)²."""
    dot: float
    """Σab."""
    largest: float
    """The largest |b − a|."""
    different: int
    """Elements that are not equal."""

    def plus(self, more: Pair) -> Pair:
        """The sums over the elements of both."""
        sums = [mine + its for mine, its in zip(self, more, strict=True)]
        return Pair._make(sums)._replace(
            count=self.count + more.count, finite=self.finite + more.finite, different=self.different + more.different,
            largest=max(self.largest, more.largest),
        )  # fmt: skip

    @property
    def relative(self) -> float:
        """|b − a| / |a|; 0 where both are 0, and infinite where only a is."""
        if not self.apart:
            return 0.0
        return math.sqrt(self.apart / self.one) if self.one else math.inf

    @property
    def cosine(self) -> float:
        """Of the angle between the two; NaN where one of them is 0, or an element is not finite."""
        size = math.sqrt(self.one) * math.sqrt(self.other)
        return max(-1.0, min(1.0, self.dot / size)) if size and self.finite == self.count else math.nan


NOTHING = Pair(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def pairs(one: Base, other: Base, names: Iterable[str]) -> dict[str, Pair]:
    """The two values of each of these names, read once."""
    found: dict[str, Pair] = {}
    waiting: dict[str, torch.Tensor] = {}
    for name in names:
        a, b = (_tensor(name, state[name]) for state in (one, other))
        if a.shape != b.shape:
            raise StateError(
                f"{name!r} has shape {tuple(a.shape)} in {one.name!r} and {tuple(b.shape)} in {other.name!r}."
            )
        if a.is_cpu and b.is_cpu and a.is_complex() == b.is_complex():
            found[name] = _contrasted(a, b)
        else:
            waiting[name] = _summed(a, b.to(a.device))
    return found | _fetched(waiting)


def _fetched(waiting: dict[str, torch.Tensor]) -> dict[str, Pair]:
    """The sums that were made on devices: one wait for each."""
    found = {}
    for device in {row.device for row in waiting.values()}:
        names = [name for name, row in waiting.items() if row.device == device]
        rows = torch.stack([waiting[name] for name in names]).tolist()
        for name, (count, finite, one, other, apart, dot, largest, different) in zip(names, rows, strict=True):
            found[name] = Pair(int(count), int(finite), one, other, apart, dot, largest, int(different))
    return found


def _tensor(name: str, value: torch.Tensor | float) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if is_distributed(value):
        raise StateError(
            f"{name!r} is spread over processes. Compare full_tensor() of both, or the parts by to_local()."
        )
    return readable(name, value)


def _contrasted(a: torch.Tensor, b: torch.Tensor) -> Pair:
    found = contrast(*(Strided(t.data_ptr(), NAMES[t.dtype], tuple(t.shape), t.stride()) for t in (a, b)))
    one, other, apart = ((value or 0.0) ** 2 for value in (found.l2_reference, found.l2_candidate, found.l2_error))
    return Pair(
        found.count, found.finite, one, other, apart, found.dot or 0.0, found.max_abs_error or 0.0, found.different
    )


def _summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fields of a `Pair`, on the device."""
    total = torch.zeros(len(Pair._fields), dtype=torch.float64, device=a.device)
    for x, y in zip(blocks(a), blocks(b), strict=True):
        x, y = (torch.view_as_real(each).reshape(-1) if each.is_complex() else each for each in (x, y))
        different = ((x != y) & ~((x != x) & (y != y))).sum()
        x, y = x.double(), y.double()
        finite = x.isfinite() & y.isfinite()
        x, y = x.where(finite, 0.0), y.where(finite, 0.0)
        away = y - x
        largest = torch.maximum(total[6], away.abs().max())
        sums = [finite.sum(), (x * x).sum(), (y * y).sum(), (away * away).sum(), (x * y).sum()]
        total += torch.stack(
            [torch.full_like(away[0], len(x)), *(each.double() for each in sums), 0 * largest, different.double()]
        )
        total[6] = largest
    return total
