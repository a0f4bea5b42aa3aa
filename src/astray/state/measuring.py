"""The values of a state → their moments, measured on the device that holds them.

CPU tensors are read once by the kernels of `astray.stats`; those on a device are measured there, with one wait for all
of them (`DeviceMeasurements`); of distributed ones every process measures its part (`ShardedTensors`). No tensor is
copied as a whole, and one that is made on demand is freed before the next one is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from astray.capture.pytorch.shards import is_distributed, is_pending, waited_for
from astray.device import moments as kernel
from astray.device.launcher import unobserved
from astray.device.torch_kernels import widest_float
from astray.errors import StateError
from astray.state.mapping import InBlocks, Value, blocks
from astray.stats import DTYPES, Strided
from astray.stats.moments import Moments, merge, moments, powers

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
"""The dtypes that can be measured, by their torch object."""


def measure(
    values: Mapping[str, Value],
    names: Iterable[str],
    exponents: Collection[float] = (),
    visit: Callable[[str, Value], None] | None = None,
) -> dict[str, MomentsMeasurement]:
    """Measures the values of these names, each read once. `visit` is called with every value while it is in memory."""
    measured: dict[str, MomentsMeasurement] = {}
    queue, shards = DeviceMeasurements(), ShardedTensors()

    def measure_one(name: str) -> None:  # a function, so that each value is freed before the next one is made
        value = values[name]
        if visit is not None:
            visit(name, value)
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        elif is_sharded(value):
            shards.expect(name, value)
            value = local_part(value)
        tensor = readable(name, value)
        if tensor.is_cpu or not tensor.numel():
            measured[name] = _measured(tensor, exponents)
        else:
            queue.add(name, tensor, exponents)

    in_blocks = values if isinstance(values, InBlocks) and visit is None and not exponents else None
    for name in names:
        if in_blocks is not None:
            measured[name] = _measured_in_blocks(in_blocks, name)
        else:
            measure_one(name)
    measured |= queue.fetch()
    return measured | shards.gather(measured)


def _measured_in_blocks(values: InBlocks, name: str) -> MomentsMeasurement:
    """The measurement of a tensor that is read from disk a block at a time."""
    dtype = str(values.spec(name).dtype).removeprefix("torch.")
    if DTYPES[dtype].kind == "complex":
        return _measured(values[name], ())
    parts = [moments(Strided.from_numpy(block, dtype)) for block in values.blocks(name)]
    return MomentsMeasurement(merge(parts), {})


def _measured(tensor: torch.Tensor, exponents: Collection[float]) -> MomentsMeasurement:
    """The measurement of a tensor in CPU memory."""
    pieces = [tensor]
    if tensor.is_complex():
        pieces = [block.abs() for block in blocks(tensor)]
    memory = [Strided(piece.data_ptr(), NAMES[piece.dtype], tuple(piece.shape), piece.stride()) for piece in pieces]
    whole = merge([moments(each) for each in memory]) if len(memory) != 1 else moments(memory[0])
    sums = {}
    for p in exponents:
        unit = unit_for(whole, p)
        sums[p] = Power(unit, math.fsum(powers(each, p, unit) for each in memory))
    return MomentsMeasurement(whole, sums, tensor.is_complex())


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds the numbers. Raises a StateError that says why there is none."""
    if is_pending(tensor):
        tensor = waited_for(tensor)
    reason = None
    if tensor.is_nested:
        reason = "it is a nested tensor"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {str(tensor.layout).removeprefix('torch.')}; convert it with to_dense()"
    elif tensor.device.type == "meta":
        reason = "it is on the meta device, where there are none"
    elif tensor.is_quantized:
        reason = "it is quantized; convert it with dequantize()"
    elif is_traceable_wrapper_subclass(tensor):
        reason = f"a {type(tensor).__name__} wraps other tensors"
    elif tensor.dtype not in NAMES:
        reason = f"its dtype is {str(tensor.dtype).removeprefix('torch.')}"
    if reason is None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not tensor.numel() or tensor.data_ptr():
            return tensor
        reason = "it has no memory (freed, or never filled)"
    raise StateError(f"The numbers of {name!r} cannot be read: {reason}. Leave it out with filter(pattern).")


# -- what is measured of a tensor, and how the measurements of several add up ------------------------------------------


class Power(NamedTuple):
    """Σ(|x| / unit)ᵖ over finite elements. The unit keeps large and small powers within float64."""

    unit: float
    total: float


