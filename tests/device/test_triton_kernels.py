"""The Triton kernels against the numpy kernels: every dtype, layout, special value, size of numbers and shard.

Without a GPU they run in Triton's interpreter: tiles are small there, so that small tensors have many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_uint8 as _BYTE
from typing import Any

import numpy as np
import pytest
import torch

from astray.device import launcher, layout
from astray.device.layout import Tuning
from astray.device.tickets import NONE, measurements
from astray.records import Statistics
from astray.stats import DTYPES, ShardPosition, Strided, merge_fingerprints, numpy_kernels
from pairwise import grid

from .interpreted import WIDTH, Card, Interpreter, Machine, Part, address, aligned

pytest.importorskip("triton", reason="Triton is not installed")

SMALL = Tuning(warps=1, unroll=1, programs=1)  # tiles of 512 bytes
DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]
FLOATS = [name for name in DTYPE_NAMES if DTYPES[name].kind == "float"]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "permuted": lambda a: a.reshape(20, -1, 8).permute(2, 0, 1),
    "heads": lambda a: a.reshape(2, 5, 3, 2, 16)[:, :, 1].permute(0, 2, 1, 3),
    "heads, elementwise": lambda a: a.reshape(2, 5, 3, 2, 16)[..., 1:10].permute(0, 3, 1, 2, 4),
    "strided": lambda a: a[::2, 1::3],
    "column": lambda a: a[:, 3],
    "rows": lambda a: a[5:17],
    "block": lambda a: a[3:17, 4:-4],
    "odd block": lambda a: a[3:17, 1:-2],
    "not at a word": lambda a: a.reshape(-1)[1:-2],
    "not at 16 bytes": lambda a: a.reshape(-1)[4:],
    "expanded": lambda a: a[0].expand(7, a.shape[1]),
    "expanded column": lambda a: a[:, :1].expand(a.shape[0], 5),
    "expanded scalar": lambda a: a[3, 7].expand(9, 11),
    "seven dimensions": lambda a: a.reshape(2, 2, 2, 5, 2, 3, 4)[:, :, :, :3, :, :2, :3].permute(6, 4, 2, 0, 1, 3, 5),
    "one": lambda a: a[1:2, 1:2],
    "scalar": lambda a: a[1, 1],
    "empty": lambda a: a[:, :0],
}

SHARDS: dict[str, list[tuple[slice, slice]]] = {
    "rows": [(slice(0, 13), slice(None)), (slice(13, 20), slice(None))],
    "columns": [(slice(None), slice(0, 7)), (slice(None), slice(7, 48))],
    "quarters": [(rows, cols) for rows in (slice(0, 9), slice(9, 20)) for cols in (slice(0, 20), slice(20, 48))],
}


@pytest.fixture(
    scope="module", params=["interpreter", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("cuda", "pairs"))]
)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param != "interpreter":
        if request.param == "pairs" and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("this device has no instructions for two 16-bit floats")
        yield Card(request.param == "pairs")
        return
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def tensor(dtype: str, shape: tuple[int, ...] = (20, 48), *, seed: int = 0) -> torch.Tensor:
    """Random numbers of a dtype, some of them zero; any bits for integers."""
    rng, kind, count = np.random.default_rng(seed), DTYPES[dtype], math.prod(shape)
    if kind.kind in ("int", "bool"):
        raw = rng.integers(0, 2 if kind.kind == "bool" else 256, count * kind.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)
    values = rng.normal(1.0, 2.0, (*shape, 2) if kind.kind == "complex" else shape)
    values[rng.random(values.shape) < 0.1] = 0
    parts = torch.from_numpy(values).to(getattr(torch, kind.part))
    return parts.view(getattr(torch, dtype)).reshape(shape) if kind.kind == "complex" else parts


def measure(machine: Machine, views: list[torch.Tensor], dtype: str, **more: Any) -> list[tuple[Statistics, int]]:
    """What the kernels find of views of one storage."""
    storage = views[0].untyped_storage()
    memory = aligned(max(storage.nbytes(), 1))
    memory[: storage.nbytes()] = np.ctypeslib.as_array((_BYTE * storage.nbytes()).from_address(storage.data_ptr()))
    more = {"processors": 2, "pairs": machine.pairs, "tuning": SMALL, **more}
    parts = [
        Part(view.storage_offset() * view.element_size(), dtype, tuple(view.shape), view.stride(), more)
        for view in views
    ]
    return found(machine.measure(memory, parts))


def found(rows: np.ndarray) -> list[tuple[Statistics, int]]:
    measured = measurements(rows)
    return [measured.at(each) for each in range(rows.shape[1])]


def expected(view: torch.Tensor, dtype: str, shard: ShardPosition | None = None) -> tuple[Statistics, int]:
    place = Strided(view.data_ptr(), dtype, tuple(view.shape), view.stride())
    statistics, fingerprint = numpy_kernels.measure(place, True, True, shard)
    assert statistics is not None
    assert fingerprint is not None
    return statistics, fingerprint


def check(result: tuple[Statistics, int], wanted: tuple[Statistics, int], dtype: str) -> None:
    (got, fingerprint), (want, right) = result, wanted
    assert hex(fingerprint) == hex(right)
    assert got[6:] == want[6:]  # the counts, and the first element that is not finite
    assert (got.min, got.max, got.absmax) == (want.min, want.max, want.absmax)
    if want.mean is None or want.std is None:
        assert (got.mean, got.std, got.l2) == (None, None, None)
        return
    kind = DTYPES[dtype]
    precision = 1e-6 if kind.kind in ("float", "complex") and DTYPES[kind.part].itemsize <= 4 else 1e-12
    assert got.mean == pytest.approx(want.mean, rel=precision, abs=precision * want.std)
    assert got.std == pytest.approx(want.std, rel=precision, abs=0)
    assert got.l2 == pytest.approx(want.l2, rel=precision, abs=0)


def slow_but(names: Iterable[str], *quick: str) -> list[Any]:
    """The interpreter takes seconds for each of these: all but a few are for CI."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("dtype", slow_but(DTYPE_NAMES, "bfloat16", "int64"))
