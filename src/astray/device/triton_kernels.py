"""Statistics and fingerprint of a tensor on the GPU: `measure` leaves partial rows, `merge_rows` merges them.

`layout` says how memory is walked; `tickets` says what a row is. Each thread keeps its own sums over all it reads,
about a pivot of its own (the mean of its first few elements): that keeps small spreads about large means right in
float32. Threads meet once, at the end of a program. The quick sweep takes every number for finite and of moderate size;
a program that finds otherwise afterwards sweeps its part once more with care, and again for the first element that is
not finite, where there is one. No atomics: results do not vary.

Instructions decide the speed, so count them after a change (sm_90, per element of the quick sweep, all/ALU pipe):
bfloat16 and float16 10.6/5.1 (12.8/6.3 without PAIRS), float32 18.3/10.1, float8_e4m3fn 8.7/3.2 (16.9/8.4), the
fingerprint alone 4.9/2.9 in bfloat16. An H200 issues 15 in the time it reads a bfloat16, half as many to the ALU pipe.
"""

# Triton compiles the text of these functions; types of Python mean nothing in it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from astray.device.launcher import KernelSource
from astray.device.layout import MOST_DIMENSIONS
from astray.device.tickets import NONE
from astray.stats import dtypes, fingerprint

_STEP = tl.constexpr(fingerprint.STEP)
_STEP_HIGH = tl.constexpr(fingerprint.STEP_HIGH)
_SPREAD = tl.constexpr(fingerprint.SPREAD)
_FLIP = tl.constexpr(fingerprint.FLIP ^ fingerprint.FLIP >> 16)  # moved behind the first shift, where it costs nothing
_INF = tl.constexpr(float("inf"))
_NONE = tl.constexpr(NONE)

# --- addresses ---


@triton.jit
def _advance(place, rest, extent, memory, logical, LAST: tl.constexpr, WIDE: tl.constexpr):
    """Take one dimension off the row number `rest` and add it to the place, a pair of offsets."""
    offset, index = place
    if WIDE:
        size, step, count = extent, memory, logical
    else:
        size, step, count = (extent >> 32).to(tl.int32), memory.to(tl.int32), (logical & 0xFFFFFFFF).to(tl.int32)
    if LAST:
        coordinate, quotient = rest, rest
    else:
        if WIDE:
            quotient = rest // size
        else:  # by multiplication, as `layout` has prepared it
            number = rest.to(tl.uint32)
            factor = tl.zeros_like(number) + (extent & 0xFFFFFFFF).to(tl.uint32)
            quotient = ((tl.umulhi(number, factor) + number) >> (logical >> 32).to(tl.uint32)).to(tl.int32)
        coordinate = rest - quotient * size
    return (offset + coordinate * step, index + coordinate * count), quotient


@triton.jit
def _locate(row, base, dims, DIMENSIONS: tl.constexpr, WIDE: tl.constexpr):
    """Where a row starts: its offset in memory and its index in logical order, in units."""
    if WIDE:
        rest = row.to(tl.int64)
        place = (tl.zeros_like(rest), tl.zeros_like(rest) + base)
    else:
        rest = row
        place = (tl.zeros_like(rest), tl.zeros_like(rest) + base.to(tl.int32))
    for each in tl.static_range(DIMENSIONS):
        place, rest = _advance(
            place, rest, dims[3 * each], dims[3 * each + 1], dims[3 * each + 2], each == DIMENSIONS - 1, WIDE
        )
    return place


