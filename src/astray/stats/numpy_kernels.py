"""The kernels in plain numpy: what runs where the extension could not be built, and what checks it where it could.

Same functions, same results as `_native`: integers, extremes and fingerprints exactly, sums to 1e-12. Everything is
done in blocks, in float64, in several passes for clarity where the native code needs one. It is not immune to a
process-wide "flush denormals to zero" as the native code is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.records import Statistics
from astray.stats import dtypes
from astray.stats.fingerprint import MASK, mix
from astray.stats.types import Contrast, Measurement, ShardPosition, Strided

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

BLOCK = 1 << 16


def measure(tensor: Strided, statistics: bool, fingerprint: bool, shard: ShardPosition | None) -> Measurement:
    """See `astray.stats.kernels.measure`."""
    if shard is not None:
        _check(tensor, shard)
    return Measurement(
        _statistics(tensor, shard) if statistics else None, _fingerprint(tensor, shard) if fingerprint else None
    )


def _check(tensor: Strided, shard: ShardPosition) -> None:
    offset, whole = shard
    inside = len(tensor.shape) == len(offset) == len(whole) and all(
        first >= 0 and first + size <= full for first, size, full in zip(offset, tensor.shape, whole, strict=True)
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
    """The elements in row-major order, as 1-D blocks that are valid until the next one is requested."""
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    if view.size:
        yield from np.nditer(view, flags=flags, order="C", buffersize=BLOCK)


def _values(view: Array, dtype: str) -> Iterator[Floats]:
    for block in _blocks(view):
        yield dtypes.widen(block, dtype)


# --- moments ---


class _MeanStdNorm(NamedTuple):
    mean: float
    std: float
    l2: float


def _scale(absmax: float) -> float:
    """A power of two that brings absmax near 1, so that squares neither overflow nor vanish."""
    exponent = math.frexp(absmax)[1]
    return math.ldexp(1.0, -min(max(exponent, -1000), 1000))


def _moments(blocks: _Finite | _FiniteSide, count: int, scale: float) -> _MeanStdNorm:
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
    results = mean, math.sqrt(m2 / count), math.sqrt(m2 + count * mean * mean)
    return _MeanStdNorm(*(_unscale(value, scale) for value in results))


class _Finite:
    """The finite values of a view, in blocks; can be iterated repeatedly."""

    def __init__(self, view: Array, dtype: str) -> None:
        self.view, self.dtype = view, dtype

    def __iter__(self) -> Iterator[Floats]:
        for values in _values(self.view, self.dtype):
            yield values[np.isfinite(values)]


def _statistics(tensor: Strided, shard: ShardPosition | None) -> Statistics:
    view, dtype = _real(tensor)
    low, high = math.inf, -math.inf
    zeros = nan = inf = 0
    first = _first_bad(view, dtype, shard)
    for values in _values(view, dtype):
        zeros += int(np.count_nonzero(values == 0))
        nan += int(np.count_nonzero(np.isnan(values)))
        inf += int(np.count_nonzero(np.isinf(values)))
        finite = values[np.isfinite(values)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    count = view.size - nan - inf
    if not count:
        return Statistics(None, None, None, None, None, None, zeros, nan, inf, view.size, *first)
    absmax = max(-low, high, 0.0)
    with np.errstate(all="ignore"):
        moments = _moments(_Finite(view, dtype), count, _scale(absmax))
    low, high = low + 0.0, high + 0.0  # −0 is reported as 0
    return Statistics(low, high, *_exact_if_constant(moments, low, high), absmax, zeros, nan, inf, view.size, *first)


def _first_bad(view: Array, dtype: str, shard: ShardPosition | None) -> tuple[int, float] | tuple[None, None]:
    """The index of the first element that is NaN or infinite, in the whole of which this is a shard, and its value."""
    start = 0
    for values in _values(view, dtype):
        bad = ~np.isfinite(values)
        if bad.any():
            place = int(bad.argmax())
            index, value = np.array([start + place]), float(values[place])
            whole = index if shard is None else _global(index, view.shape, shard)
            return int(whole[0]), math.nan if math.isnan(
                value
            ) else value  # one NaN for all, so that equal rows compare equal
        start += values.size
    return None, None


def _exact_if_constant(moments: _MeanStdNorm, low: float, high: float) -> _MeanStdNorm:
    """When all elements are equal the mean is that element and nothing spreads, whatever rounding says."""
    return moments._replace(mean=low, std=0.0) if low == high else moments


# --- fingerprint ---


def _fingerprint(tensor: Strided, shard: ShardPosition | None) -> int:
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


def _global(index: npt.NDArray[np.int64], shape: tuple[int, ...], shard: ShardPosition) -> npt.NDArray[np.int64]:
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


# --- contrast ---


class _PairBlocks:
    """The pairs of two tensors, in blocks."""

    def __init__(self, reference: Strided, candidate: Strided) -> None:
        sides = _real(reference), _real(candidate)
        self.views = sides[0][0], sides[1][0]
        self.dtypes = sides[0][1], sides[1][1]
        self.same = self.dtypes[0] == self.dtypes[1]
        self.kind = dtypes.find(self.dtypes[0]).kind

    def raw(self) -> Iterator[tuple[Array, Array]]:
        yield from zip(_blocks(self.views[0]), _blocks(self.views[1]), strict=True)

    def decode(self, reference: Array, candidate: Array) -> tuple[Floats, Floats]:
        r, c = (dtypes.widen(raw, dtype) for raw, dtype in zip((reference, candidate), self.dtypes, strict=True))
        return r, c

    def finite(self) -> Iterator[tuple[Floats, Floats]]:
        for reference, candidate in self.raw():
            r, c = self.decode(reference, candidate)
            keep = np.isfinite(r) & np.isfinite(c)
            yield r[keep], c[keep]


class _FiniteSide:
    """One side of the finite pairs, as blocks that `_moments` can iterate twice."""

    def __init__(self, pairs: _PairBlocks, side: int) -> None:
        self.pairs, self.side = pairs, side

    def __iter__(self) -> Iterator[Floats]:
        for pair in self.pairs.finite():
            yield pair[self.side]


class _Range:
    """The smallest and the largest of what was seen."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def update(self, values: Floats) -> None:
        if values.size:
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    @property
    def absmax(self) -> float:
        return max(-self.low, self.high)


