"""The kernels in plain numpy: what runs where the extension could not be built, and what checks it where it could.

Same functions, same results as `_native`: integers, extremes and fingerprints exactly, sums to 1e-12. Everything is
done in blocks, in float64, in several passes for clarity where the native code needs one. It is not immune to a
process-wide "flush denormals to zero" as the native code is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.record import Statistics
from astray.stats import dtypes
from astray.stats.fingerprint import MASK, mix
from astray.stats.types import Contrast, Measurement, Shard, Strided

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

BLOCK = 1 << 16


def measure(tensor: Strided, statistics: bool, fingerprint: bool, shard: Shard | None) -> Measurement:
    """See `astray.stats.kernels.measure`."""
    if shard is not None:
        _check(tensor, shard)
    return Measurement(
        _statistics(tensor) if statistics else None, _fingerprint(tensor, shard) if fingerprint else None
    )


def _check(tensor: Strided, shard: Shard) -> None:
    offset, whole = shard
    inside = len(tensor.shape) == len(offset) == len(whole) and all(
        0 <= first and first + size <= full for first, size, full in zip(offset, tensor.shape, whole, strict=True)
    )
    if not inside:
        raise ValueError(f"A shard of shape {tensor.shape} at {offset} does not lie within a tensor of shape {whole}.")


def _real(tensor: Strided) -> tuple[Array, str]:
    """The tensor as an array of real numbers in storage form, complex parts as a last axis; and their dtype."""
    view, dtype = tensor.view(), dtypes.find(tensor.dtype)
    if dtype.kind != "complex":
        return view, tensor.dtype
    parts = tuple(2 * step for step in tensor.stride)
    real = Strided(tensor.address, dtype.part, (*tensor.shape, 2), (*parts, 1))
    return real.view(), dtype.part


def _blocks(view: Array) -> Iterator[Array]:
    """The elements in row-major order, as 1-D blocks that are valid until the next one is asked for."""
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    if view.size:
        yield from np.nditer(view, flags=flags, order="C", buffersize=BLOCK)


def _values(view: Array, dtype: str) -> Iterator[Floats]:
    for block in _blocks(view):
        yield dtypes.decode(block, dtype).astype(np.float64)


# ---------------------------------------------------------------------------------------------------------------- moments


class _Moments(NamedTuple):
    mean: float
    std: float
    l2: float


def _scale(absmax: float) -> float:
    """A power of two that brings absmax near 1, so that squares neither overflow nor vanish."""
    exponent = math.frexp(absmax)[1]
    return math.ldexp(1.0, -min(max(exponent, -1000), 1000))


def _moments(blocks: list[Floats] | _Rescan, count: int, scale: float) -> _Moments:
    """Mean, population std and norm of `count` finite numbers, in two passes over them."""
    mean = math.fsum(float(np.sum(block * scale)) for block in blocks) / count
    squares, drift = [], []
    for block in blocks:
        distance = block * scale - mean
        squares.append(float(np.sum(distance * distance)))
        drift.append(float(np.sum(distance)))
    rest = math.fsum(drift)  # what rounding the mean left over
    m2 = max(math.fsum(squares) - rest * rest / count, 0.0)
    mean += rest / count
    return _Moments(mean / scale, math.sqrt(m2 / count) / scale, math.sqrt(m2 + count * mean * mean) / scale)


class _Rescan:
    """The finite values of a view, in blocks, as often as they are wanted."""

    def __init__(self, view: Array, dtype: str) -> None:
        self.view, self.dtype = view, dtype

    def __iter__(self) -> Iterator[Floats]:
        for values in _values(self.view, self.dtype):
            yield values[np.isfinite(values)]


def _statistics(tensor: Strided) -> Statistics:
    view, dtype = _real(tensor)
    low, high = math.inf, -math.inf
    zeros = nan = inf = 0
    for values in _values(view, dtype):
        zeros += int(np.count_nonzero(values == 0))
        nan += int(np.count_nonzero(np.isnan(values)))
        inf += int(np.count_nonzero(np.isinf(values)))
        finite = values[np.isfinite(values)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    count = view.size - nan - inf
    if not count:
        return Statistics(None, None, None, None, None, None, zeros, nan, inf, view.size)
    absmax = max(-low, high, 0.0)
    with np.errstate(all="ignore"):
        moments = _moments(_Rescan(view, dtype), count, _scale(absmax))
    low, high = low + 0.0, high + 0.0  # −0 is reported as 0
    return Statistics(low, high, *_settle(moments, low, high), absmax, zeros, nan, inf, view.size)


def _settle(moments: _Moments, low: float, high: float) -> _Moments:
    """When all elements are equal the mean is that element and nothing spreads, whatever rounding says."""
    return moments._replace(mean=low, std=0.0) if low == high else moments


# ------------------------------------------------------------------------------------------------------------ fingerprint


def _fingerprint(tensor: Strided, shard: Shard | None) -> int:
    view, dtype = _real(tensor)
    itemsize = dtypes.find(dtype).itemsize
    total = start = 0
    for block in _blocks(view):
        index = np.arange(start, start + block.size)
        start += block.size
        if shard is not None:
            index = _global(index, view.shape, shard)
        total += _weigh(block, index.astype(np.uint64), itemsize)
    return total & MASK


def _global(index: npt.NDArray[np.int64], shape: tuple[int, ...], shard: Shard) -> npt.NDArray[np.int64]:
    """Flat indices within a shard → flat indices within the whole tensor."""
    # Complex parts are an axis of their own, which no cut runs through.
    extra = shape[len(shard.offset) :]
    steps = np.unravel_index(index, shape)
    result = np.zeros_like(index)
    for step, offset, size in zip(
        steps, (*shard.offset, *(0 for _ in extra)), (*shard.full_shape, *extra), strict=True
    ):
        result = result * size + step + offset
    return result


def _weigh(block: Array, index: npt.NDArray[np.uint64], itemsize: int) -> int:
    bits = np.ascontiguousarray(block)
    if itemsize == 8:
        words = bits.view(np.uint32).astype(np.uint64)
        place = np.repeat(index * np.uint64(2), 2)
        place[1::2] += np.uint64(1)
    else:
        byte = index * np.uint64(itemsize)
        words = bits.view(f"u{itemsize}").astype(np.uint64) << ((byte & np.uint64(3)) * np.uint64(8))
        place = byte >> np.uint64(2)
    return int(np.sum(words * mix(place), dtype=np.uint64))


# --------------------------------------------------------------------------------------------------------------- contrast


class _Pairs:
    """The pairs of two tensors where both are finite, in blocks: where they stand, and both values."""

    def __init__(self, reference: Strided, candidate: Strided) -> None:
        self.reference, self.candidate = _real(reference), _real(candidate)

    def raw(self) -> Iterator[tuple[int, Array, Array]]:
        start = 0
        for one, other in zip(_blocks(self.reference[0]), _blocks(self.candidate[0]), strict=True):
            yield start, one, other
            start += one.size

    def __iter__(self) -> Iterator[tuple[Floats, Floats]]:
        for _, one, other in self.raw():
            r, c = self.decode(one, other)
            finite = np.isfinite(r) & np.isfinite(c)
            yield r[finite], c[finite]

    def decode(self, one: Array, other: Array) -> tuple[Floats, Floats]:
        r = dtypes.decode(one, self.reference[1]).astype(np.float64)
        c = dtypes.decode(other, self.candidate[1]).astype(np.float64)
        return r, c


class _Side:
    """One side of the pairs, as the values `_moments` goes over."""

    def __init__(self, pairs: _Pairs, side: int) -> None:
        self.pairs, self.side = pairs, side

    def __iter__(self) -> Iterator[Floats]:
        for pair in self.pairs:
            yield pair[self.side]


class _Peak:
    """The largest value seen and where; the first one on ties."""

    def __init__(self) -> None:
        self.value, self.index = -1.0, -1

    def see(self, values: Floats, index: npt.NDArray[np.int64]) -> None:
        if values.size and (top := float(values.max())) > self.value:
            self.value, self.index = top, int(index[int(values.argmax())])


def contrast(reference: Strided, candidate: Strided, rtol: float, atol: float) -> Contrast:
    """See `astray.stats.kernels.contrast`."""
    with np.errstate(all="ignore"):
        return _contrast(_Pairs(reference, candidate), rtol, atol)


def _contrast(pairs: _Pairs, rtol: float, atol: float) -> Contrast:
    dtype = pairs.reference[1]
    same = dtype == pairs.candidate[1]
    with_ulp = same and dtypes.find(dtype).kind == "float"
    tally = dict.fromkeys(
        "finite different rel_count within_tolerance within_1e3 within_5e3 nan_reference nan_candidate inf_reference "
        "inf_candidate nonfinite_mismatch".split(),
        0,
    )
    absolute, relative, first = _Peak(), _Peak(), -1
    absmax = 0.0
    sum_abs, sum_rel = [], []
    ulps = max_ulp = 0
    lows, highs = [math.inf, math.inf], [-math.inf, -math.inf]

    def add(name: str, mask: npt.NDArray[np.bool_]) -> None:
        tally[name] += int(np.count_nonzero(mask))

    for start, one, other in pairs.raw():
        r, c = pairs.decode(one, other)
        add("nan_reference", np.isnan(r))
        add("nan_candidate", np.isnan(c))
        add("inf_reference", np.isinf(r))
        add("inf_candidate", np.isinf(c))
        finite = np.isfinite(r) & np.isfinite(c)
        mismatch = ~finite & (r != c) & ~(np.isnan(r) & np.isnan(c))
        add("finite", finite)
        add("nonfinite_mismatch", mismatch)
        if first < 0 and mismatch.any():
            first = start + int(mismatch.argmax())
        # Two 64-bit integers may differ and still be one float64: compare them as they are.
        exact = same and dtypes.find(dtype).kind == "int"
        add("different", (one != other) if exact else mismatch | (finite & (r != c)))

        index = start + np.flatnonzero(finite)
        if with_ulp and index.size:
            distance = _ulp(one[finite], other[finite], dtype)
            max_ulp = max(max_ulp, int(distance.max()))
            low, high = distance & np.uint64(0xFFFFFFFF), distance >> np.uint64(32)
            ulps += int(low.sum(dtype=np.uint64)) + (int(high.sum(dtype=np.uint64)) << 32)
        r, c = r[finite], c[finite]
        size, error = np.abs(r), np.abs(c - r)
        for side, values in enumerate((r, c)):
            if values.size:
                lows[side], highs[side] = min(lows[side], values.min()), max(highs[side], values.max())
        add("within_tolerance", error <= atol + rtol * size)
        add("within_1e3", error <= 1e-3 * size)
        add("within_5e3", error <= 5e-3 * size)
        absolute.see(error, index)
        sum_abs.append(float(error.sum()))
        nonzero = size != 0
        add("rel_count", nonzero)
        ratio = error[nonzero] / size[nonzero]
        relative.see(ratio, index[nonzero])
        sum_rel.append(float(ratio.sum()))

    count, n = pairs.reference[0].size, tally["finite"]
    none = n == 0
    absmax = max(*highs, *(-low for low in lows), 0.0) if n else 0.0
    scale = _scale(absmax)
    sides = [
        _settle(_moments(_Side(pairs, side), n, scale), lows[side] + 0.0, highs[side] + 0.0) if n else None
        for side in (0, 1)
    ]
    dot, cosine, l2_error = _products(pairs, scale, absolute.value) if n else (None, None, None)
    ulp = with_ulp and n > 0
    return Contrast(
        count=count,
        finite=n,
        different=tally["different"],
        mean_reference=sides[0].mean if sides[0] else None,
        std_reference=sides[0].std if sides[0] else None,
        l2_reference=sides[0].l2 if sides[0] else None,
        mean_candidate=sides[1].mean if sides[1] else None,
        std_candidate=sides[1].std if sides[1] else None,
        l2_candidate=sides[1].l2 if sides[1] else None,
        dot=dot,
        cosine=cosine,
        sum_abs_error=None if none else _total(sum_abs),
        l2_error=l2_error,
        max_abs_error=None if none else absolute.value,
        max_abs_index=absolute.index,
        max_rel_error=relative.value if tally["rel_count"] else None,
        max_rel_index=relative.index,
        sum_rel_error=_total(sum_rel) if tally["rel_count"] else None,
        rel_count=tally["rel_count"],
        within_tolerance=tally["within_tolerance"],
        within_1e3=tally["within_1e3"],
        within_5e3=tally["within_5e3"],
        max_ulp=max_ulp if ulp else None,
        mean_ulp=ulps / n if ulp else None,
        nan_reference=tally["nan_reference"],
        nan_candidate=tally["nan_candidate"],
        inf_reference=tally["inf_reference"],
        inf_candidate=tally["inf_candidate"],
        nonfinite_mismatch=tally["nonfinite_mismatch"],
        first_nonfinite_mismatch=first,
    )


def _total(parts: list[float]) -> float:
    """The sum of non-negative parts, infinite when it is beyond float64."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _products(pairs: _Pairs, scale: float, max_error: float) -> tuple[float, float | None, float]:
    """dot, cosine, and the norm of the error, from values scaled near 1 (and errors scaled near 1 of their own)."""
    zoom = _scale(max_error * scale) if math.isfinite(max_error) else 1.0
    dots, references, candidates, errors = [], [], [], []
    for r, c in pairs:
        r, c = r * scale, c * scale
        d = (c - r) * zoom
        dots.append(float(np.sum(r * c)))
        references.append(float(np.sum(r * r)))
        candidates.append(float(np.sum(c * c)))
        errors.append(float(np.sum(d * d)))
    dot = math.fsum(dots)
    norms = math.sqrt(math.fsum(references)) * math.sqrt(math.fsum(candidates))
    # Rounding can push a cosine of 1 past it.
    cosine = max(-1.0, min(1.0, dot / norms)) if norms else None
    return dot / scale / scale, cosine, math.sqrt(math.fsum(errors)) / zoom / scale