def test_every_dtype_in_every_layout(machine: Machine, dtype: str) -> None:
    whole = tensor(dtype)
    # How memory is walked depends on the size of an element alone, and the interpreter is slow.
    names = LAYOUTS if dtype in ("uint8", "bfloat16", "float32", "complex128") else ("contiguous", "odd block", "heads")
    views = [LAYOUTS[name](whole) for name in names]
    for view, result in zip(views, measure(machine, views, dtype), strict=True):
        check(result, expected(view, dtype), dtype)


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float8_e5m2", "bfloat16", "complex32", "float32"])
def test_the_last_word_may_be_cut_short(machine: Machine, dtype: str) -> None:
    whole = tensor(dtype, (600,))
    views = [whole[:count] for count in (1, 2, 3, 514, 597)]
    for view, result in zip(views, measure(machine, views, dtype), strict=True):
        check(result, expected(view, dtype), dtype)


@pytest.mark.parametrize(
    "dtype", slow_but(FLOATS, "bfloat16", "float64", *(name for name in FLOATS if "float8" in name))
)
def test_nan_and_infinity_poison_nothing(machine: Machine, dtype: str) -> None:
    whole = tensor(dtype, (1200,))
    bits = whole.view(getattr(torch, f"uint{8 * whole.element_size()}"))
    kind = DTYPES[dtype]
    special = torch.tensor([math.nan, math.inf, -math.inf, kind.tiny, -kind.max, kind.max], dtype=torch.float64)
    odd = special.to(whole.dtype)[: 6 if kind.itemsize < 8 else 3].view(bits.dtype)
    bits[7 : 7 + 5 * odd.numel() : 5] = odd
    bits[1150 : 1150 + odd.numel()] = odd
    views = [whole, whole[7:8], whole[1::2], whole[200:1000]]
    for view, result in zip(views, measure(machine, views, dtype), strict=True):
        check(result, expected(view, dtype), dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 3.3])
