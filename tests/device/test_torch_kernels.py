"""Rows made by plain torch operations, against the numpy kernels: every dtype, layout, special value and shard."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from astray.device import torch_kernels
from astray.device.tickets import NONE
from astray.records import Statistics
from astray.stats import DTYPES, ShardPosition, Strided, merge_fingerprints, numpy_kernels
from pairwise import grid

DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]
FLOATS = [name for name in DTYPE_NAMES if DTYPES[name].kind in ("float", "complex")]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "permuted": lambda a: a.reshape(20, -1, 10).permute(2, 0, 1),
    "strided": lambda a: a[::2, 1::3],
    "column": lambda a: a[:, 3],
    "rows": lambda a: a[5:17],
    "block": lambda a: a[3:17, 1:-2],
    "not at a word": lambda a: a.reshape(-1)[1:-2],
    "expanded": lambda a: a[0].expand(7, a.shape[1]),
    "expanded column": lambda a: a[:, :1].expand(a.shape[0], 5),
    "one": lambda a: a[1:2, 1:2],
    "scalar": lambda a: a[1, 1],
    "empty": lambda a: a[:, :0],
}

SHARDS: dict[str, tuple[tuple[slice, ...], ...]] = {
    "rows": ((slice(0, 13), slice(None)), (slice(13, 40), slice(None))),
    "columns": ((slice(None), slice(0, 7)), (slice(None), slice(7, 50))),
    "quarters": tuple((rows, cols) for rows in (slice(0, 9), slice(9, 40)) for cols in (slice(0, 21), slice(21, 50))),
    "middle": ((slice(None), slice(None)),),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tensor takes many."""
    monkeypatch.setattr(torch_kernels, "BLOCK", 64)


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that computes in float32 at best."""
    monkeypatch.setattr(torch_kernels, "widest_float", lambda _: torch.float32)


def make(dtype: str, shape: tuple[int, ...], *, special: bool = False, seed: int = 0) -> torch.Tensor:
    """Random values that the dtype can hold, some zeros, and on request some that are not finite."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    if kind.kind == "complex":
        parts = make(kind.part, (*shape, 2), special=special, seed=seed)
        return torch.view_as_complex(parts)
    if kind.kind == "bool":
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if kind.kind == "int":
        bounds = np.iinfo(kind.storage)
        values = rng.integers(bounds.min, bounds.max, shape, kind.storage, endpoint=True)
        values.reshape(-1)[::5] = 0
        return torch.from_numpy(values)
    values = rng.standard_normal(shape) * 3
    flat = values.reshape(-1)
    flat[::7], flat[::11] = 0.0, -0.0
    if special:
        for value in (np.nan, np.inf, -np.inf):
            flat[rng.random(flat.size) < 0.1] = value
    if dtype == "float8_e8m0fnu":
        values = np.abs(values)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def expected(tensor: torch.Tensor, shard: ShardPosition | None = None) -> tuple[Statistics, int]:
    name = str(tensor.dtype).removeprefix("torch.")
    memory = Strided(tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride())
    statistics, fingerprint = numpy_kernels.measure(memory, True, True, shard)
    assert statistics is not None
    assert fingerprint is not None
    return statistics, fingerprint


def measured(tensor: torch.Tensor, device: str, shard: ShardPosition | None = None) -> tuple[Statistics, int]:
    """The row of a tensor that was put onto the device with its strides, and what it says."""
    row = torch_kernels.measure(put(tensor, device), statistics=True, shard=shard)
    assert (row.shape, row.dtype, row.device.type, row.requires_grad) == ((10,), torch.int64, device, False)
    words = row.cpu().numpy()
    finite, zeros, nan, inf = (int(words[place]) for place in (0, 5, 6, 7))
    mean, spread, low, high = map(float, words[1:5].view(np.float64))
    count, fingerprint = finite + nan + inf, int(words[8:9].view(np.uint64)[0])
    first = (int(words[9]) >> 2, (math.nan, math.inf, -math.inf)[int(words[9]) & 3]) if nan + inf else (None, None)
    assert nan + inf or int(words[9]) == NONE
    if not finite:
        assert (mean, spread, low, high) == (0.0, 0.0, math.inf, -math.inf)
        return Statistics(None, None, None, None, None, None, zeros, nan, inf, count, *first), fingerprint
    std, l2 = spread / math.sqrt(finite), math.hypot(spread, math.sqrt(finite) * mean)
    absmax = max(-low, high, 0.0)
    return Statistics(low + 0.0, high + 0.0, mean, std, l2, absmax, zeros, nan, inf, count, *first), fingerprint


