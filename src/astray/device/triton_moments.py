"""The moments of many tensors on the GPU in one launch: each program reads a stretch of one tensor, and leaves a row.

What `stats.moments` is on the CPU. All sums are in float64, about a pivot (the mean of the first few elements): an H200
makes them in the time it reads the numbers. Only types whose fourth powers float64 can hold come here.
"""

# Triton compiles the text of these functions; types of Python mean nothing in it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(16)
"""Numbers in a row: those of a `Moments`, without its exponent."""

_INF = tl.constexpr(float("inf"))


@triton.jit
def _sums(pointer, start, end, pivot, TILE: tl.constexpr):
    """Σd, Σd², Σd³ and Σd⁴ over the finite elements, d being the distance from the pivot."""
    lane = tl.arange(0, TILE)
    zero = tl.zeros([TILE], tl.float64)
    s1, s2, s3, s4 = zero, zero, zero, zero
    for each in tl.range(start, end, TILE, num_stages=3):
        x = tl.load(pointer + each + lane, each + lane < end, 0.0).to(tl.float64)
        away = tl.where((each + lane < end) & (tl.abs(x) < _INF), x - pivot, 0.0)
        square = away * away
        s1 += away
        s2 += square
        s3 += square * away
        s4 += square * square
    return tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s4, 0)


@triton.jit
def _mean_of_first(pointer, start, end, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    first = tl.load(pointer + start + lane, start + lane < end, 0.0).to(tl.float64)
    some = (start + lane < end) & (tl.abs(first) < _INF)
    return tl.sum(tl.where(some, first, 0.0), 0) / tl.maximum(tl.sum(some.to(tl.float64), 0), 1.0)


@triton.jit
def measure_moments(table, rows, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """`table` has an address, the first element and the one behind the last for each program."""
    program = tl.program_id(0)
    address, start, end = (
        tl.load(table + 3 * program),
        tl.load(table + 3 * program + 1),
        tl.load(table + 3 * program + 2),
    )
    pointer = address.to(tl.pointer_type(DTYPE))
    lane = tl.arange(0, TILE)

    pivot = _mean_of_first(pointer, start, end, TILE)
    zero = tl.zeros([TILE], tl.float64)
    s1, s2, s3, s4, sizes = zero, zero, zero, zero, zero
    none = tl.zeros([TILE], tl.int32)
    finite, nans, above, below, zeros = none, none, none, none, none
    low, high = zero + _INF, zero - _INF
    absmin, absmax = low, zero
    for each in tl.range(start, end, TILE, num_stages=3):
        mask = each + lane < end
        x = tl.load(pointer + each + lane, mask, 0.0).to(tl.float64)
        size = tl.abs(x)
        good = mask & (size < _INF)
        away = tl.where(good, x - pivot, 0.0)
        square = away * away
        s1 += away
        s2 += square
        s3 += square * away
        s4 += square * square
        sizes += tl.where(good, size, 0.0)
        finite += good.to(tl.int32)
        nans += (mask & (x != x)).to(tl.int32)
        above += (mask & (x == _INF)).to(tl.int32)
        below += (mask & (x == -_INF)).to(tl.int32)
        zeros += (mask & (x == 0.0)).to(tl.int32)
        low = tl.minimum(low, tl.where(good, x, _INF))
        high = tl.maximum(high, tl.where(good, x, -_INF))
        absmin = tl.minimum(absmin, tl.where(good, size, _INF))
        absmax = tl.maximum(absmax, tl.where(good, size, 0.0))

    n = tl.sum(finite.to(tl.float64), 0)
    t1, t2, t3, t4 = tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s4, 0)
    total = n * pivot + t1
    d = t1 / tl.maximum(n, 1.0)
    if n * d * d > 0.5 * t2:  # the first elements are not like the others: too little would be left of the differences
        pivot += d
        t1, t2, t3, t4 = _sums(pointer, start, end, pivot, TILE)
        d = t1 / tl.maximum(n, 1.0)
    row = rows + FIELDS * program
    tl.store(row + 0, (end - start).to(tl.float64))
    tl.store(row + 1, n)
    tl.store(row + 2, tl.sum(nans.to(tl.float64), 0))
    tl.store(row + 3, tl.sum(above.to(tl.float64), 0))
    tl.store(row + 4, tl.sum(below.to(tl.float64), 0))
    tl.store(row + 5, tl.sum(zeros.to(tl.float64), 0))
    nothing = tl.where(n > 0.0, 0.0, float("nan"))  # the extremes and the mean of nothing
    tl.store(row + 6, tl.min(low, 0) + nothing)
    tl.store(row + 7, tl.max(high, 0) + nothing)
    tl.store(row + 8, tl.min(absmin, 0) + nothing)
    tl.store(row + 9, tl.max(absmax, 0) + nothing)
    tl.store(row + 10, total)
    tl.store(row + 11, tl.sum(sizes, 0))
    tl.store(row + 12, pivot + d + nothing)
    tl.store(row + 13, tl.maximum(t2 - n * d * d, 0.0))
    tl.store(row + 14, t3 - 3.0 * d * t2 + 2.0 * n * d * d * d)
    tl.store(row + 15, tl.maximum(t4 - 4.0 * d * t3 + 6.0 * d * d * t2 - 3.0 * n * d * d * d * d, 0.0))