def test_a_tensor_of_one_value(machine: Machine, value: float) -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        whole = torch.full((501,), value, dtype=getattr(torch, dtype))
        (result,) = measure(machine, [whole], dtype)
        check(result, expected(whole, dtype), dtype)


BAD_LAYOUTS = ("transposed", "heads", "odd block", "not at a word", "expanded")


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16", "float8_e5m2", "float64", "complex64"], "bfloat16"))
def test_the_first_bad_element_in_logical_order(machine: Machine, dtype: str) -> None:
    whole = tensor(dtype)
    numbers = torch.view_as_real(whole) if whole.is_complex() else whole
    for at, value in ((911, math.nan), (433, -math.inf), (97, math.inf), (13, math.nan)):
        numbers.view(-1)[at] = value  # early in one order, late in another
    views = [LAYOUTS[name](whole) for name in BAD_LAYOUTS]
    found_bad = []
    for view, result in zip(views, measure(machine, views, dtype), strict=True):
        check(result, expected(view, dtype), dtype)
        found_bad.append(result[0].first_bad)
    assert len({*found_bad}) > 2  # the layouts tell different elements


def test_the_first_bad_element_of_a_shard_counts_in_the_whole(machine: Machine) -> None:
    whole = tensor("bfloat16")
    whole[5, 9], whole[16, 30] = -math.inf, math.nan
    for rows, cols in SHARDS["quarters"]:
        shard = ShardPosition((rows.start or 0, cols.start or 0), tuple(whole.shape))
        (result,) = measure(machine, [whole[rows, cols]], "bfloat16", shard=shard)
        check(result, expected(whole[rows, cols], "bfloat16", shard), "bfloat16")
        known = {(0, 0): (5 * 48 + 9, -math.inf), (9, 20): (16 * 48 + 30, math.nan)}
        assert result[0][10:] == known.get(shard.offset, (None, None))


SIZES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "mean 1000, std 1": ("float32", lambda x: 1000 + x),
    "mean 1e6, std 1": ("float32", lambda x: 1e6 + x),
    "gradients of 1e-25": ("float32", lambda x: 1e-25 * x),
    "subnormal": ("float32", lambda x: 1e-41 * x),
    "half precision, subnormal": ("float16", lambda x: 3e-7 * x),
    "bfloat16, subnormal": ("bfloat16", lambda x: 1e-39 * x),
    "nearly too large": ("float32", lambda x: 5e37 * x),
    "large": ("bfloat16", lambda x: 1e20 * x),
    "one outlier": ("float32", lambda x: np.where(np.arange(x.size) == 3, 1e8, x)),
    "outliers wherever a thread begins": ("float32", lambda x: np.where(np.arange(x.size) < 200, 1e7 + 1e5 * x, x)),
    "very small beside large": ("float32", lambda x: np.where(np.arange(x.size) % 9 == 0, x, 1e-30 * x)),
    "squares overflow float64": ("float64", lambda x: 1e300 * x),
    "squares vanish in float64": ("float64", lambda x: 1e-300 * x),
    "subnormal in float64": ("float64", lambda x: 1e-310 * x),
    "mean 1e8, std 1e-3": ("float64", lambda x: 1e8 + 1e-3 * x),
    "a mask with few holes": ("bool", lambda x: np.arange(x.size) != 777),
    "small integers, close": ("uint8", lambda x: np.round(200 + x / 2)),
    "large integers": ("int64", lambda x: 1e15 + 1e3 * x),
}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_any_size(machine: Machine, name: str) -> None:
    dtype, make = SIZES[name]
    values = make(np.random.default_rng(1).normal(0.0, 1.0, 1200))
    whole = torch.from_numpy(values).to(getattr(torch, dtype))
    views = [whole, whole[:70]]
    for view, result in zip(views, measure(machine, views, dtype), strict=True):
        check(result, expected(view, dtype), dtype)