class _Peak:
    """The largest value seen and where; the first one on ties."""

    def __init__(self) -> None:
        self.value, self.index = -1.0, -1

    def update(self, values: Floats, index: npt.NDArray[np.int64]) -> None:
        if values.size and (top := float(values.max())) > self.value:
            self.value, self.index = top, int(index[int(values.argmax())])


class _ErrorSums:
    """What the first pass over the pairs accumulates."""

    def __init__(self, pairs: _PairBlocks, rtol: float, atol: float) -> None:
        self.pairs, self.rtol, self.atol = pairs, rtol, atol
        self.count: Counter[str] = Counter()
        self.ranges = _Range(), _Range()
        self.absolute, self.relative = _Peak(), _Peak()
        self.sum_abs: list[float] = []
        self.sum_rel: list[float] = []
        self.with_ulp = pairs.same and pairs.kind == "float"
        self.max_ulp = self.sum_ulp = 0
        self.first_mismatch = -1
        start = 0
        for reference, candidate in pairs.raw():
            self._add_block(start, reference, candidate)
            start += reference.size

    def _add_block(self, start: int, reference: Array, candidate: Array) -> None:
        r, c = self.pairs.decode(reference, candidate)
        finite = np.isfinite(r) & np.isfinite(c)
        mismatch = ~finite & (r != c) & ~(np.isnan(r) & np.isnan(c))
        self._add_specials(start, r, c, mismatch)
        # Two 64-bit integers may differ and still be one float64: compare them as they are.
        exact = self.pairs.same and self.pairs.kind == "int"
        self._count("different", (reference != candidate) if exact else mismatch | (finite & (r != c)))
        if self.with_ulp:
            self._add_ulps(reference[finite], candidate[finite])
        self._add_errors(start + np.flatnonzero(finite), r[finite], c[finite])

    def _count(self, name: str, mask: npt.NDArray[np.bool_]) -> None:
        self.count[name] += int(np.count_nonzero(mask))

    def _add_specials(self, start: int, r: Floats, c: Floats, mismatch: npt.NDArray[np.bool_]) -> None:
        for values, side in ((r, "reference"), (c, "candidate")):
            self._count(f"nan_{side}", np.isnan(values))
            self._count(f"inf_{side}", np.isinf(values))
        self._count("mismatch", mismatch)
        if self.first_mismatch < 0 and mismatch.any():
            self.first_mismatch = start + int(mismatch.argmax())

    def _add_ulps(self, reference: Array, candidate: Array) -> None:
        distance = _ulp(reference, candidate, self.pairs.dtypes[0])
        self.max_ulp = max(self.max_ulp, int(distance.max(initial=0)))
        low, high = distance & np.uint64(0xFFFFFFFF), distance >> np.uint64(32)
        self.sum_ulp += int(low.sum(dtype=np.uint64)) + (int(high.sum(dtype=np.uint64)) << 32)

    def _add_errors(self, index: npt.NDArray[np.int64], r: Floats, c: Floats) -> None:
        size, error = np.abs(r), np.abs(c - r)
        self.count["finite"] += r.size
        for values, span in zip((r, c), self.ranges, strict=True):
            span.update(values)
        self._count("within", error <= self.atol + self.rtol * size)
        self._count("within_1e3", error <= 1e-3 * size)
        self._count("within_5e3", error <= 5e-3 * size)
        self.absolute.update(error, index)
        self.sum_abs.append(float(error.sum()))
        nonzero = size != 0
        self._count("rel_count", nonzero)
        ratio = error[nonzero] / size[nonzero]
        self.relative.update(ratio, index[nonzero])
        self.sum_rel.append(float(ratio.sum()))


