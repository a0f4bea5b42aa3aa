"""Two states compared parameter by parameter: a table, the angle between them, their ratio, the noise of gradients.

`pairs` reads the two tensors of a name together: in CPU memory by the kernel that compares recordings, without a copy;
on another device in float64, and all results of a device are fetched at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Literal, NamedTuple, overload

import torch

from astray.capture.pytorch.shards import is_distributed
from astray.errors import StateError
from astray.state.describe import Cell, StatisticsTable
from astray.state.mapping import StateMapping, blocks
from astray.state.measuring import NAMES, readable
from astray.state.naming import Pattern, check_same, matching
from astray.state.state_dict import StateDict
from astray.stats import Strided, contrast


def diff(one: StateDict, other: StateDict, pattern: Pattern | None = None, *, sort: bool = True) -> StatisticsTable:
    """A table of how far the second state is from the first, the parameters that differ most first.

    >>> print(astray.state.diff(before, after, pattern=".*attn.*"))

    `diff` is the L2 norm of the difference, `relative` that over the norm of the first, `max` its largest element, and
    `changed` the share of elements that are not equal. The sums are over the elements that are finite on both sides; a
    column says how many are not, if there are any. Parameters that only one state has, or that have another shape,
    come last. sort=False keeps the order of the first state.
    """
    names = matching(dict.fromkeys([*one, *other]), pattern)
    both = [name for name in names if name in one and name in other]
    alike = [name for name in both if one.spec(name).shape == other.spec(name).shape]
    sums = pairs(one, other, alike)
    if sort:
        alike.sort(key=lambda name: (sums[name].finite - sums[name].count, -sums[name].relative))
    rows = [_row(name, one, sums[name]) for name in alike]
    unpaired = [name for name in names if name not in sums]
    rows += [_unpaired(name, one, other) for name in unpaired]
    columns: dict[str, list[Cell]] = {key: [row[key] for row in rows] for key in _row("", one, EMPTY)}
    if all(sums[name].finite == sums[name].count for name in alike):
        del columns["non-finite"]
    if not unpaired:
        del columns["unpaired"]
    return StatisticsTable(f"{other.name} − {one.name}", columns)


@overload
def cosine(one: StateDict, other: StateDict, lw: Literal[False] = False, pattern: Pattern | None = None) -> float: ...
@overload
def cosine(one: StateDict, other: StateDict, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
def cosine(one: StateDict, other: StateDict, lw: bool = False, pattern: Pattern | None = None) -> float | StateDict:
    """The cosine of the angle between two states: of all parameters together, or of each.

    Of the gradients of successive steps it shows whether training goes on in one direction (near 1), is mostly noise
    (near 0), or oscillates across a valley (below 0). NaN where one of the two is zero.

    >>> before = astray.state.from_grad(model, clone=True)
    ...
    >>> astray.state.cosine(before, astray.state.from_grad(model))
    """
    first, second = matching(one, pattern), matching(other, pattern)
    check_same(first, second, (one.name, other.name))
    sums = pairs(one, other, first)
    if lw:
        return StateDict({name: sums[name].cosine for name in first}, name="cosine")
    return reduce(PairSums.plus, sums.values(), EMPTY).cosine


def _row(name: str, state: StateDict, pair: PairSums) -> dict[str, Cell]:
    return {
        "name": name,
        "shape": state.spec(name).shape if name in state else (),
        "norm2": math.sqrt(pair.first),
        "other": math.sqrt(pair.second),
        "diff": math.sqrt(pair.difference),
        "relative": pair.relative,
        "max": pair.largest,
        "cosine": pair.cosine,
        "changed": pair.different / pair.count if pair.count else 0.0,
        "non-finite": pair.count - pair.finite,
        "unpaired": "",
    }


def _unpaired(name: str, one: StateDict, other: StateDict) -> dict[str, Cell]:
    """A parameter without a counterpart: nothing but its name, its shape, and why."""
    first, second = (state.spec(name).shape if name in state else None for state in (one, other))
    why = (
        f"{second} in the second"
        if first is not None and second is not None
        else f"only in the {'first' if second is None else 'second'}"
    )
    unknown = dict.fromkeys(("norm2", "other", "diff", "relative", "max", "cosine", "changed"), math.nan)
    shape: Cell = second or () if first is None else first
    return {"name": name, "shape": shape, **unknown, "non-finite": 0, "unpaired": why}


def trust_ratio(update: StateDict, weight: StateDict, pattern: Pattern | None = None) -> StateDict:
    """|update| / |weight| of each parameter, by their L2 norms: a state of numbers.

    >>> astray.state.trust_ratio(update, weight, pattern=".*mlp.*").describe(lw=True)

    This is the reciprocal of what layer-wise adaptive optimizers call the trust ratio. Where a weight is 0 it is
    infinite, or NaN if nothing was to be updated either.
    """
    return update.norm2(True, pattern) / weight.norm2(True, pattern)


# -- the noise of gradients --------------------------------------------------------------------------------------------


class NoiseScale(NamedTuple):
    """Estimates of the gradient and its noise from the gradients of several small batches.

    All are without bias, so that `signal` may be negative where the gradient is nearly 0; the scale is infinite then.
    """

    scale: float
    """tr(Σ) / |G|²: with batches much smaller than this a step is mostly noise, with much larger ones samples are
    wasted."""
    noise: float
    """tr(Σ), the variance of the gradient of a single example, over all parameters."""
    signal: float
    """|G|², of the true gradient."""
    batches: int


def gradient_noise_scale(gradients: Iterable[StateDict], batch: int, pattern: Pattern | None = None) -> NoiseScale:
    """The simple noise scale, from the gradients of at least two batches of `batch` examples each.

    >>> def gradients():
    ...     for part in parts:
    ...         model.zero_grad()
    ...         loss(model(part)).backward()
    ...         yield astray.state.from_grad(model)
    >>> astray.state.gradient_noise_scale(gradients(), batch=len(parts[0])).scale

    Each is the mean gradient over its batch, taken at the same weights. Only a running sum is kept, in float64. More
    batches make the estimate better: its error shrinks as one over the root of their number.
    """
    if batch < 1:
        raise StateError(f"A batch has at least one example; got batch={batch}.")
    total: dict[str, torch.Tensor] = {}
    squares, count = 0.0, 0
    for gradient in gradients:
        chosen = gradient.filter(pattern)
        if count:
            check_same(total, list(chosen), ("the first gradient", f"gradient {count}"))
        squares += chosen.norm2() ** 2
        for name in chosen:
            value = torch.as_tensor(chosen[name]).double()
            total[name] = total[name].add_(value) if count else value.clone()
        count += 1
    if count < 2:
        raise StateError(f"Noise shows between gradients, and there was {count}. Give those of two batches or more.")
    of_mean = (StateDict(total).norm2() / count) ** 2
    of_each = squares / count
    noise = (of_each - of_mean) * batch * count / (count - 1)
    signal = (count * of_mean - of_each) / (count - 1)
    return NoiseScale(noise / signal if signal > 0 else math.inf, noise, signal, count)


# -- sums over two tensors ---------------------------------------------------------------------------------------------


class PairSums(NamedTuple):
    """Sums over the elements that are finite on both sides, in float64; they add up over parameters."""

    count: int  # type: ignore[assignment]  # hides a method of tuples that is not used
    finite: int
    first: float
    """Σa²."""
    second: float
    """Σb²."""
    difference: float
    """Σ(b − a)²."""
    dot: float
    """Σab."""
    largest: float
    """The largest |b − a|."""
    different: int
    """Elements that are not equal."""

    def plus(self, more: PairSums) -> PairSums:
        """The sums over the elements of both."""
        sums = [own + added for own, added in zip(self, more, strict=True)]
        return PairSums._make(sums)._replace(
            count=self.count + more.count, finite=self.finite + more.finite, different=self.different + more.different,
            largest=max(self.largest, more.largest),
        )  # fmt: skip

    @property
    def relative(self) -> float:
        """|b − a| / |a|; 0 where both are 0, and infinite where only a is."""
        if not self.difference:
            return 0.0
        return math.sqrt(self.difference / self.first) if self.first else math.inf

    @property
    def cosine(self) -> float:
        """Of the angle between the two; NaN where one of them is 0, or an element is not finite."""
        size = math.sqrt(self.first) * math.sqrt(self.second)
        return max(-1.0, min(1.0, self.dot / size)) if size and self.finite == self.count else math.nan


EMPTY = PairSums(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def pairs(one: StateMapping, other: StateMapping, names: Iterable[str]) -> dict[str, PairSums]:
    """The sums for each of these names; both values are read once."""
    sums: dict[str, PairSums] = {}
    on_device: dict[str, torch.Tensor] = {}
    for name in names:
        a, b = (_tensor(name, state[name]) for state in (one, other))
        if a.shape != b.shape:
            raise StateError(
                f"{name!r} has shape {tuple(a.shape)} in {one.name!r} and {tuple(b.shape)} in {other.name!r}."
            )
        if a.is_cpu and b.is_cpu and a.is_complex() == b.is_complex():
            sums[name] = _cpu_sums(a, b)
        else:
            on_device[name] = _device_sums(a, b.to(a.device))
    return sums | _fetched(on_device)


def _fetched(on_device: dict[str, torch.Tensor]) -> dict[str, PairSums]:
    """The sums of `_device_sums`, with one wait for each device."""
    fetched = {}
    for device in {row.device for row in on_device.values()}:
        names = [name for name, row in on_device.items() if row.device == device]
        rows = torch.stack([on_device[name] for name in names]).tolist()
        for name, row in zip(names, rows, strict=True):
            sums = PairSums._make(row)
            fetched[name] = sums._replace(count=int(sums.count), finite=int(sums.finite), different=int(sums.different))
    return fetched


def _tensor(name: str, value: torch.Tensor | float) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if is_distributed(value):
        raise StateError(
            f"{name!r} is spread over processes. Compare full_tensor() of both, or the parts by to_local()."
        )
    return readable(name, value)


def _cpu_sums(a: torch.Tensor, b: torch.Tensor) -> PairSums:
    measured = contrast(*(Strided(t.data_ptr(), NAMES[t.dtype], tuple(t.shape), t.stride()) for t in (a, b)))
    norms = (measured.l2_reference, measured.l2_candidate, measured.l2_error)
    first, second, difference = ((norm or 0.0) ** 2 for norm in norms)
    dot, largest = measured.dot or 0.0, measured.max_abs_error or 0.0
    return PairSums(measured.count, measured.finite, first, second, difference, dot, largest, measured.different)


def _device_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fields of a `PairSums`, on the device."""
    total = torch.zeros(len(PairSums._fields), dtype=torch.float64, device=a.device)
    for x, y in zip(blocks(a), blocks(b), strict=True):
        x, y = (torch.view_as_real(each).reshape(-1) if each.is_complex() else each for each in (x, y))
        different = ((x != y) & ~((x != x) & (y != y))).sum()
        x, y = x.double(), y.double()
        finite = x.isfinite() & y.isfinite()
        x, y = x.where(finite, 0.0), y.where(finite, 0.0)
        gap = y - x
        largest = torch.maximum(total[6], gap.abs().max())
        sums = [finite.sum(), (x * x).sum(), (y * y).sum(), (gap * gap).sum(), (x * y).sum()]
        total += torch.stack(
            [torch.full_like(gap[0], len(x)), *(each.double() for each in sums), 0 * largest, different.double()]
        )
        total[6] = largest
    return total