@triton.jit
def _seed(index, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """The linear part of the hash of a unit's (first) word."""
    if UNIT == 8:
        word = index * 2
    elif UNIT == 4:
        word = index
    elif UNIT == 2:
        word = index >> 1
    else:
        word = index >> 2
    seed = word.to(tl.uint32) * _STEP
    if WIDE:
        seed += (word >> 32).to(tl.uint32) * _STEP_HIGH
    return seed


@triton.jit
def _place(row, base, dims, UNIT: tl.constexpr, ROW: tl.constexpr, DIMENSIONS: tl.constexpr, WIDE: tl.constexpr,
           THREADS: tl.constexpr):  # fmt: skip
    """Of the units [THREADS, ROW] from a row on: number, offset in memory, logical index, hash seed, and shift into the
    word. What a caller does not use is never computed.
    """
    thread, along = tl.arange(0, THREADS)[:, None], tl.arange(0, ROW)[None, :]
    lane = thread * ROW + along
    first = row * ROW
    number = first + lane
    shift = tl.zeros([1, 1], tl.uint32)
    if DIMENSIONS == 0:
        offset, index = number, number + base
        if WIDE:
            seed = _seed(number + base, UNIT, True)
        else:  # the first part is one number for all threads; the lane's stays in a register
            seed = _seed(first + base, UNIT, False) + _seed(lane, UNIT, False)
    else:
        if WIDE:
            offset, index = _locate(row + thread, base, dims, DIMENSIONS, WIDE)
            offset += along * (dims[1] // ROW)
            index += along * (dims[2] // ROW)
        else:
            offset, index = _locate(row.to(tl.int32) + thread, base, dims, DIMENSIONS, WIDE)
            offset += along * (dims[1] // ROW).to(tl.int32)
            index += along * ((dims[2] & 0xFFFFFFFF) // ROW).to(tl.int32)
        seed = _seed(index, UNIT, WIDE)
        if UNIT < 4:
            shift = ((index.to(tl.uint32) * UNIT) & 3) * 8
    return number, offset, index, seed, shift


@triton.jit
def _pointers(address, offset, UNIT: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr):
    if UNIT == 8:
        pointers = address.to(tl.pointer_type(tl.uint64)) + offset
    elif UNIT == 4:
        pointers = address.to(tl.pointer_type(tl.uint32)) + offset
    elif UNIT == 2:
        pointers = address.to(tl.pointer_type(tl.uint16)) + offset
    else:
        pointers = address.to(tl.pointer_type(tl.uint8)) + offset
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, ROW))
    return pointers


@triton.jit
def _last_word(address, number, count, ITEM: tl.constexpr):
    """The elements of a word that is not whole, wherever `number` is that word; nothing beyond them is read."""
    words = count * ITEM // 4
    word = tl.zeros(number.shape, tl.uint32)
    for each in tl.static_range(4 // ITEM - 1):
        element = words * (4 // ITEM) + each
        mask = (number == words) & (element < count)
        if ITEM == 2:
            bits = tl.load(address.to(tl.pointer_type(tl.uint16)) + element + tl.zeros_like(number), mask, 0)
        else:
            bits = tl.load(address.to(tl.pointer_type(tl.uint8)) + element + tl.zeros_like(number), mask, 0)
        word |= bits.to(tl.uint32) << (8 * ITEM * each)
    return word


# --- elements ---


@triton.jit
def _weigh(bits, seed, shift, UNIT: tl.constexpr):
    """What each unit adds to the fingerprint."""
    if UNIT == 8:
        low, high = (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
        product = _product(low, seed) + _product(high, seed + _STEP)
    elif UNIT == 4:
        product = _product(bits, seed)
    else:
        product = _product(bits.to(tl.uint32) << shift, seed)
    return product


@triton.jit
def _product(word, seed):
    x = seed ^ (seed >> 16) ^ _FLIP
    x *= _SPREAD
    x ^= x >> 15
    return word.to(tl.uint64) * x.to(tl.uint64)


@triton.jit
def _numbers(bits, DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr):
    """The numbers in a unit, in memory order, as a tuple; in float32 where that is exact enough."""
    if UNIT == 4 and ITEM == 2:
        if DTYPE == "bfloat16":  # the upper one needs no shift
            numbers = (bits << 16).to(tl.float32, bitcast=True), (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            numbers = _number(bits & 0xFFFF, DTYPE), _number(bits >> 16, DTYPE)
    elif UNIT == 4 and ITEM == 1:
        numbers = (
            _number(bits & 0xFF, DTYPE),
            _number((bits >> 8) & 0xFF, DTYPE),
            _number((bits >> 16) & 0xFF, DTYPE),
            _number(bits >> 24, DTYPE),
        )
    elif UNIT < 4:
        numbers = (_number(bits.to(tl.uint32), DTYPE),)
    else:
        numbers = (_number(bits, DTYPE),)
    return numbers


@triton.jit
def _number(bits, DTYPE: tl.constexpr):
    """The number that the low bits of a uint32 (uint64 for 8-byte types) stand for; the bits above are 0."""
    if DTYPE == "float32":
        number = bits.to(tl.float32, bitcast=True)
    elif DTYPE == "bfloat16":
        number = (bits << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        number = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == "float64":
        number = bits.to(tl.float64, bitcast=True)
    elif DTYPE == "float8_e5m2":  # the upper half of a float16
        number = (bits << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == "float8_e4m3fn":
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), _small_float(bits, 20, 2.0**120))
    elif DTYPE == "float8_e4m3fnuz":
        number = tl.where(bits == 0x80, float("nan"), _small_float(bits, 20, 2.0**119))
    elif DTYPE == "float8_e5m2fnuz":
        number = tl.where(bits == 0x80, float("nan"), _small_float(bits, 21, 2.0**111))
    elif DTYPE == "float8_e8m0fnu":  # an exponent of float32; its 0 is a subnormal there, its 255 is NaN here
        odd = ((bits == 0) | (bits == 0xFF)).to(tl.uint32) << 22
        number = (bits << 23 | odd).to(tl.float32, bitcast=True)
    elif DTYPE == "bool":
        number = (bits != 0).to(tl.float32)
    elif DTYPE == "uint8":
        number = bits.to(tl.float32)
    elif DTYPE == "int8":
        number = bits.to(tl.int8).to(tl.float32)
    elif DTYPE == "int16":
        number = bits.to(tl.int16).to(tl.float64)
    elif DTYPE == "int32":
        number = bits.to(tl.int32, bitcast=True).to(tl.float64)
    elif DTYPE == "int64":
        number = bits.to(tl.int64, bitcast=True).to(tl.float64)
    else:
        tl.static_assert(DTYPE == "uint16" or DTYPE == "uint32" or DTYPE == "uint64", "no such dtype")
        number = bits.to(tl.float64)
    return number


@triton.jit
def _small_float(bits, UP: tl.constexpr, SCALE: tl.constexpr):
    """An 8-bit float from its sign, and the rest put in the place of a float32's, which is exact down to subnormals."""
    return ((bits & 0x7F) << UP | (bits & 0x80) << 24).to(tl.float32, bitcast=True) * SCALE


# --- two 16-bit floats at a time, which NVIDIA has instructions for from sm_90 on ---


@triton.jit
def _pairs(word, DTYPE: tl.constexpr):
    """The elements of a word as pairs, in any order; 8-bit floats become float16, which holds them exactly."""
    if DTYPE == "float8_e4m3fn":
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [word], (tl.uint32, tl.uint32), True, 1,
        )  # fmt: skip
    elif DTYPE == "float8_e5m2":  # the upper halves of float16s
        pairs = (word << 8) & 0xFF00FF00, word & 0xFF00FF00
    else:
        pairs = (word,)
    return pairs


@triton.jit
def _pair_min(one, other, DTYPE: tl.constexpr):
    if DTYPE == "bfloat16":
        pair = tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.uint32, True, 1)
    else:
        pair = tl.inline_asm_elementwise("min.f16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.uint32, True, 1)
    return pair


@triton.jit
def _pair_max(one, other, DTYPE: tl.constexpr):
    if DTYPE == "bfloat16":
        pair = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.uint32, True, 1)
    else:
        pair = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [one, other], tl.uint32, True, 1)
    return pair


@triton.jit
def _pair_zeros(pair, DTYPE: tl.constexpr):
    """0xFFFF in the half of every zero. A sum of n of these is 0xFFFF × (zeros below + 2¹⁶ × zeros above)."""
    if DTYPE == "bfloat16":
        mask = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; set.eq.u32.bf16x2 $0, $1, zero; }", "=r,r", [pair], tl.uint32, True, 1
        )
    else:
        mask = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; set.eq.u32.f16x2 $0, $1, zero; }", "=r,r", [pair], tl.uint32, True, 1
        )
    return mask