class MomentsMeasurement(NamedTuple):
    """Moments, and a sum of powers for every wanted p: what every reduction is computed from.

    Measurements of layers, of the blocks of a tensor on a device, and of the parts of a distributed one add up.
    magnitudes: whether these are the moments of the magnitudes of complex numbers.
    """

    moments: Moments
    powers: Mapping[float, Power]
    magnitudes: bool = False

    def numbers(self) -> list[float]:
        """The fields as numbers, to be sent to another process; `from_numbers` reads them."""
        return [*map(float, self.moments), *(number for power in self.powers.values() for number in power)]

    def from_numbers(self, numbers: Sequence[float]) -> MomentsMeasurement:
        """A measurement of the same kind as this one."""
        return self._replace(
            moments=moments_from(numbers), powers=powers_from(numbers[len(Moments._fields) :], list(self.powers))
        )


def moments_from(numbers: Sequence[float]) -> Moments:
    """Moments from their fields as floats, in order. Counts are exact up to 2⁵³."""
    counts, measures = numbers[:6], numbers[6 : len(Moments._fields) - 1]
    return Moments._make([*map(int, counts), *measures, int(numbers[len(Moments._fields) - 1])])


def powers_from(numbers: Sequence[float], exponents: Sequence[float]) -> dict[float, Power]:
    """Sums of powers from units and totals in turn."""
    return {p: Power(*pair) for p, pair in zip(exponents, zip(numbers[::2], numbers[1::2], strict=True), strict=True)}


def unite(parts: Sequence[MomentsMeasurement]) -> MomentsMeasurement:
    """The measurement of all these elements together."""
    exponents = parts[0].powers if parts else ()
    return MomentsMeasurement(
        merge([part.moments for part in parts]),
        {p: add_up([part.powers[p] for part in parts], p) for p in exponents},
        any(part.magnitudes for part in parts),
    )


def add_up(parts: Sequence[Power], p: float) -> Power:
    """The sum of powers of all, in the unit of the largest (for a negative power, of the smallest)."""
    nonzero = [part for part in parts if part.total]
    if not nonzero:
        return Power(1.0, 0.0)
    unit = max(part.unit for part in nonzero) if p > 0 else min(part.unit for part in nonzero)
    return Power(unit, math.fsum(part.total * (part.unit / unit) ** p for part in nonzero))


def unit_for(measured: Moments, p: float) -> float:
    """The unit of magnitudes in which no power of them exceeds the range of float64."""
    unit = measured.absmax if p > 0 else measured.absmin
    return unit if math.isfinite(unit) and unit > 0 else 1.0


# -- on a device -------------------------------------------------------------------------------------------------------


FIELDS = 16
"""The first numbers of a row: the fields of a `Moments` without its exponent, which is 0 here."""

HELD_BYTES = 1 << 28
"""Tensors are collected for one launch until they hold more memory than this."""