def contrast(reference: Strided, candidate: Strided, rtol: float, atol: float) -> Contrast:
    """See `astray.stats.kernels.contrast`."""
    with np.errstate(all="ignore"):
        pairs = _PairBlocks(reference, candidate)
        errors = _ErrorSums(pairs, rtol, atol)
        count, some, ratios = errors.count, errors.count["finite"] > 0, errors.count["rel_count"] > 0
        r, c = (_side_moments(pairs, side, errors) if some else (None, None, None) for side in (0, 1))
        dot, cosine, l2_error = _products(pairs, errors) if some else (None, None, None)
    return Contrast(
        count=pairs.views[0].size,
        finite=count["finite"],
        different=count["different"],
        mean_reference=r[0],
        std_reference=r[1],
        l2_reference=r[2],
        mean_candidate=c[0],
        std_candidate=c[1],
        l2_candidate=c[2],
        dot=dot,
        cosine=cosine,
        sum_abs_error=_total(errors.sum_abs) if some else None,
        l2_error=l2_error,
        max_abs_error=errors.absolute.value if some else None,
        max_abs_index=errors.absolute.index,
        max_rel_error=errors.relative.value if ratios else None,
        max_rel_index=errors.relative.index,
        sum_rel_error=_total(errors.sum_rel) if ratios else None,
        rel_count=count["rel_count"],
        within_tolerance=count["within"],
        within_1e3=count["within_1e3"],
        within_5e3=count["within_5e3"],
        max_ulp=errors.max_ulp if errors.with_ulp and some else None,
        mean_ulp=errors.sum_ulp / count["finite"] if errors.with_ulp and some else None,
        nan_reference=count["nan_reference"],
        nan_candidate=count["nan_candidate"],
        inf_reference=count["inf_reference"],
        inf_candidate=count["inf_candidate"],
        nonfinite_mismatch=count["mismatch"],
        first_nonfinite_mismatch=errors.first_mismatch,
    )


def _side_moments(pairs: _PairBlocks, side: int, errors: _ErrorSums) -> _MeanStdNorm:
    span = errors.ranges[side]
    moments = _moments(_FiniteSide(pairs, side), errors.count["finite"], _scale(span.absmax))
    return _exact_if_constant(moments, span.low + 0.0, span.high + 0.0)