@pytest.mark.parametrize("cut", slow_but(SHARDS, "rows"))
def test_fingerprints_of_shards_add_up(machine: Machine, cut: str) -> None:
    for dtype in ("uint8", "bfloat16", "float32", "float64", "complex64"):
        whole = tensor(dtype)
        parts = []
        for rows, cols in SHARDS[cut]:
            view = whole[rows, cols]
            shard = ShardPosition((rows.start or 0, cols.start or 0), tuple(whole.shape))
            (result,) = measure(machine, [view], dtype, shard=shard)
            check(result, expected(view, dtype, shard), dtype)
            parts.append(result[1])
        assert merge_fingerprints(parts) == expected(whole, dtype)[1]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
def test_indices_beyond_32_bits(machine: Machine, dtype: str) -> None:
    whole = tensor(dtype, (200, 4))
    for view, shard in [
        (whole, ShardPosition((1 << 33, 0), (1 << 34, 4))),
        (whole, ShardPosition(((1 << 32) - 100, 0), (1 << 34, 4))),
        (whole[:, 1:3], ShardPosition(((1 << 35) - 1, 1), (1 << 36, 4))),
        (whole[:100].T, ShardPosition((0, 1 << 33), (4, 1 << 34))),
    ]:
        (result,) = measure(machine, [view], dtype, shard=shard)
        check(result, expected(view, dtype, shard), dtype)


def test_a_fingerprint_alone(machine: Machine) -> None:
    for dtype in ("int8", "bfloat16", "float32", "complex128"):
        whole = tensor(dtype)
        views = [whole, whole.reshape(-1)[:1001], whole.T, whole[:, 1:9], whole[:0]]
        for view, (statistics, fingerprint) in zip(
            views, measure(machine, views, dtype, statistics=False), strict=True
        ):
            assert hex(fingerprint) == hex(expected(view, dtype)[1])
            assert statistics.count == view.numel() * (2 if view.is_complex() else 1)
            assert (statistics.zeros, statistics.nan, statistics.inf) == (0, 0, 0)


def test_the_same_bits_again_and_the_fingerprint_whatever_the_tiles(machine: Machine) -> None:
    whole = tensor("float32", (3000,))
    first, again = (measure(machine, [whole], "float32") for _ in range(2))
    assert first == again
    for tuning in (Tuning(2, 1, 4), Tuning(1, 4, 2)):
        (result,) = measure(machine, [whole], "float32", tuning=tuning)
        check(result, expected(whole, "float32"), "float32")


def partial_rows(values: np.ndarray) -> np.ndarray:
    """The partial rows of programs that had a line of `values` each, by the definition: half the mean above the low."""
    rows = np.zeros((WIDTH, len(values)), np.int64)
    for program, line in enumerate(values):
        finite = line[np.isfinite(line)]
        scale = np.abs(finite).max(initial=0.0) or 1.0
        low, high = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        above = (finite - low) / scale
        half = above.mean() / 2 * scale if finite.size else 0.0
        spread = math.sqrt(((above - above.mean()) ** 2).sum()) * scale if finite.size else 0.0
        floats = np.array([half, spread, low, high])
        rows[1:5, program] = floats.view(np.int64)
        rows[[0, 5, 6, 7], program] = finite.size, (line == 0).sum(), np.isnan(line).sum(), np.isinf(line).sum()
        bad = np.flatnonzero(~np.isfinite(line))
        rows[9, program] = NONE
        if bad.size:
            kind = 0 if np.isnan(line[bad[0]]) else 1 if line[bad[0]] > 0 else 2
            rows[9, program] = (program * line.size + bad[0]) * 4 + kind
        rows[8, program] = np.array([(program * 0x9E3779B97F4A7C15) % (1 << 64)], np.uint64).view(np.int64)[0]
    return rows


