"""Values block by block, and which index each of them has."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from astray.comparison.measure.evidence import ALL_VALUES, KeptSelection
from astray.errors import RunError
from astray.stats import dtypes
from astray.store import open_run
from astray.web.elements import BLOCK, Elements, blocks
from astray.web.pair_values import compare_values
from record_builders import Builder


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4), (5, 1, 6), (3, 9), (2, 2, 2, 2), (4, 0, 3), (1, 1)])
@pytest.mark.parametrize("most", [1, 3, 5, 8, 1000])
def test_blocks_make_up_the_tensor_in_order(shape: tuple[int, ...], most: int):
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    found = list(blocks(shape, most))
    assert all(block.size <= max(most, 1) for block in found)
    cut = [
        whole[tuple(slice(at, at + length) for at, length in zip(block.origin, block.shape, strict=True))].reshape(-1)
        for block in found
    ]
    assert np.concatenate([np.empty(0, int), *cut]).tolist() == whole.reshape(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool", "complex64"])
def test_numbers_come_in_the_sizes_asked_for(dtype: str):
    array = (np.arange(24).reshape(2, 3, 4) % 2 if dtype == "bool" else np.arange(24).reshape(2, 3, 4)).astype(dtype)
    found = Elements(array, dtype, array.shape, ALL_VALUES)
    parts = 2 if dtype == "complex64" else 1
    numbers = [block.tolist() for block in found.walk([2 * parts, 10 * parts, 12 * parts])]
    flat = array.reshape(-1)
    plain = np.stack([flat.real, flat.imag], axis=1).reshape(-1) if parts == 2 else flat.astype(np.float64)
    assert [len(block) for block in numbers] == [2 * parts, 10 * parts, 12 * parts]
    assert [number for block in numbers for number in block] == plain.tolist()
    assert found.size == 24 * parts


def test_a_bfloat16_is_widened():
    raw = np.array([0x3F80, 0xC000], np.uint16)
    found = Elements(raw, "bfloat16", (2,), ALL_VALUES)
    assert [block.tolist() for block in found.walk([2])] == [[1.0, -2.0]]


def test_the_index_of_a_number_of_a_slice_and_of_a_sample():
    whole = np.arange(60, dtype=np.float64).reshape(3, 4, 5)
    sliced = Elements(whole[1:3, :, ::2], "float64", whole.shape, KeptSelection("1:3, ..., ::2", -1))
    assert [whole[tuple(sliced.index(at))] for at in range(24)] == whole[1:3, :, ::2].reshape(-1).tolist()
    kept = KeptSelection(None, 7)
    sampled = Elements(ALL_VALUES.narrow(whole, kept), "float64", whole.shape, kept)
    values = np.concatenate(list(sampled.walk([7]))).tolist()
    assert [whole[tuple(sampled.index(at))] for at in range(7)] == values
    both = KeptSelection("1:3, ..., ::2", 5)
    part = Elements(ALL_VALUES.narrow(whole, both), "float64", whole.shape, both)
    assert [whole[tuple(part.index(at))] for at in range(5)] == np.concatenate(list(part.walk([5]))).tolist()


def test_the_index_of_a_complex_number_says_which_part():
    found = Elements(np.zeros((2, 3), np.complex64), "complex64", (2, 3), ALL_VALUES)
    assert found.shape == (2, 3, 2)
    assert found.index(9) == [1, 1, 1]


def test_a_slice_of_more_axes_than_there_are_takes_all():
    found = Elements(np.zeros(4), "float64", (4,), KeptSelection("0:1, 0:1", -1))
    assert found.index(3) == [3]


def test_rows_without_values_and_with_lost_ones():
    builder = Builder(keep="stats")
    builder.tensor(builder.call("a"), "output", "out", np.ones(3))
    builder.tensor(builder.call("b"), "output", "out", np.ones(3), keep={"tensors"})
    builder.rank().unreadable.add(1)
    rank = builder.run.ranks[0]
    assert Elements.read(rank, 0) is None
    with pytest.raises(RunError, match="not there"):
        Elements.read(rank, 1)


def test_a_checkpoint_is_read_in_blocks_of_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    save_file({"weight": array}, tmp_path / "model.safetensors")
    rank = open_run(tmp_path / "model.safetensors").ranks[0]
    found = Elements.read(rank, 0)
    assert found is not None
    monkeypatch.setattr(type(rank), "blocks", lambda self, row: iter(np.array_split(array.reshape(-1), 7)))
    walked = list(found.walk([300, 1, 699]))
    assert [len(block) for block in walked] == [300, 1, 699]
    assert np.concatenate(walked).tolist() == array.reshape(-1).tolist()
    monkeypatch.setattr(type(rank), "blocks", lambda self, row: iter([array.reshape(-1)[:10]]))
    with pytest.raises(RunError, match="end too early"):
        list(found.walk([300]))


def test_every_dtype_that_can_be_recorded_can_be_looked_at():
    for name, dtype in dtypes.DTYPES.items():
        raw = np.zeros(3, dtype.storage)
        count = 6 if dtype.kind == "complex" else 3
        numbers = np.concatenate(list(Elements(raw, name, (3,), ALL_VALUES).walk([count])))
        assert numbers.dtype == np.float64


def test_a_large_tensor_is_never_in_memory_as_a_whole(tmp_path: Path):
    shape = (40, 100, 1000)
    arrays = [np.memmap(tmp_path / name, np.float32, "w+", shape=shape) for name in ("a", "b")]
    arrays[1][7, 8, 9] = 1
    sides = [Elements(array, "float32", shape, ALL_VALUES) for array in arrays]
    tracemalloc.start()
    try:
        found = compare_values(*sides)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.worst == [{"index": [7, 8, 9], "a": 0.0, "b": 1.0, "difference": 1.0}]
    assert peak < 16 * BLOCK * 8 < 2 * 4_000_000 * 8  # some blocks, where both tensors in float64 are thirty