class DeviceMeasurements:
    """Tensors that are being measured, each on its device.

    By the kernel of `device.moments` on a GPU, by plain torch operations elsewhere. `add` does not wait: each tensor
    leaves rows of numbers on its device, and `fetch` copies all rows at once. The torch operations go a block at a
    time, in float64 where the device has it. Numbers beyond 2^±200, which only float64 can hold, overflow there in the
    third and fourth moments; the CPU kernels are right for those too.
    """

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[tuple[list[str], list[int], torch.Tensor]]] = {}
        self._queued: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        self._queued_bytes = 0
        self._wanted: dict[str, tuple[tuple[float, ...], bool]] = {}

    def add(self, name: str, tensor: torch.Tensor, exponents: Collection[float]) -> None:
        """Measures a plain tensor that has elements."""
        self._wanted[name] = tuple(exponents), tensor.is_complex()
        if not exponents and kernel.can_measure(tensor):
            self._queued.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
            self._queued_bytes += tensor.nbytes
            if self._queued_bytes > HELD_BYTES:
                self._launch()
            return
        wide = widest_float(tensor.device)
        with unobserved():
            for block in blocks(tensor):
                numbers = (block.abs() if block.is_complex() else block).to(wide)
                self._add_rows([name], [1], _row(numbers, self._wanted[name][0]))

    def fetch(self) -> dict[str, MomentsMeasurement]:
        """The measurements by name, with one wait for each device."""
        self._launch()
        parts: dict[str, list[MomentsMeasurement]] = {name: [] for name in self._wanted}
        for entries in self._rows.values():
            with unobserved():
                fetched = torch.cat([rows.reshape(-1) for _, _, rows in entries]).cpu().numpy()
            offset = 0
            for names, counts, rows in entries:
                numbers = fetched[offset : offset + rows.numel()].reshape(-1, rows.shape[-1])
                offset += rows.numel()
                if len(numbers) > len(names):
                    numbers = kernel.merged(numbers, counts)
                for name, row in zip(names, numbers.tolist(), strict=True):
                    parts[name].append(self._measurement(name, row))
        return {name: each[0] if len(each) == 1 else unite(each) for name, each in parts.items()}

    def _launch(self) -> None:
        """Starts the kernel for all queued tensors."""
        for queued in self._queued.values():
            with unobserved():
                rows, counts = kernel.measure([tensor for _, tensor in queued])
            self._add_rows([name for name, _ in queued], counts, rows)
        self._queued.clear()
        self._queued_bytes = 0

    def _add_rows(self, names: list[str], counts: list[int], rows: torch.Tensor) -> None:
        self._rows.setdefault(rows.device, []).append((names, counts, rows))

    def _measurement(self, name: str, numbers: list[float]) -> MomentsMeasurement:
        exponents, magnitudes = self._wanted[name]
        moments = moments_from([*numbers[:FIELDS], 0.0])
        return MomentsMeasurement(moments, powers_from(numbers[FIELDS:], exponents), magnitudes)


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
    deviations = torch.where(finite, numbers - mean, 0.0)
    squares = deviations * deviations
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
        (squares * deviations).sum(),
        (squares * squares).sum(),
    ]
    for p in exponents:
        extreme = absmax if p > 0 else absmin
        unit = torch.where(torch.isfinite(extreme) & (extreme > 0), extreme, torch.ones_like(extreme))
        fields += [unit, torch.where(finite, (sizes / unit) ** p, 0.0).sum()]
    return torch.stack([field.to(numbers.dtype) for field in fields])


def _unless(none: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """NaN where there is no finite number."""
    return torch.where(none, torch.full_like(value, torch.nan), value)


# -- over processes ----------------------------------------------------------------------------------------------------


def is_sharded(value: Value) -> bool:
    """Whether it is a DTensor, which is sharded over processes."""
    return isinstance(value, torch.Tensor) and is_distributed(value)


def local_part(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this process holds. Pending sums are computed first, by communication."""
    with torch.no_grad():
        tensor = tensor.detach()
        if any(placement.is_partial() for placement in tensor.placements):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=whole)
        local: torch.Tensor = tensor.to_local()
        return local


class ShardedTensors:
    """The distributed tensors among those that are measured: the parts of all processes become the whole.

    So a reduction of a state with DTensors is a collective: every process of their mesh must call it, as an all-reduce.
    One exchange carries the numbers of all tensors. Along mesh dimensions that replicate, nothing is added up.
    """

    def __init__(self) -> None:
        self._expected: dict[Any, dict[str, tuple[bool, ...]]] = {}

    def expect(self, name: str, tensor: Any) -> None:
        """Registers a DTensor, and along which dimensions of its mesh it is sharded."""
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            raise StateError(f"This process holds no part of {name!r}: it is not in the mesh {mesh}.")
        cut = tuple(not (placement.is_replicate() or placement.is_partial()) for placement in tensor.placements)
        self._expected.setdefault(mesh, {})[name] = cut

    def gather(self, measured: Mapping[str, MomentsMeasurement]) -> dict[str, MomentsMeasurement]:
        """The measurements of the whole tensors, after every process of their meshes has measured its parts."""
        gathered: dict[str, MomentsMeasurement] = {}
        for mesh, cuts in self._expected.items():
            rows = torch.tensor(
                [measured[name].numbers() for name in cuts], dtype=torch.float64, device=mesh.device_type
            )
            parts = {name: rows[number : number + 1] for number, name in enumerate(cuts)}
            for dim in range(mesh.ndim):
                sharded = [name for name, cut in cuts.items() if cut[dim]]
                if not sharded or mesh.size(dim) == 1:
                    continue
                sizes = [len(parts[name]) for name in sharded]
                gathered_rows = _all_gather(torch.cat([parts[name] for name in sharded]), mesh.get_group(dim))
                shares = [torch.split(share, sizes) for share in gathered_rows]
                for number, name in enumerate(sharded):
                    parts[name] = torch.cat([share[number] for share in shares])
            for name, part in parts.items():
                gathered[name] = unite([measured[name].from_numbers(row) for row in part.tolist()])
        return gathered


def _all_gather(rows: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The rows of every process of a group."""
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, rows, group=group)
    return gathered
