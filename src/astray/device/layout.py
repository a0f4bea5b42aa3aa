"""How the measuring kernel walks a tensor: shape, strides, dtype, alignment and shard → a `Plan`, cached.

Pure arithmetic: neither torch nor Triton is needed before `plan` requests the kernel itself. The fingerprint counts in
logical order, while reading is fast in memory order. So dimensions are walked by growing memory stride, and each
carries its logical stride along.

Memory is read in units: 32-bit words, 64-bit elements, or, where words of memory and words of the fingerprint do not
coincide, single narrow elements. A row is a run of units along the innermost dimension whose offset is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.stats import ShardPosition, dtypes

if TYPE_CHECKING:
    from astray.device.launcher import KernelSource

MOST_DIMENSIONS = 7
"""The kernel has arguments for no more. Merging adjacent dimensions nearly always leaves three or fewer."""

_DIMENSIONS = (1, 2, 4, MOST_DIMENSIONS)  # one compiled kernel for each, and no more
_NARROW = 1 << 31  # indices below it are computed in 32 bits
_WORDS = 1 << 32  # word indices below it hash without their high half


class Tuning(NamedTuple):
    """How much one program does at a time, and how many of them there are for each multiprocessor."""

    warps: int
    unroll: int
    """Rows that a thread has in flight."""
    programs: int


DENSE = Tuning(warps=4, unroll=4, programs=5)
SCATTERED = Tuning(warps=4, unroll=4, programs=4)


class MemoryWalk(NamedTuple):
    """What the kernel is compiled for, and the arguments that vary under it.

    `unit` is in bytes, `row` the number of units in a row, `aligned` whether whole rows may be loaded at once, and
    `dimensions` is 0 for memory that is walked from end to end. `wide` says that 32-bit indices do not suffice.
    `arguments` are what `triton_kernels.measure` takes after `slot`.
    """

    unit: int
    row: int
    aligned: bool
    dimensions: int
    wide: bool
    units: int
    arguments: tuple[int, ...]


class Plan(NamedTuple):
    """How to measure a tensor: launch `programs` programs of the kernel that `source` compiles to.

    The arguments of a launch are address, partials, capacity, first, table, slot, and then `arguments`. They leave the
    partial rows first … first + programs.
    """

    source: KernelSource
    programs: int
    arguments: tuple[int, ...]


class BatchPlan(NamedTuple):
    """How to measure tensors together: launch `programs` programs of the kernel that `source` compiles to.

    The arguments of a launch are the address of `words` on the device, partials, capacity, first, table, slot, and how
    many tensors there are. They leave the partial rows first … first + programs, and take that many slots.
    """

    source: KernelSource
    programs: int
    words: npt.NDArray[np.int64]


class _Dimension(NamedTuple):
    size: int
    memory: int
    logical: int


def plan(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: str,
    address: int,
    shard: ShardPosition | None = None,
    statistics: bool = True,
    processors: int = 132,
    pairs: bool = False,
    tuning: Tuning | None = None,
) -> Plan:
    """The plan for a tensor at `address`, of which only the alignment to 16 bytes counts.

    Strides count elements and are not negative. With a shard, the fingerprint counts as in the whole tensor. `pairs`
    allows instructions for two 16-bit floats at once, which NVIDIA's devices have from sm_90 on. Plans of one kernel
    share one `source`. ValueError where no kernel can walk the tensor.
    """
    return _plan(shape, stride, dtype, address % 16, shard, statistics, processors, pairs, tuning)


@lru_cache(maxsize=1 << 14)
def _plan(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: str,
    alignment: int,
    shard: ShardPosition | None,
    statistics: bool,
    processors: int,
    pairs: bool,
    tuning: Tuning | None,
) -> Plan:
    from astray.device import triton_kernels  # not before it is needed: it imports Triton

    way = walk(shape, stride, dtype, alignment, shard)
    warps, unroll, programs = tuning or (DENSE if way.dimensions == 0 else SCATTERED)
    tiles = -(-way.units // (32 * warps * unroll * way.row))
    kind = dtypes.find(dtype).part
    source = triton_kernels.measure_source(
        triton_kernels.Variant(
            kind, way.unit, way.row, way.aligned, way.dimensions, way.wide, statistics, warps, unroll, pairs
        )
    )
    # Each lane counts zeros in 16 bits, up to two at a time.
    programs = max(1, min(tiles, programs * processors), tiles * unroll >> 14)
    return Plan(source, programs, way.arguments)


def plan_many(
    tensors: Sequence[tuple[int, int]],
    dtype: str,
    statistics: bool = True,
    processors: int = 132,
    pairs: bool = False,
    tuning: Tuning | None = None,
) -> BatchPlan:
    """The plan for tensors of one dtype that are dense and begin at multiples of 16 bytes: address and size.

    Each is given the programs that it has alone, so that the results are the same to the last bit. ValueError where
    that cannot be done together.
    """
    from astray.device import triton_kernels

    kind = dtypes.find(dtype)
    warps, unroll, _ = tuning or DENSE
    entries, owners = np.zeros((len(tensors), 4), np.int64), []
    programs = 0
    for number, (address, count) in enumerate(tensors):
        if address % 16 or count * kind.itemsize > 4 * _WORDS or not count:
            raise ValueError(f"{count} numbers of {dtype} at {address:#x} are not measured together with others.")
        alone = _plan((count,), (1,), dtype, 0, None, statistics, processors, pairs, tuning)
        entries[number] = address, alone.arguments[0], programs, alone.programs
        owners.append(np.full(alone.programs, number))
        programs += alone.programs
    item = kind.itemsize // (2 if kind.kind == "complex" else 1)
    unit = max(item, 4)
    variant = triton_kernels.Variant(kind.part, unit, 16 // unit, True, 0, False, statistics, warps, unroll, pairs)
    return BatchPlan(triton_kernels.measure_many_source(variant), programs, np.concatenate([entries.ravel(), *owners]))


def walk(
    shape: Sequence[int], stride: Sequence[int], dtype: str, address: int, shard: ShardPosition | None = None
) -> MemoryWalk:
    """Choose how to read a tensor."""
    kind = dtypes.find(dtype)
    item = kind.itemsize
    offset, whole = shard if shard is not None else ((0,) * len(shape), tuple(shape))
    if kind.kind == "complex":  # two real numbers, the last dimension
        item //= 2
        shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
        offset, whole = (*offset, 0), (*whole, 2)
    if address % item:
        raise ValueError(f"A {dtype} tensor at {address:#x} is not aligned to its {item} bytes. Copy it first.")
    if any(step < 0 for step in stride):
        raise ValueError(f"Strides {tuple(stride)} walk backwards, which the kernel does not. Copy the tensor first.")
    logical = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    base = sum(first * step for first, step in zip(offset, logical, strict=True))
    count = prod(shape)
    if not count:
        return MemoryWalk(max(item, 4), 16 // max(item, 4), True, 0, False, 0, (0, 0))
    merged = _merge([_Dimension(*each) for each in zip(shape, stride, logical, strict=True) if each[0] != 1])
    narrow = 4 // item  # elements in a word; 0 for wide elements
    if merged in ([], [(count, 1, 1)]) and (narrow < 2 or (address % 4 == 0 and base % narrow == 0)):
        return _dense(count, item, base, address)
    return _scattered(merged or [_Dimension(1, 1, 1)], count, item, base, address)


def _merge(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Join neighbours that are one run both in memory and in logical order; the outermost comes first."""
    merged: list[_Dimension] = []
    for each in dimensions:
        if merged:
            outer, extent = merged[-1], each.size
            if outer.memory == extent * each.memory and outer.logical == extent * each.logical:
                merged[-1] = _Dimension(outer.size * extent, each.memory, each.logical)
                continue
        merged.append(each)
    return merged


