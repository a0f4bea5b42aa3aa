"""A tensor on any device → one result row, in plain torch operations, where there are no kernels of our own.

The counterpart of `triton_kernels` for XPU, NPU, MPS and for GPUs without Triton. Nothing here waits for the device and
nothing is read back: no `.item()`, no mask that selects, no size that depends on values. Only arithmetic that every
backend has is used (8-bit floats are looked up, unsigned integers go through signed ones, powers of two are made from
their bits), and a device without float64 computes in float32; the row's format is the same there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from astray.device.tickets import NONE, WIDTH
from astray.interrupts import pass_interrupt
from astray.stats.dtypes import DTYPES, DType, decode_table
from astray.stats.fingerprint import FLIP, SPREAD, STEP, STEP_HIGH
from astray.stats.types import ShardPosition

BLOCK = 1 << 21
"""Elements taken at once. A multiple of 4, so that blocks of narrow elements begin at whole words. It bounds the memory
that a measurement takes to some 100 MB, and is large enough to keep a device busy."""

_KINDS = {getattr(torch, name): kind for name, kind in DTYPES.items() if hasattr(torch, name)}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INFINITY = 0x7FF << 52  # the bits of float64's
_MINUS_INFINITY = -1 << 52
_LOW = (1 << 32) - 1


class _Shape(NamedTuple):
    """The bits of a float that is computed in, as an integer of its size, and how far numbers are scaled at most."""

    bits: torch.dtype
    mantissa: int
    bias: int
    reach: int


_SHAPES = {
    torch.float64: _Shape(torch.int64, 52, 1023, 1000),
    torch.float32: _Shape(torch.int32, 23, 127, 120),
}


class _Numbers(NamedTuple):
    """The statistics of a block, each a tensor without dimensions. Mean and spread count in units of 2^exponent."""

    exponent: torch.Tensor
    finite: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    zeros: torch.Tensor
    nan: torch.Tensor
    inf: torch.Tensor
    first: torch.Tensor


@torch.no_grad()
def measure(tensor: torch.Tensor, *, statistics: bool, shard: ShardPosition | None = None) -> torch.Tensor:
    """The row of a tensor as ten int64 words on its device, in the order of `tickets.FIELDS`.

    The tensor is a plain strided one, its conjugate and negative bits resolved. Without `statistics` only the number of
    elements and the fingerprint are filled in. Same results as the kernels of `astray.stats`: fingerprint, counts and
    extremes exactly; mean and spread to 1e-12, or to 1e-6 where the device has no float64. There integers beyond 2²⁴
    are rounded, as those beyond 2⁵³ are elsewhere. A spread beyond the largest float is infinite.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind, wide = _KINDS[tensor.dtype], widest_float(tensor.device)
    extents = _extents(tuple(tensor.shape), shard)
    marks: list[torch.Tensor] = []
    blocks: list[_Numbers] = []
    start = 0
    for piece in _pieces(tensor.view(_SIGNED[kind.itemsize])):  # integers can be copied on every device
        marks.append(_weigh(piece, start, extents))
        if statistics:
            blocks.append(_describe(_decode(piece, kind, wide), kind, start, extents))
        start += piece.numel()
    row = torch.zeros(WIDTH, dtype=torch.int64, device=tensor.device)
    if blocks:
        _write(row, blocks[0] if len(blocks) == 1 else _merge(blocks))
    elif statistics:
        row[3].fill_(_INFINITY)
        row[4].fill_(_MINUS_INFINITY)
    else:
        row[0].fill_(start)
    if marks:
        row[8].copy_(marks[0] if len(marks) == 1 else torch.stack(marks).sum())
    if not blocks:
        row[9].fill_(NONE)
    return row