def _ulp(one: Array, other: Array, dtype: str) -> npt.NDArray[np.uint64]:
    """How many representable numbers lie between two floats of one type; 0 and −0 are the same place."""
    a, b = _ordered(one, dtype), _ordered(other, dtype)
    # Unsigned subtraction, so that the distance from −max to max of float64 fits.
    return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)


def _ordered(raw: Array, dtype: str) -> npt.NDArray[np.int64]:
    """Bit patterns → integers in the order of their values."""
    bits = np.ascontiguousarray(raw).view(f"i{raw.dtype.itemsize}").astype(np.int64)
    if dtype == "float8_e8m0fnu":  # no sign bit
        return bits & 0xFF
    magnitude = bits & np.int64((1 << (8 * raw.dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)


# ------------------------------------------------------------------------------------------------------- bytes and strings


def gather(tensor: Strided, positions: npt.NDArray[np.int64]) -> Array:
    """See `astray.stats.kernels.gather`."""
    view = tensor.view()
    return view[np.unravel_index(positions, view.shape)] if view.ndim else np.repeat(view[None], positions.size)


def pack(tensor: Strided, into: npt.NDArray[np.uint8]) -> None:
    """See `astray.stats.kernels.pack`."""
    view = tensor.view()
    np.copyto(into.view(view.dtype).reshape(view.shape), view)


def factorize(data: npt.NDArray[np.uint8], offsets: Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """See `astray.stats.kernels.factorize`."""
    seen: dict[bytes, int] = {}
    first: list[int] = []
    text, bounds = data.tobytes(), offsets.tolist()
    codes = np.empty(max(len(bounds) - 1, 0), np.int32)
    for row in range(codes.size):
        code = seen.setdefault(text[bounds[row] : bounds[row + 1]], len(seen))
        codes[row] = code
        if code == len(first):
            first.append(row)
    return codes, np.array(first, np.int64)


def set_threads(count: int) -> None:
    """Do nothing: one thread does all the work here."""