def test_partial_rows_are_merged(machine: Machine) -> None:
    rng = np.random.default_rng(2)
    tensors = [
        rng.normal(1e6, 1.0, (600, 16)),  # more programs than are merged at once
        rng.normal(0.0, 1e300, (300, 16)),
        rng.normal(0.0, 1e-300, (3, 16)),
        np.where(rng.random((40, 8)) < 0.9, math.nan, 1.0) * rng.normal(0.0, 1.0, (40, 8)),
        np.full((2, 8), -math.inf),
        np.full((3, 8), 0.1),
        np.zeros((1, 0)),
        rng.normal(5.0, 1.0, (1, 100)),
    ]
    results = found(machine.merge_rows([partial_rows(values) for values in tensors]))
    for values, result in zip(tensors, results, strict=True):
        flat = np.ascontiguousarray(values.reshape(-1))
        place = Strided(address(flat), "float64", flat.shape, (1,))
        statistics = numpy_kernels.measure(place, True, False, None).statistics
        assert statistics is not None
        fingerprint = merge_fingerprints(program * 0x9E3779B97F4A7C15 for program in range(len(values)))
        check(result, (statistics, fingerprint), "float64")


VARIANTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "dense": ((1 << 20,), (1,), 0),
    "heads": ((8, 16, 128, 64), (128 * 3072, 64, 3072, 1), 0),
    "elementwise": ((100, 100), (201, 2), 0),
    "seven dimensions": ((2,) * 7, tuple(3**step for step in range(7, 0, -1)), 0),
    "wide": ((2, 1000), (1 << 33, 3), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_they_compile_for_a_card_that_is_not_here(variant: str) -> None:
    from triton.backends.compiler import GPUTarget

    shape, stride, start = VARIANTS[variant]
    for dtype in DTYPE_NAMES if variant == "dense" else ("uint8", "bfloat16", "float32", "float64"):
        source = layout.plan(shape, stride, dtype, start, pairs=True).source
        code = launcher.compile_for(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert ".ftz" not in code  # subnormal numbers are not flushed
        if variant in ("dense", "heads"):
            assert re.search(r"ld\.global\.v(4\.b32|2\.b64)", code), dtype  # 16 bytes at once


@grid(dtype=["float32", "bfloat16", "float8_e5m2", "int64", "complex64", "bool"], statistics=[True, False], pairs=False)
def test_tensors_measured_together_have_the_rows_they_have_alone(
    machine: Machine, dtype: str, statistics: bool
) -> None:
    sizes = [1, 7, 130, 513, 3]
    item = DTYPES[dtype].itemsize
    starts = np.cumsum([0, *(-(-size * item // 16) * 16 + 16 for size in sizes)])
    memory = aligned(int(starts[-1]))
    for start, size, seed in zip(starts, sizes, range(5), strict=False):
        view, nbytes = tensor(dtype, (size,), seed=seed), size * item
        memory[start : start + nbytes] = np.ctypeslib.as_array((_BYTE * nbytes).from_address(view.data_ptr()))
    more = {"processors": 2, "pairs": machine.pairs, "statistics": statistics, "tuning": SMALL}
    places = [(int(start), size) for start, size in zip(starts, sizes, strict=False)]
    alone = machine.measure(memory, [Part(start, dtype, (size,), (1,), more) for start, size in places])
    np.testing.assert_array_equal(machine.measure_together(memory, dtype, places, more), alone)


def test_what_cannot_be_measured_together_is_refused() -> None:
    for address_, count in ((8, 4), (16, 0), (16, 2**33)):
        with pytest.raises(ValueError, match="not measured together"):
            layout.plan_many([(0, 4), (address_, count)], "float32")