# --- sweeps over what a program reads ---


@triton.jit
def _pivot(address, base, dims, program, units, DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr,
           ROW: tl.constexpr, ALIGNED: tl.constexpr, DIMENSIONS: tl.constexpr, WIDE: tl.constexpr,
           FLOAT: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """The mean of each thread's first row, 0 where that is not finite."""
    row = program.to(tl.int64) * (UNROLL * THREADS)
    number, offset, _, _, _ = _place(row, base, dims, UNIT, ROW, DIMENSIONS, WIDE, THREADS)
    bits = tl.load(_pointers(address, offset, UNIT, ROW, ALIGNED), number < units, 0)
    numbers = _numbers(bits, DTYPE, ITEM, UNIT)
    total = tl.zeros([THREADS, ROW], FLOAT)
    for each in tl.static_range(UNIT // ITEM):
        total += numbers[each]
    some = tl.maximum(tl.sum((number < units).to(tl.int32), 1), 1) * (UNIT // ITEM)
    mean = tl.sum(total, 1) / some.to(FLOAT)
    return tl.where(tl.abs(mean) < _INF, mean, 0.0)


@triton.jit
def _quick(address, base, dims, pivot, start, end, step, DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr,
           ROW: tl.constexpr, ALIGNED: tl.constexpr, DIMENSIONS: tl.constexpr, WIDE: tl.constexpr,
           STATISTICS: tl.constexpr, FLOAT: tl.constexpr, PIVOT: tl.constexpr, PAIRS: tl.constexpr,
           THREADS: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Sweep over whole tiles, taking every number for finite and of moderate size.

    Instructions per element decide the speed. So all that can stay in a register of its own does until the end, zeros
    are counted as floats, and sums go to float64 once for UNROLL rows.
    """
    PAIR: tl.constexpr = "bfloat16" if DTYPE == "bfloat16" else "float16"
    weight = tl.zeros([THREADS, ROW], tl.uint64)
    if PAIRS:
        low = tl.zeros([THREADS, ROW], tl.uint32) + (0x7F807F80 if PAIR == "bfloat16" else 0x7C007C00)
        high = low | 0x80008000
        zeros = tl.zeros([THREADS, ROW], tl.uint32)
    else:
        low = tl.full([THREADS, ROW], _INF, FLOAT)
        high = tl.full([THREADS, ROW], -_INF, FLOAT)
        zeros = tl.zeros([THREADS, ROW], tl.float32)
    drift = tl.zeros([THREADS], tl.float64)
    squares = tl.zeros([THREADS], tl.float64)
    for tile in range(start, end, step):
        away = tl.zeros([THREADS, ROW], FLOAT)
        square = tl.zeros([THREADS, ROW], FLOAT)
        for turn in tl.static_range(UNROLL):
            row = tl.cast(tile, tl.int64) * (UNROLL * THREADS) + turn * THREADS
            _, offset, _, seed, shift = _place(row, base, dims, UNIT, ROW, DIMENSIONS, WIDE, THREADS)
            bits = tl.load(_pointers(address, offset, UNIT, ROW, ALIGNED))
            weight += _weigh(bits, seed, shift, UNIT)
            if STATISTICS and PAIRS:
                pairs = _pairs(bits, DTYPE)
                for each in tl.static_range(2 // ITEM):
                    low, high = _pair_min(low, pairs[each], PAIR), _pair_max(high, pairs[each], PAIR)
                    zeros += _pair_zeros(pairs[each], PAIR)
                    both = _numbers(pairs[each], PAIR, 2, 4)
                    below, above = both[0] - pivot[:, None], both[1] - pivot[:, None]
                    away += below
                    away += above
                    square += below * below
                    square += above * above
            elif STATISTICS:
                numbers = _numbers(bits, DTYPE, ITEM, UNIT)
                for each in tl.static_range(UNIT // ITEM):
                    x = numbers[each]
                    distance = x - pivot[:, None] if PIVOT else x
                    away += distance
                    square += distance * distance
                    low, high = tl.minimum(low, x), tl.maximum(high, x)
                    zeros += tl.where(x == 0, 1.0, 0.0)
        if STATISTICS:
            drift += tl.sum(away, 1).to(tl.float64)
            squares += tl.sum(square, 1).to(tl.float64)
    if PAIRS:
        lows, highs = _numbers(low, PAIR, 2, 4), _numbers(high, PAIR, 2, 4)
        least, most = tl.min(tl.minimum(lows[0], lows[1]), 1), tl.max(tl.maximum(highs[0], highs[1]), 1)
        counts = zeros * 0xFFFEFFFF  # divides by 0xFFFF
        none = tl.sum((counts & 0xFFFF) + (counts >> 16), 1).to(tl.int32)
    else:
        least, most, none = tl.min(low, 1), tl.max(high, 1), tl.sum(zeros, 1).to(tl.int32)
    return tl.sum(weight, 1), least, most, none, drift, squares


@triton.jit
def _careful(address, base, dims, units, count, pivot, scale, start, end, step, weight, low, high, zeros, drift,
             squares, finite, nan, DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr,
             ALIGNED: tl.constexpr, DIMENSIONS: tl.constexpr, WIDE: tl.constexpr, STATISTICS: tl.constexpr,
             FLOAT: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Sweep over tiles that need not be whole, about scaled pivots, and add what is finite in them."""
    for tile in range(start, end, step):
        left = count - tl.cast(tile, tl.int64) * (UNROLL * THREADS * ROW * (UNIT // ITEM))
        turns = tl.minimum((left + (THREADS * ROW * (UNIT // ITEM) - 1)) // (THREADS * ROW * (UNIT // ITEM)), UNROLL)
        for turn in range(turns.to(tl.int32)):
            row = tl.cast(tile, tl.int64) * (UNROLL * THREADS) + turn * THREADS
            number, offset, _, seed, shift = _place(row, base, dims, UNIT, ROW, DIMENSIONS, WIDE, THREADS)
            bits = tl.load(_pointers(address, offset, UNIT, ROW, ALIGNED), number < units, 0)
            if DIMENSIONS == 0 and UNIT > ITEM:
                bits |= _last_word(address, number, count, ITEM)
            weight += tl.sum(_weigh(bits, seed, shift, UNIT), 1)
            if STATISTICS:
                numbers = _numbers(bits, DTYPE, ITEM, UNIT)
                away = tl.zeros([THREADS, ROW], FLOAT)
                square, least, most = away, away + _INF, away - _INF
                none = tl.zeros([THREADS, ROW], tl.int32)
                some, odd = none, none
                for each in tl.static_range(UNIT // ITEM):
                    x = numbers[each]
                    valid = number * (UNIT // ITEM) + each < count
                    good = valid & (tl.abs(x) < _INF)
                    distance = tl.where(good, x * scale - pivot[:, None], 0.0)
                    away += distance
                    square += distance * distance
                    least = tl.minimum(least, tl.where(good, x, _INF))
                    most = tl.maximum(most, tl.where(good, x, -_INF))
                    none += (valid & (x == 0)).to(tl.int32)
                    some += good.to(tl.int32)
                    odd += (valid & (x != x)).to(tl.int32)
                drift += tl.sum(away, 1).to(tl.float64)
                squares += tl.sum(square, 1).to(tl.float64)
                low, high = tl.minimum(low, tl.min(least, 1)), tl.maximum(high, tl.max(most, 1))
                zeros += tl.sum(none, 1)
                finite += tl.sum(some, 1)
                nan += tl.sum(odd, 1)
    return weight, low, high, zeros, drift, squares, finite, nan


@triton.jit
def _first_bad(address, base, dims, units, count, start, end, step, DTYPE: tl.constexpr, ITEM: tl.constexpr,
               UNIT: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr, DIMENSIONS: tl.constexpr,
               WIDE: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Sweep over tiles for the first element that is not finite: index and kind in one number, see `tickets.FIELDS`."""
    EACH: tl.constexpr = UNIT // ITEM
    first = tl.full([THREADS], _NONE, tl.int64)
    for tile in range(start, end, step):
        left = count - tl.cast(tile, tl.int64) * (UNROLL * THREADS * ROW * EACH)
        turns = tl.minimum((left + (THREADS * ROW * EACH - 1)) // (THREADS * ROW * EACH), UNROLL)
        for turn in range(turns.to(tl.int32)):
            row = tl.cast(tile, tl.int64) * (UNROLL * THREADS) + turn * THREADS
            number, offset, index, _, _ = _place(row, base, dims, UNIT, ROW, DIMENSIONS, WIDE, THREADS)
            bits = tl.load(_pointers(address, offset, UNIT, ROW, ALIGNED), number < units, 0)
            if DIMENSIONS == 0 and UNIT > ITEM:
                bits |= _last_word(address, number, count, ITEM)
            numbers = _numbers(bits, DTYPE, ITEM, UNIT)
            for each in tl.static_range(EACH):
                x = numbers[each]
                bad = (number * EACH + each < count) & ((x != x) | (tl.abs(x) == _INF))
                kind = tl.where(x != x, 0, tl.where(x > 0, 1, 2))
                packed = tl.where(bad, (index.to(tl.int64) * EACH + each) * 4 + kind, _NONE)
                first = tl.minimum(first, tl.min(packed, 1))
    return tl.min(first, 0)


@triton.jit
def _meet(
    weight, low, high, zeros, squares, finite, nan, weight_, low_, high_, zeros_, squares_, finite_, nan_
):  # fmt: skip
    return (
        weight + weight_,
        tl.minimum(low, low_),
        tl.maximum(high, high_),
        zeros + zeros_,
        squares + squares_,
        finite + finite_,
        nan + nan_,
    )


@triton.jit
def _power(size):
    """A power of two that brings a float64 near 1, so that squares neither overflow nor vanish; 1 for 0."""
    exponent = (size.to(tl.int64, bitcast=True) >> 52) & 0x7FF
    exponent = tl.minimum(tl.maximum(exponent, 1), 2045)
    power = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    return tl.where(size > 0, power, 1.0)


# --- the kernels ---


@triton.jit
def _put(rows, capacity, row, finite, mean, spread, low, high, zeros, nan, inf, weight, first):
    """Write a row; see `tickets.FIELDS`."""
    tl.store(rows + row, finite)
    tl.store(rows + capacity + row, mean.to(tl.int64, bitcast=True))
    tl.store(rows + 2 * capacity + row, spread.to(tl.int64, bitcast=True))
    tl.store(rows + 3 * capacity + row, low.to(tl.int64, bitcast=True))
    tl.store(rows + 4 * capacity + row, high.to(tl.int64, bitcast=True))
    tl.store(rows + 5 * capacity + row, zeros)
    tl.store(rows + 6 * capacity + row, nan)
    tl.store(rows + 7 * capacity + row, inf)
    tl.store(rows + 8 * capacity + row, weight.to(tl.int64, bitcast=True))
    tl.store(rows + 9 * capacity + row, first)


@triton.jit
def _measure_part(
    address, count, base, dims, program, programs, partials, capacity, row,
    DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr,
    DIMENSIONS: tl.constexpr, WIDE: tl.constexpr, STATISTICS: tl.constexpr, DOUBLE: tl.constexpr,
    PIVOT: tl.constexpr, PAIRS: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Measure what is one program's of `count` real numbers at `address`, which `programs` share, into a partial row.

    The mean in a partial row is half of what it is above the row's low, so that merging loses no digits of means that
    are large and close. DOUBLE computes in float64, PIVOT is off where sums are exact, and PAIRS allows NVIDIA's
    instructions for two 16-bit floats.
    """
    FLOAT: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    TILE: tl.constexpr = UNROLL * THREADS * ROW  # units
    EACH: tl.constexpr = UNIT // ITEM
    units = count * ITEM // UNIT  # whole ones
    whole = (units // TILE).to(tl.int32)
    tiles = ((count + (TILE * EACH - 1)) // (TILE * EACH)).to(tl.int32)
    swept = tl.maximum((whole - program + programs - 1) // programs, 0)  # this program's whole tiles
    mine = tl.maximum((tiles - program + programs - 1) // programs, 0).to(tl.int64) * (TILE * EACH)
    if (tiles - 1) % programs == program:  # the last tile may be cut short
        mine -= tiles.to(tl.int64) * (TILE * EACH) - count

    pivot = tl.zeros([THREADS], FLOAT)
    if STATISTICS and PIVOT:
        pivot = _pivot(address, base, dims, program, units, DTYPE, ITEM, UNIT, ROW, ALIGNED, DIMENSIONS, WIDE, FLOAT,
                       THREADS, UNROLL)  # fmt: skip
    weight, low, high, zeros, drift, squares = _quick(
        address, base, dims, pivot, program, whole, programs, DTYPE, ITEM, UNIT, ROW, ALIGNED, DIMENSIONS, WIDE,
        STATISTICS, FLOAT, PIVOT, PAIRS, THREADS, UNROLL,
    )  # fmt: skip
    finite = tl.zeros([THREADS], tl.int32) + swept * (UNROLL * ROW * EACH)
    nan = tl.zeros([THREADS], tl.int32)

    start = program + swept * programs
    scale = tl.full([], 1.0, FLOAT)
    nothing = count * 0
    row_weight, row_finite, row_zeros, row_nan, row_inf = nothing.to(tl.uint64), nothing, nothing, nothing, nothing
    row_mean = nothing.to(tl.float64)
    row_spread, row_low, row_high = row_mean, row_mean, row_mean
    attempt = 0
    while attempt < 4:
        # First only what the quick sweep has left over, the last tile; everything, should that not have gone well.
        weight, low, high, zeros, drift, squares, finite, nan = _careful(
            address, base, dims, units, count, pivot, scale, start, tiles, programs, weight, low, high, zeros, drift,
            squares, finite, nan, DTYPE, ITEM, UNIT, ROW, ALIGNED, DIMENSIONS, WIDE, STATISTICS, FLOAT, THREADS, UNROLL,
        )  # fmt: skip
        if STATISTICS:
            row_weight, least, most, none, total, known, nans = tl.reduce(
                (weight, low, high, zeros, squares, finite, nan), 0, _meet
            )
            row_low, row_high = least.to(tl.float64), most.to(tl.float64)
            row_finite, row_zeros, row_nan = known.to(tl.int64), none.to(tl.int64), nans.to(tl.int64)
            row_inf = mine - row_finite - row_nan
            # The threads' means, from the least element on: they lose no digits then where all are large and close.
            zoom = scale.to(tl.float64)
            ground = tl.where(known > 0, row_low * zoom, 0.0)
            share = tl.maximum(finite, 1).to(tl.float64)
            above = tl.where(finite > 0, pivot.to(tl.float64) - ground + drift / share, 0.0)
            mean = tl.sum(finite.to(tl.float64) * above, 0) / tl.maximum(known, 1).to(tl.float64)
            if PIVOT:
                own = tl.maximum(squares - drift * (drift / share), 0.0)
            else:  # whole numbers, so the difference is exact
                own = (share * squares - drift * drift) / share
            left = tl.sum(own + finite.to(tl.float64) * ((above - mean) * (above - mean)), 0)
            row_mean, row_spread = 0.5 * mean / zoom, tl.sqrt(left) / zoom
            # Is that right? NaN, infinity and squares beyond the type show in the sum of squares; squares that vanish
            # show in the range; pivots far from the mean show as squares that cancel.
            bounded = total < _INF
            width = (row_high - row_low) * zoom
            fine = (width >= (1e-140 if DOUBLE else 1e-15)) & (total <= 32 * left)
            right = bounded & ((width <= 0) | fine) if PIVOT else bounded
            attempt = tl.where(right, 4, attempt + 1)
            if attempt < 4:
                # Infinities are left out from now on. Until then the extremes are not meaningful.
                trusted = (tl.abs(row_low) < _INF) & (tl.abs(row_high) < _INF)
                near = tl.where(trusted, _power(tl.maximum(tl.maximum(-row_low, row_high), 0.0)), 1.0)
                if not DOUBLE:
                    near = tl.minimum(tl.maximum(near, 2.0**-126), 2.0**126)
                better = (ground + above) / zoom * near
                better = tl.where(tl.abs(better) < _INF, better, 0.0)
                pivot = tl.where(trusted, better, pivot.to(tl.float64)).to(FLOAT)
                scale = near.to(FLOAT)
                start = program
                weight = tl.zeros([THREADS], tl.uint64)
                low, high = tl.full([THREADS], _INF, FLOAT), tl.full([THREADS], -_INF, FLOAT)
                zeros = tl.zeros([THREADS], tl.int32)
                finite, nan = zeros, zeros
                drift = tl.zeros([THREADS], tl.float64)
                squares = drift
        else:
            row_weight = tl.sum(weight, 0)
            row_finite = mine
            attempt = 4
    _put(partials, capacity, row, row_finite, row_mean, row_spread, row_low, row_high, row_zeros, row_nan,
         row_inf, row_weight, nothing + _NONE)  # fmt: skip
    if row_nan + row_inf > 0:  # with the row out of the way, for registers
        first = _first_bad(address, base, dims, units, count, program, tiles, programs, DTYPE, ITEM, UNIT, ROW,
                           ALIGNED, DIMENSIONS, WIDE, THREADS, UNROLL)  # fmt: skip
        tl.store(partials + 9 * capacity + row, first)


@triton.jit
def measure(
    address, partials, capacity, first, table, slot, count, base,
    extent0, memory0, logical0, extent1, memory1, logical1, extent2, memory2, logical2, extent3, memory3, logical3,
    extent4, memory4, logical4, extent5, memory5, logical5, extent6, memory6, logical6,
    DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr,
    DIMENSIONS: tl.constexpr, WIDE: tl.constexpr, STATISTICS: tl.constexpr, DOUBLE: tl.constexpr,
    PIVOT: tl.constexpr, PAIRS: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Measure `count` real numbers at `address` and leave one partial row for each program, from row `first` on.

    `base` is the logical index of the first unit, not 0 in a shard. For each dimension, the innermost first, there are
    three words: `layout` says what is in them.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program == 0:
        tl.store(table + 2 * slot, first)
        tl.store(table + 2 * slot + 1, programs.to(tl.int64))
    dims = (
        extent0, memory0, logical0, extent1, memory1, logical1, extent2, memory2, logical2, extent3, memory3, logical3,
        extent4, memory4, logical4, extent5, memory5, logical5, extent6, memory6, logical6,
    )  # fmt: skip
    _measure_part(address, count, base, dims, program, programs, partials, capacity, first + program, DTYPE, ITEM, UNIT,
                  ROW, ALIGNED, DIMENSIONS, WIDE, STATISTICS, DOUBLE, PIVOT, PAIRS, THREADS, UNROLL)  # fmt: skip


@triton.jit
def measure_many(
    listed, partials, capacity, first, table, slot, tensors,
    DTYPE: tl.constexpr, ITEM: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr,
    DIMENSIONS: tl.constexpr, WIDE: tl.constexpr, STATISTICS: tl.constexpr, DOUBLE: tl.constexpr,
    PIVOT: tl.constexpr, PAIRS: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Measure many tensors, each dense and aligned to 16 bytes, with the programs it would have alone.

    The list has four words for a tensor: its address, how many numbers there are, the first of its programs and their
    number. Behind those there is a word for each program: which tensor it is for. Slots are those from `slot` on.
    """
    index = tl.program_id(0)
    tensor = tl.load(listed + 4 * tensors + index)
    entry = listed + 4 * tensor
    address, count, start = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    programs = tl.load(entry + 3).to(tl.int32)
    program = index - start.to(tl.int32)
    if program == 0:
        tl.store(table + 2 * (slot + tensor), first + start)
        tl.store(table + 2 * (slot + tensor) + 1, programs.to(tl.int64))
    _measure_part(address, count, count * 0, (count,), program, programs, partials, capacity, first + index, DTYPE,
                  ITEM, UNIT, ROW, ALIGNED, DIMENSIONS, WIDE, STATISTICS, DOUBLE, PIVOT, PAIRS, THREADS,
                  UNROLL)  # fmt: skip


@triton.jit
def _above(row, capacity, mask, scale, ground):
    """How many finite elements partial rows have, and how far above the ground their scaled mean is."""
    has = tl.load(row, mask, 0).to(tl.float64)
    half = tl.load(row + capacity, mask, 0).to(tl.float64, bitcast=True)
    low = tl.load(row + 3 * capacity, mask, 0).to(tl.float64, bitcast=True)
    return has, tl.where(has > 0, low * scale - ground + 2 * (half * scale), 0.0)


@triton.jit
def merge_rows(partials, capacity, table, results, room, BLOCK: tl.constexpr):
    """Merge the partial rows of slot `program` into row `program` of the results, which have room for `room` rows."""
    slot = tl.program_id(0).to(tl.int64)
    first = tl.load(table + 2 * slot)
    programs = tl.load(table + 2 * slot + 1)
    lane = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], _INF, tl.float64)
    high = tl.full([BLOCK], -_INF, tl.float64)
    finite = tl.zeros([BLOCK], tl.int64)
    zeros, nan, inf, weight = finite, finite, finite, finite
    bad = tl.full([BLOCK], _NONE, tl.int64)
    for start in range(0, programs, BLOCK):
        mask = start + lane < programs
        row = partials + first + start + lane
        has = tl.load(row, mask, 0)
        finite += has
        low = tl.minimum(low, tl.load(row + 3 * capacity, mask, 0x7FF0000000000000).to(tl.float64, bitcast=True))
        high = tl.maximum(high, tl.load(row + 4 * capacity, mask, -0x10000000000000).to(tl.float64, bitcast=True))
        zeros += tl.load(row + 5 * capacity, mask, 0)
        nan += tl.load(row + 6 * capacity, mask, 0)
        inf += tl.load(row + 7 * capacity, mask, 0)
        weight += tl.load(row + 8 * capacity, mask, 0)
        bad = tl.minimum(bad, tl.load(row + 9 * capacity, mask, _NONE))
    least, most, known = tl.min(low, 0), tl.max(high, 0), tl.sum(finite, 0)
    some = tl.maximum(known, 1).to(tl.float64)
    scale = _power(tl.where(known > 0, tl.maximum(tl.maximum(-least, most), 0.0), 0.0))
    ground = tl.where(known > 0, least * scale, 0.0)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        has, above = _above(partials + first + start + lane, capacity, start + lane < programs, scale, ground)
        total += has * above
    middle = tl.sum(total, 0) / some
    left = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        mask = start + lane < programs
        row = partials + first + start + lane
        has, above = _above(row, capacity, mask, scale, ground)
        spread = tl.load(row + 2 * capacity, mask, 0).to(tl.float64, bitcast=True) * scale
        left += spread * spread + has * ((above - middle) * (above - middle))
    _put(results, room, slot, known, (ground + middle) / scale, tl.sqrt(tl.sum(left, 0)) / scale, least, most,
         tl.sum(zeros, 0), tl.sum(nan, 0), tl.sum(inf, 0), tl.sum(weight, 0), tl.min(bad, 0))  # fmt: skip


# --- what the launcher compiles ---

_PAIRED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_DIMENSION = ("extent", "memory", "logical")
_FIRST = {
    "address": "*u8", "partials": "*i64", "capacity": "i64", "first": "i64", "table": "*i64", "slot": "i64",
}  # fmt: skip


class Variant(NamedTuple):
    """What a measuring kernel is compiled for: real numbers of a dtype, a way to walk, how much is done at a time."""

    dtype: str
    unit: int
    row: int
    aligned: bool
    dimensions: int
    wide: bool
    statistics: bool
    warps: int
    unroll: int
    pairs: bool

    @property
    def constants(self) -> dict[str, Any]:
        kind = dtypes.find(self.dtype)
        return {
            "DTYPE": self.dtype,
            "ITEM": kind.itemsize,
            "UNIT": self.unit,
            "ROW": self.row,
            "ALIGNED": self.aligned,
            "DIMENSIONS": self.dimensions,
            "WIDE": self.wide,
            "STATISTICS": self.statistics,
            "DOUBLE": kind.itemsize == 8 or (kind.kind == "int" and kind.itemsize > 1),
            "PIVOT": kind.kind == "float" or kind.itemsize > 1,  # sums and squares of 8-bit integers are exact
            "PAIRS": self.pairs and self.statistics and self.unit == 4 and self.dtype in _PAIRED,
            "THREADS": 32 * self.warps,
            "UNROLL": self.unroll,
        }


@cache
def measure_source(variant: Variant) -> KernelSource:
    """Give `measure` for a variant; equal requests give the same object."""
    names = [f"{name}{each}" for each in range(MOST_DIMENSIONS) for name in _DIMENSION]
    given = 3 * variant.dimensions
    signature = {**_FIRST, "count": "i64", "base": "i64", **dict.fromkeys(names[:given], "i64")}
    return KernelSource(measure, signature, {**dict.fromkeys(names[given:], 0), **variant.constants}, variant.warps)


@cache
def measure_many_source(variant: Variant) -> KernelSource:
    """Give `measure_many` for a variant of dense and aligned tensors; equal requests give the same object."""
    signature = {"listed": "*i64", **dict(list(_FIRST.items())[1:]), "tensors": "i64"}
    return KernelSource(measure_many, signature, variant.constants, variant.warps)


MERGE_ROWS = KernelSource(
    merge_rows,
    {"partials": "*i64", "capacity": "i64", "table": "*i64", "results": "*i64", "room": "i64"},
    {"BLOCK": 256},
)
"""Launched with as many programs as there are slots to merge."""