@lru_cache(maxsize=64)
def widest_float(device: torch.device) -> torch.dtype:
    """The float that a device computes in: float64 where it has that, else float32."""
    if device.type == "mps":
        return torch.float32
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add(1.0)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # what backends raise for a dtype they lack
        pass_interrupt(error)
        return torch.float32
    return torch.float64


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, as contiguous 1-D blocks; only what is not contiguous is copied."""
    size = tensor.numel()
    if size <= BLOCK:
        if size:
            yield tensor.contiguous().view(-1)
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        for first in range(0, size, BLOCK):
            yield flat[first : first + BLOCK]
    else:
        rows = BLOCK * tensor.shape[0] // size
        for first in range(0, tensor.shape[0], max(rows, 1)):
            yield from _pieces(tensor[first : first + rows] if rows else tensor[first])


# --- statistics ---


def _decode(piece: torch.Tensor, kind: DType, wide: torch.dtype) -> torch.Tensor:
    """Signed integers that hold the bits of elements → their values, in memory of their own."""
    name = kind.name
    if name == "bool":
        return (piece != 0).to(wide)
    if kind.kind == "float" and kind.itemsize == 1:
        return _table(name, piece.device, wide).index_select(0, piece.to(torch.int32) & 0xFF)
    if name == "uint64":
        # Above 2⁶³ halve first; the last bit is kept, for it may decide how the rest is rounded.
        half = (piece >> 1) & ((1 << 63) - 1) | (piece & 1)
        return torch.where(piece < 0, half.to(wide) * 2, piece.to(wide))
    if kind.kind == "int" and name[0] == "u":
        return (piece.to(torch.int64) & ((1 << 8 * kind.itemsize) - 1)).to(wide)
    return piece.view(getattr(torch, name)).to(wide, copy=True)


@lru_cache(maxsize=64)
def _table(name: str, device: torch.device, wide: torch.dtype) -> torch.Tensor:
    """The values of the 256 patterns of an 8-bit float, on the device."""
    return torch.from_numpy(decode_table(name).copy()).to(wide).to(device)


def _describe(values: torch.Tensor, kind: DType, start: int, extents: list[_Extent]) -> _Numbers:
    """The statistics of one block of values, which are overwritten. It begins at element `start` of the tensor."""
    size = values.numel()
    zeros = size - values.count_nonzero()
    if kind.kind == "float":
        finite = values.abs() < torch.inf  # false for NaN
        other = ~finite
        count, nan = finite.sum(), (values != values).sum()
        low = values.masked_fill(other, torch.inf).amin()
        high = values.masked_fill(other, -torch.inf).amax()
        first = _first_bad(values, other, start, extents)
        values.masked_fill_(other, 0.0)
    else:
        low, high = values.aminmax()
        count, nan, first = torch.full_like(zeros, size), torch.zeros_like(zeros), torch.full_like(zeros, NONE)
    exponent = _exponent(low, high)
    values *= _power(-exponent, values.dtype)
    mean = values.sum() / count.clamp_min(1)
    values -= mean
    if kind.kind == "float":
        values *= finite
    spread = values.square_().sum().sqrt_()
    return _Numbers(exponent, count, mean, spread, low, high, zeros, nan, size - count - nan, first)


def _first_bad(values: torch.Tensor, bad: torch.Tensor, start: int, extents: list[_Extent]) -> torch.Tensor:
    """Where the first bad element of a block is and what, in one number; see `tickets.FIELDS`."""
    place = bad.to(torch.int8).argmax().view(1)
    value = values.index_select(0, place)
    kind = (value == torch.inf) + 2 * (value == -torch.inf)
    return (_places(place + start, extents) * 4 + kind).where(bad.index_select(0, place), NONE).view(())


def _merge(blocks: Sequence[_Numbers]) -> _Numbers:
    """The statistics of all blocks together."""
    exponents, finite, means, spreads, low, high, *counts, first = (
        torch.stack(field) for field in zip(*blocks, strict=True)
    )
    exponent = exponents.amax()
    to_largest = _power((exponents - exponent).clamp_min(-_SHAPES[means.dtype].reach), means.dtype)
    each, total = finite.to(means.dtype), finite.sum()
    means *= to_largest
    mean = (each * means).sum() / total.clamp_min(1)
    squares = (spreads * to_largest).square().sum() + (each * (means - mean).square()).sum()
    zeros, nan, inf = (count.sum() for count in counts)
    spread = squares.sqrt()
    return _Numbers(exponent, total, mean, spread, low.amin(), high.amax(), zeros, nan, inf, first.amin())


def _exponent(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """That of the largest magnitude: numbers of its unit are near 1, so that no square overflows or vanishes."""
    shape = _SHAPES[low.dtype]
    largest = torch.maximum(-low, high).clamp_min(0.0)  # both are infinite the other way round when nothing is finite
    return ((largest.view(shape.bits) >> shape.mantissa) - shape.bias).clamp(-shape.reach, shape.reach)


def _power(exponent: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """2^exponent, from its bits."""
    shape = _SHAPES[wide]
    return ((exponent + shape.bias) << shape.mantissa).view(wide)


def _write(row: torch.Tensor, numbers: _Numbers) -> None:
    """Put the statistics into a row: all of its words but the fingerprint."""
    exponent, finite, mean, spread, low, high, *counts, first = numbers
    if mean.dtype is torch.float64:
        grow = _power(exponent, torch.float64)
        row[1:5] = torch.stack((mean * grow, spread * grow, low, high)).view(torch.int64)
    else:  # a spread in float32 may be beyond float32, as that of a mask is, so it grows as float64
        row[1:3] = _float64_bits(torch.stack((mean, spread)), exponent)
        row[3:5] = _float64_bits(torch.stack((low, high)))
    row[0].copy_(finite)
    torch.stack(counts, out=row[5:8])
    row[9].copy_(first)


def _float64_bits(values: torch.Tensor, exponent: torch.Tensor | int = 0) -> torch.Tensor:
    """float32 → the bits of value × 2^exponent in float64, on a device that has none."""
    small = values.abs() < 2.0**-100  # subnormal ones have no leading bit: make them larger, and take that back below
    bits = values.where(~small, values * 2.0**64).view(torch.int32).to(torch.int64)
    biased = (bits >> 23) & 0xFF
    infinite = biased == 0xFF
    biased = (biased + 896 - 64 * small + exponent).where(~infinite, 0x7FF)
    magnitude = (biased << 52) | ((bits & 0x7FFFFF) << 29)
    return magnitude.where(values != 0, 0) | (bits >> 31 << 63)


# --- fingerprint ---


class _Extent(NamedTuple):
    """One dimension of a shard: how much of it there is, where it begins, and how long it is in the whole."""

    size: int
    offset: int
    full: int


def _extents(shape: tuple[int, ...], shard: ShardPosition | None) -> list[_Extent]:
    """The dimensions of a tensor within its whole, those that lie in one piece there taken together.

    Without a shard, or with one that is cut along its first dimension, a single one is left: a stretch of the whole.
    """
    if shard is None:
        return [_Extent(prod(shape), 0, prod(shape))]
    extra = shape[len(shard.offset) :]  # the parts of complex numbers, which no cut runs through
    result = [_Extent(1, 0, 1)]
    for size, offset, full in zip(
        shape, (*shard.offset, *(0 for _ in extra)), (*shard.full_shape, *extra), strict=True
    ):
        outer = result[-1]
        if (offset, size) == (0, full) or outer.size == outer.full == 1:
            result[-1] = _Extent(outer.size * size, outer.offset * full + offset, outer.full * full)
        else:
            result.append(_Extent(size, offset, full))
    return result


def _weigh(piece: torch.Tensor, start: int, extents: list[_Extent]) -> torch.Tensor:
    """The share that a block of elements has in the fingerprint. The block begins at element `start` of the tensor."""
    width, size = piece.element_size(), piece.numel()
    if len(extents) > 1:
        index = _places(_range(start, size, piece.device), extents)
        last = prod(extent.full for extent in extents) * width // 4
        if width < 4:
            return _sum(*_shifted(piece, index), last)
        if width == 8:
            index = torch.stack((2 * index, 2 * index + 1), 1).view(-1)
        return _sum(piece.view(torch.int32), index, last)
    first = start + extents[0].offset
    last = (first + size) * width // 4
    if width < 4 and any(
        at % 4 for at in (first * width, size * width, piece.data_ptr(), piece.storage_offset() * width)
    ):
        return _sum(*_shifted(piece, _range(first, size, piece.device)), last)
    words = piece.view(torch.int32)
    return _sum(words, _range(first * width // 4, words.numel(), piece.device), last)


def _range(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64, device=device)


def _places(rest: torch.Tensor, extents: list[_Extent]) -> torch.Tensor:
    """Indices in a shard → those in the whole tensor."""
    result, stride = torch.zeros_like(rest), 1
    for size, offset, full in reversed(extents[1:]):
        result += (rest % size + offset) * stride
        rest = rest.div(size, rounding_mode="floor")
        stride *= full
    return result + (rest + extents[0].offset) * stride


def _shifted(piece: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements narrower than a word → each at its place inside of one, and the indices of these words."""
    width = piece.element_size()
    byte = index * width
    bits = piece.to(torch.int64) & ((1 << 8 * width) - 1)
    return bits << ((byte & 3) << 3), byte >> 2


def _sum(words: torch.Tensor, index: torch.Tensor, last: int) -> torch.Tensor:
    """Σ word × mix(index), modulo 2⁶⁴ as int64 wraps. No index is beyond `last`."""
    factor = index * STEP
    if last > _LOW:
        factor += (index >> 32) * STEP_HIGH
    factor = (factor ^ FLIP) & _LOW
    factor ^= factor >> 16
    factor = (factor * SPREAD) & _LOW
    factor ^= factor >> 15
    return ((words.to(torch.int64) & _LOW) * factor).sum()