def put(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same memory on the device, whatever of it the tensor shows."""
    if tensor.is_complex():  # torch warns of complex32 that is made, though not of a view
        return torch.view_as_complex(put(torch.view_as_real(tensor), device))
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(device).untyped_storage()
    there = torch.empty(0, dtype=tensor.dtype, device=device)
    return there.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def check(tensor: torch.Tensor, device: str, shard: ShardPosition | None = None, *, rel: float = 1e-12) -> int:
    """Compare with the numpy kernels: all but mean, std and norm exactly. Gives the fingerprint."""
    (reference, mark), (result, found) = expected(tensor, shard), measured(tensor, device, shard)
    assert found == mark
    assert result[6:] == reference[6:]
    if reference.mean is None:
        assert result == reference
        return found
    assert (result.min, result.max, result.absmax) == (reference.min, reference.max, reference.absmax)
    assert reference.std is not None
    typical = math.hypot(reference.mean, reference.std)
    assert result.mean == pytest.approx(reference.mean, rel=rel, abs=rel / 10 * typical)  # a sum may cancel
    assert result.std == pytest.approx(reference.std, rel=rel, abs=rel / 1000 * typical)
    assert result.l2 == pytest.approx(reference.l2, rel=rel, abs=0.0)
    return found


@grid(dtype=DTYPE_NAMES, layout=LAYOUTS, block=[torch_kernels.BLOCK, 64], special=[False, True])
def test_every_dtype_in_every_layout(
    dtype: str, layout: str, block: int, special: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", block)  # with the smaller one a small tensor has many blocks
    check(LAYOUTS[layout](make(dtype, (40, 50), special=special)), device)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "not at a word"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_counted_and_left_out(dtype: str, layout: str, device: str) -> None:
    check(LAYOUTS[layout](make(dtype, (40, 150), special=True)), device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_larger_than_a_block(dtype: str, device: str) -> None:
    tensor = make(dtype, (3, torch_kernels.BLOCK // 2 + 1))
    check(tensor, device)
    check(tensor.T, device)
    check(tensor[:, 1:], device)


@grid(
    dtype=["float32", "float64", "bfloat16", "int8", "complex64", "complex32"],
    cut=SHARDS,
    blocks=[torch_kernels.BLOCK, 64],
)
def test_shards_add_up_to_the_whole(
    dtype: str, cut: str, blocks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", blocks)
    whole = make(dtype, (40, 50), special=True)
    marks = []
    for rows, columns in SHARDS[cut]:
        part = whole[rows, columns]
        marks.append(check(part, device, ShardPosition((rows.start or 0, columns.start or 0), (40, 50))))
    assert merge_fingerprints(marks) == check(whole, device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "float64", "complex64"])
@pytest.mark.parametrize(
    "shard",
    [
        ShardPosition((0, 0, 0), (2, 3, 5)),
        ShardPosition((4, 0, 0), (9, 3, 5)),
        ShardPosition((4, 1, 0), (9, 7, 5)),
        ShardPosition((0, 0, 2), (2, 3, 8)),
        ShardPosition((1, 2, 3), (4, 6, 9)),
        ShardPosition((1 << 20, 1 << 10, 5), (1 << 21, 1 << 11, 1 << 12)),
    ],
)
def test_a_shard_anywhere_in_a_tensor(dtype: str, shard: ShardPosition, device: str) -> None:
    """The last of them lies beyond the first 2³² words."""
    check(make(dtype, (2, 3, 5), special=True), device, shard)


def test_a_shard_of_a_scalar_and_of_nothing(device: str) -> None:
    number = make("float32", (1,), seed=1)[0]
    assert measured(number, device, ShardPosition((), ())) == measured(number, device)
    check(make("float32", (0, 4)), device, ShardPosition((3, 0), (3, 4)))


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0],
        [math.nan],
        [math.inf, -math.inf, math.nan],
        [math.nan, 3.0],
        [math.inf, 0.0, 1.0],
        [5e-324],
        [5e-324, 0.0, -5e-324],
        [1e-310, 2e-310],
        [1e-300, 3e-300, math.nan],
        [1e300, -1e300, 5e299],
        [1e307, 1e-308, 0.0],
        [1e200, math.inf, -1e200],
        [2.0] * 100,
        [0.1] * 100,
        [1e6 + 1e-3, 1e6 - 1e-3, 1e6],
    ],
)
@pytest.mark.parametrize("block", [torch_kernels.BLOCK, 4])
def test_values_at_the_edges(values: list[float], block: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", block)
    check(torch.tensor(values * 5, dtype=torch.float64), device)
    check(torch.tensor(values, dtype=torch.float64).to(torch.float32), device)


@pytest.mark.parametrize("block", [torch_kernels.BLOCK, 4])
def test_a_spread_beyond_float64_is_infinite_and_nothing_else_suffers(
    block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", block)
    tensor = torch.tensor([1.5e308, -1.5e308, 1.5e308, math.nan] * 5, dtype=torch.float64)
    result, _ = measured(tensor, device)
    assert result.mean == pytest.approx(0.5e308, rel=1e-12)
    assert (result.min, result.max, result.std, result.l2) == (-1.5e308, 1.5e308, math.inf, math.inf)
    assert (result.zeros, result.nan, result.inf, result.count) == (0, 5, 0, 20)


@pytest.mark.parametrize(("mean", "std"), [(1000.0, 1.0), (1e6, 1e-3), (-1e6, 1e-3), (1e30, 1e28), (1e-30, 1e-32)])
def test_a_large_mean_does_not_drown_the_spread(mean: float, std: float, device: str) -> None:
    values = mean + std * np.random.default_rng(0).standard_normal(300_000)
    tensor = torch.from_numpy(values)
    check(tensor, device, rel=1e-11 if std / abs(mean) < 1e-6 else 1e-12)


@pytest.mark.parametrize("dtype", ["uint64", "int64", "uint32", "uint16"])
def test_integers_at_their_ends(dtype: str, device: str) -> None:
    bounds = np.iinfo(dtype)
    near = [bounds.min, bounds.max, bounds.max // 2, bounds.max // 2 + 1, bounds.max // 2 + 1025, bounds.max - 1024, 0]
    check(torch.from_numpy(np.array(near, dtype)), device)


@pytest.mark.parametrize("dtype", [name for name in DTYPE_NAMES if DTYPES[name].itemsize == 1])
def test_every_pattern_of_eight_bits(dtype: str, device: str) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    check(patterns.view(getattr(torch, dtype)), device)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_fingerprint_alone(dtype: str, device: str) -> None:
    tensor = make(dtype, (40, 50)).T
    words = torch_kernels.measure(put(tensor, device), statistics=False, shard=None).cpu().numpy()
    elements = 4000 if tensor.is_complex() else 2000
    assert words.tolist()[:8] == [elements, 0, 0, 0, 0, 0, 0, 0]
    assert int(words[8:9].view(np.uint64)[0]) == expected(tensor)[1]
    assert words[9] == NONE


@pytest.mark.usefixtures("no_float64")
@pytest.mark.parametrize("block", [torch_kernels.BLOCK, 256])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"]
)
def test_without_float64(dtype: str, block: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", block)
    check(make(dtype, (400, 50), special=True), device, rel=1e-6)


@pytest.mark.usefixtures("no_float64")
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0, 0.0],
        [math.inf, math.nan],
        [1e-45],
        [1e-39, 2e-39],
        [-1e-31, 1e-30],
        [3e38, -1e38, 0.0],
        [-3.4e38, 0.0] * 500,
        [1e-45, -1e-45, 3e-45],
        [1e6, 1e6 + 1],
    ],
)
def test_values_at_the_edges_without_float64(values: list[float], device: str) -> None:
    check(torch.tensor(values, dtype=torch.float32), device, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_no_bit_of_the_tensor_changes(dtype: str, device: str) -> None:
    tensor = put(make(dtype, (40, 50), special=True), device)
    before = tensor.view(torch.uint8).clone()
    torch_kernels.measure(tensor, statistics=True)
    assert torch.equal(tensor.view(torch.uint8), before)


def test_the_program_does_not_notice(device: str) -> None:
    """Neither autograd, nor the random numbers, nor the tensor; whatever precision is asked for around it."""
    tensor = put(make("float32", (40, 50)), device).requires_grad_()
    tensor.sum().backward()
    before, version = tensor.detach().clone(), tensor._version
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(3)
    plain = torch_kernels.measure(tensor, statistics=True)
    with torch.autocast(device, torch.bfloat16), torch.inference_mode():
        assert torch.equal(torch_kernels.measure(tensor, statistics=True), plain)
    assert torch.equal(torch.rand(4, device=device), wanted)
    assert torch.equal(tensor, before)
    assert tensor._version == version


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """torch raises at whatever would."""
    tensors = [put(make(dtype, (40, 50)), "cuda") for dtype in DTYPE_NAMES]
    whole = [torch_kernels.measure(tensor, statistics=True) for tensor in tensors]  # the tables are made once
    with warnings.catch_warnings():  # that it may overlook something
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for tensor, row in zip(tensors, whole, strict=True):
            again = torch_kernels.measure(tensor, statistics=True)
            torch_kernels.measure(tensor, statistics=False, shard=ShardPosition((3, 4), (50, 60)))
            row -= again
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(bool(row.any()) for row in whole)