def _total(parts: list[float]) -> float:
    """The sum of non-negative parts, infinite when it is beyond float64."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _products(pairs: _PairBlocks, errors: _ErrorSums) -> tuple[float, float | None, float]:
    """dot, cosine, and the norm of the error, each from numbers scaled near 1."""
    r_scale, c_scale = (_scale(span.absmax) for span in errors.ranges)
    # A difference of two huge numbers may overflow; 2⁻¹⁰⁰⁰ of it does not.
    shrink = 1.0 if math.isfinite(errors.absolute.value) else 2.0**-1000
    zoom = _scale(errors.absolute.value) if shrink == 1.0 else 1.0
    dots, references, candidates, squares = [], [], [], []
    for r, c in pairs.finite():
        d = (c * shrink - r * shrink) * zoom
        r, c = r * r_scale, c * c_scale
        dots.append(float(np.sum(r * c)))
        references.append(float(np.sum(r * r)))
        candidates.append(float(np.sum(c * c)))
        squares.append(float(np.sum(d * d)))
    dot = math.fsum(dots)
    norms = math.sqrt(math.fsum(references)) * math.sqrt(math.fsum(candidates))
    # Rounding can push a cosine of 1 past it.
    cosine = max(-1.0, min(1.0, dot / norms)) if norms else None
    return _unscale(dot, r_scale, c_scale), cosine, _unscale(math.sqrt(math.fsum(squares)), zoom, shrink)


def _unscale(value: float, *scales: float) -> float:
    """Divide by powers of two all at once, so that no step on the way overflows or loses bits."""
    exponent = sum(math.frexp(scale)[1] - 1 for scale in scales)
    try:
        return math.ldexp(value, -exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


LEAST_SLICE = 16
"""So many elements a slice has at least: fewer scatter as single ones do."""


MANY_ROWS = 8
"""A tensor with fewer rows has no typical one: the median of fewer is chance."""


def slice_errors(reference: Strided, candidate: Strided, largest: float) -> tuple[float, int, int, float] | None:
    """See `astray.stats.kernels.slice_errors`."""
    pairs = _PairBlocks(reference, candidate)
    shape = pairs.views[0].shape
    dims = [dim for dim, size in enumerate(reference.shape) if size > 1 and math.prod(shape) // size >= LEAST_SLICE]
    if not dims:
        return None
    shrink = 1.0 if math.isfinite(largest) else 2.0**-1000
    zoom = _scale(largest) if shrink == 1.0 else 1.0
    sums = {dim: np.zeros(shape[dim]) for dim in dims}
    width = shape[-1]  # of a row; the two parts of complex numbers make none
    rows = np.zeros(math.prod(shape) // width)
    start = 0
    with np.errstate(all="ignore"):
        for raw_r, raw_c in pairs.raw():
            r, c = pairs.decode(raw_r, raw_c)
            d = np.where(np.isfinite(r) & np.isfinite(c), (c * shrink - r * shrink) * zoom, 0.0)
            place = np.unravel_index(np.arange(start, start + d.size), shape)
            rows += np.bincount(np.arange(start, start + d.size) // width, d * d, len(rows))
            start += d.size
            for dim in dims:
                sums[dim] += np.bincount(place[dim], d * d, shape[dim])
    tops = {dim: float(column.max()) * shape[dim] for dim, column in sums.items()}
    dim = max(dims, key=tops.__getitem__)
    has_rows = width >= LEAST_SLICE and len(rows) >= MANY_ROWS
    median = float(np.sort(rows)[len(rows) // 2]) * len(rows)
    typical = _unscale(math.sqrt(median), zoom, shrink) if has_rows else math.nan
    return _unscale(math.sqrt(tops[dim]), zoom, shrink), dim, int(sums[dim].argmax()), typical


def _ulp(reference: Array, candidate: Array, dtype: str) -> npt.NDArray[np.uint64]:
    """How many representable numbers lie between two floats of one type; 0 and −0 count as equal."""
    a, b = _ordered(reference, dtype), _ordered(candidate, dtype)
    # Unsigned subtraction, so that the distance from −max to max of float64 fits.
    return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)


def _ordered(raw: Array, dtype: str) -> npt.NDArray[np.int64]:
    """Bit patterns → integers in the order of their values."""
    bits = np.ascontiguousarray(raw).view(f"i{raw.dtype.itemsize}").astype(np.int64)
    if dtype == "float8_e8m0fnu":  # no sign bit
        return bits & 0xFF
    magnitude = bits & np.int64((1 << (8 * raw.dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)


# --- bytes and strings ---


def gather(tensor: Strided, positions: npt.NDArray[np.int64]) -> Array:
    """See `astray.stats.kernels.gather`."""
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < tensor.size:
        raise IndexError(f"Positions must lie in 0 … {tensor.size - 1} for a tensor of shape {tensor.shape}.")
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
    """Do nothing: a single thread does all the work here."""