def _dense(count: int, item: int, base: int, address: int) -> MemoryWalk:
    unit = max(item, 4)
    row = 16 // unit
    start, units = base * item // unit, -(-count * item // unit)  # the last word may be a part of one
    wide = (start + units) * unit > 4 * _WORDS
    return MemoryWalk(unit, row, address % 16 == 0, 0, wide, units, (count, start))


def _scattered(merged: list[_Dimension], count: int, item: int, base: int, address: int) -> MemoryWalk:
    dimensions, unit = _in_memory_order(merged), item
    words = 4 // item
    if words > 1 and _fits(dimensions, words, base) and address % 4 == 0:
        dimensions, unit, base = _grouped(dimensions, words), 4, base // words
    inner, *outer = dimensions
    row = 16 // unit
    if inner.size % row:
        row = 1
    run = inner.memory == 1 and all(each.memory % row == 0 for each in outer)
    aligned = row > 1 and run and address % (row * unit) == 0
    if len(dimensions) > MOST_DIMENSIONS:
        raise ValueError(
            f"The strides leave {len(dimensions)} dimensions after merging, and the kernel walks {MOST_DIMENSIONS}. "
            "Make the tensor contiguous first."
        )
    units = prod(each.size for each in dimensions)
    reach = sum((each.size - 1) * each.memory for each in dimensions)
    last = base + sum((each.size - 1) * each.logical for each in dimensions)
    wide = max(units, reach, last + 1, 2 * last if unit == 8 else 0) >= _NARROW
    extent = [inner._replace(size=inner.size // row, memory=inner.memory * row, logical=inner.logical * row), *outer]
    padded = next(number for number in _DIMENSIONS if number >= len(extent))
    extent += [_Dimension(1, 0, 0)] * (padded - len(extent))
    packed = [word for each in extent for word in (each if wide else _packed(each))]
    return MemoryWalk(unit, row, aligned, padded, wide, units, (count, base, *packed))


def _in_memory_order(dimensions: list[_Dimension]) -> list[_Dimension]:
    """The innermost first. A repeated one (stride 0) comes next to it: what it repeats is still in the cache then."""
    moving = sorted((each for each in dimensions if each.memory), key=lambda each: (each.memory, each.logical))
    repeated = sorted((each for each in dimensions if not each.memory), key=lambda each: each.logical)
    return [*moving[:1], *repeated, *moving[1:]]


def _fits(dimensions: list[_Dimension], words: int, base: int) -> bool:
    """Whether the elements can be read as whole words, of memory and of the fingerprint at once."""
    inner, *outer = dimensions
    return (
        inner.memory == inner.logical == 1
        and inner.size % words == base % words == 0
        and all(each.memory % words == each.logical % words == 0 for each in outer)
    )


def _grouped(dimensions: list[_Dimension], words: int) -> list[_Dimension]:
    inner, *outer = dimensions
    rest = [_Dimension(each.size, each.memory // words, each.logical // words) for each in outer]
    return [_Dimension(inner.size // words, 1, 1), *rest]


def _packed(dimension: _Dimension) -> tuple[int, int, int]:
    """Size and strides with what divides by the size: n // size == (mulhi(n, factor) + n) >> shift, for n < 2³¹."""
    size, memory, logical = dimension
    shift = (size - 1).bit_length()
    factor = ((1 << 32) * ((1 << shift) - size)) // size + 1
    return size << 32 | factor, memory, shift << 32 | logical
