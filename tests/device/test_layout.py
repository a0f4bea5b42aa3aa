"""Plans walked in plain Python: every element is read once, at its address, with its logical index."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch

from astray.device import layout
from astray.device.layout import MemoryWalk, Tuning, walk
from astray.stats import DTYPES, ShardPosition

VIEWS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "heads": lambda a: a.reshape(2, 5, 3, 2, 16)[:, :, 1].permute(0, 2, 1, 3),
    "permuted": lambda a: a.reshape(20, -1, 8).permute(2, 0, 1),
    "strided": lambda a: a[::2, 1::3],
    "column": lambda a: a[:, 3],
    "block": lambda a: a[3:17, 4:-4],
    "odd block": lambda a: a[3:17, 1:-2],
    "odd start": lambda a: a.reshape(-1)[1:],
    "expanded": lambda a: a[:, None].expand(20, 3, 48),
    "expanded inside": lambda a: a[..., None].expand(20, 48, 3),
    "expanded scalar": lambda a: a[3, 7].expand(9, 11),
    "scalar": lambda a: a[1, 1],
    "empty": lambda a: a[:0],
    "six dimensions": lambda a: a.reshape(2, 2, 5, 2, 3, 8)[:, :, :3, :, :2, :5].permute(5, 3, 1, 0, 2, 4),
}


def walked(way: MemoryWalk, item: int) -> list[tuple[int, int]]:
    """The places of the elements in memory and in logical order, as the kernel finds them; both in elements."""
    count, base, *packed = way.arguments
    each = way.unit // item
    if way.dimensions == 0:
        return [(place, base * each + place) for place in range(count)]
    places = []
    for row in range(way.units // way.row):
        memory, logical, rest = 0, base, row
        for at in range(way.dimensions):
            extent, step, index = packed[3 * at : 3 * at + 3]
            if way.wide:
                quotient, size = rest // extent, extent
            else:
                size, factor, shift, index = extent >> 32, extent & 0xFFFFFFFF, index >> 32, index & 0xFFFFFFFF
                quotient = ((rest * factor >> 32) + rest) >> shift
            here = rest if at == way.dimensions - 1 else rest - quotient * size
            memory, logical, rest = memory + here * step, logical + here * index, quotient
        first, second = packed[1] // way.row, (packed[2] if way.wide else packed[2] & 0xFFFFFFFF) // way.row
        places += [
            ((memory + unit * first) * each + part, (logical + unit * second) * each + part)
            for unit in range(way.row)
            for part in range(each)
        ]
    return places


def expected(view: torch.Tensor, shard: ShardPosition | None) -> list[tuple[int, int]]:
    offset, whole = shard or ((0,) * view.dim(), tuple(view.shape))
    places = []
    for index in product(*map(range, view.shape)):
        logical = 0
        for first, here, size in zip(offset, index, whole, strict=True):
            logical = logical * size + first + here
        places.append((sum(here * step for here, step in zip(index, view.stride(), strict=True)), logical))
    return sorted(places)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", VIEWS)
def test_every_element_is_read_once(name: str, dtype: str) -> None:
    view = VIEWS[name](torch.empty(20, 48, dtype=getattr(torch, dtype)))
    shards = [None, ShardPosition((0,) * view.dim(), tuple(size + 3 for size in view.shape))]
    shards.append(ShardPosition((1,) * view.dim(), tuple(size + 1 for size in view.shape)))
    for shard in shards:
        way = walk(view.shape, view.stride(), dtype, view.storage_offset() * view.element_size(), shard)
        assert sorted(walked(way, view.element_size())) == expected(view, shard)
        if way.aligned:
            assert way.unit * way.row == 16


def test_a_complex_number_is_two_real_ones() -> None:
    view = torch.empty(6, 4, dtype=torch.complex64).T
    pairs = torch.view_as_real(view)
    way = walk(view.shape, view.stride(), "complex64", 0)
    assert way == walk(pairs.shape, pairs.stride(), "float32", 0)
    assert sorted(walked(way, 4)) == expected(pairs, None)


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "address", "unit", "row", "aligned", "dimensions"),
    [
        ((1000,), (1,), "bfloat16", 0, 4, 4, True, 0),
        ((1000,), (1,), "bfloat16", 4, 4, 4, False, 0),
        ((1000,), (1,), "bfloat16", 2, 2, 8, False, 1),
        ((10, 10, 10), (100, 10, 1), "float64", 16, 8, 2, True, 0),
        ((8, 16, 128, 64), (128 * 3072, 64, 3072, 1), "bfloat16", 0, 4, 4, True, 4),
        ((8, 16, 128, 63), (128 * 3072, 64, 3072, 1), "bfloat16", 0, 2, 1, False, 4),
        ((512, 256), (1, 512), "bfloat16", 0, 2, 8, True, 2),
        ((512, 256), (1, 512), "float32", 0, 4, 4, True, 2),
        ((8, 16, 64, 64), (4096, 0, 64, 1), "float32", 0, 4, 4, True, 4),
        ((), (), "float32", 4, 4, 4, False, 0),
    ],
)
def test_memory_is_read_in_the_largest_pieces(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, address: int, unit: int, row: int, aligned: bool,
    dimensions: int,
) -> None:  # fmt: skip
    way = walk(shape, stride, dtype, address)
    assert (way.unit, way.row, way.aligned, way.dimensions) == (unit, row, aligned, dimensions)


def test_indices_are_wide_where_32_bits_do_not_suffice() -> None:
    assert not walk((1 << 32,), (1,), "float32", 0).wide
    assert walk(((1 << 32) + 1,), (1,), "float32", 0).wide
    assert walk((1 << 31,), (1,), "float64", 0).wide is False
    assert walk(((1 << 31) + 1,), (1,), "float64", 0).wide
    assert walk((10,), (1,), "float32", 0, ShardPosition((1 << 32,), (1 << 33,))).wide
    assert walk((2, 1000), (1 << 31, 1), "float32", 0).wide
    assert not walk((2, 1000), (1 << 30, 1), "float32", 0).wide
    assert walk((1 << 15, 1 << 16), (0, 1), "float32", 0).wide
    assert not walk((1 << 15, 1 << 16), (0, 1), "bfloat16", 0).wide
    assert walk((4, 4), (4, 1), "float32", 0, ShardPosition((1 << 20, 0), (1 << 21, 1 << 11))).wide


def test_what_cannot_be_walked_is_refused() -> None:
    with pytest.raises(ValueError, match="not aligned to its 4 bytes"):
        walk((4,), (1,), "float32", 2)
    with pytest.raises(ValueError, match="walk backwards"):
        walk((4,), (-1,), "float32", 0)
    with pytest.raises(ValueError, match="leave 8 dimensions"):
        walk((2,) * 8, tuple(3**step for step in range(8, 0, -1)), "float32", 0)
    with pytest.raises(ValueError, match="Unknown dtype"):
        walk((4,), (1,), "float24", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_are_as_many_as_there_is_work_for(dtype: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    tuning = Tuning(warps=1, unroll=1, programs=2)
    tile = 512 // DTYPES[dtype].itemsize
    programs = [layout.plan((n,), (1,), dtype, 0, processors=3, tuning=tuning).programs for n in (0, 1, tile, tile + 1)]
    assert programs == [1, 1, 1, 2]
    assert layout.plan((1 << 20,), (1,), dtype, 0, processors=3, tuning=tuning).programs == 6


def test_plans_of_one_kernel_share_its_source() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    one = layout.plan((1000,), (1,), "bfloat16", 0x7F0000000000)
    assert layout.plan((50, 20), (20, 1), "bfloat16", 0x10).source is one.source
    assert layout.plan((1000,), (1,), "bfloat16", 0x7F0000000020) is one
    assert layout.plan((1000,), (1,), "bfloat16", 4).source is not one.source
    assert layout.plan((1000,), (1,), "bfloat16", 0, statistics=False).source is not one.source
    assert len(one.arguments) + 6 == len(one.source.signature)


def test_neither_torch_nor_triton_is_needed_to_lay_out() -> None:
    code = "import sys; sys.modules['triton'] = sys.modules['torch'] = None; import astray.device.layout as l; "
    code += "print(l.walk((4, 4), (1, 4), 'float32', 0).dimensions)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "2\n"
