from __future__ import annotations

import itertools

import numpy as np
import pytest

from astray.stats import DTYPES, ShardPosition, Strided, kernels, merge_fingerprints
from pairwise import grid
from stats.arrays import noise
from stats.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("backend")


def fingerprint(array: np.ndarray, dtype: str | None = None, shard: ShardPosition | None = None) -> int:
    result = kernels.measure(Strided.from_numpy(array, dtype), statistics=False, shard=shard).fingerprint
    assert result is not None
    return result


def plain(data: bytes) -> int:
    """The definition, one word after the other."""
    data += bytes(-len(data) % 4)
    total = 0
    for index in range(len(data) // 4):
        x = (index % 2**32 * 0x9E3779B1 + (index >> 32) * 0x85EBCA6B) % 2**32 ^ 0x61C8864F
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        total += int.from_bytes(data[4 * index : 4 * index + 4], "little") * x
    return total % 2**64


def test_golden_values() -> None:
    """These must never change: recorded runs hold fingerprints, and a GPU computes the same."""
    assert fingerprint(np.arange(10, dtype=np.float32)) == 0xEFB6AF752F300000
    assert fingerprint(np.arange(1000, dtype=np.int16)) == 0xE31FC8073DB573B6
    assert fingerprint((np.arange(7) * 37).astype(np.uint8)) == 0x207FAC9DCAD6E1D4
    assert fingerprint(np.arange(5, dtype=np.float64)) == 0x8547584448680000


@grid(dtype=DTYPES, count=[0, 1, 2, 3, 4, 5, 33, 1000, 2051], backend=BACKENDS, fixtures=["backend"])
def test_the_definition(dtype: str, count: int) -> None:
    array = noise(dtype, (count,))
    assert fingerprint(array, dtype) == plain(array.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layout_does_not_count(dtype: str) -> None:
    array = noise(dtype, (6, 7, 5))
    expected = fingerprint(array, dtype)
    for order in itertools.permutations(range(3)):
        copy = np.ascontiguousarray(array.transpose(order))
        assert fingerprint(copy.transpose(np.argsort(order)), dtype) == expected
    wide = np.zeros((12, 7, 15), array.dtype)
    wide[::2, :, 1::3] = array
    assert fingerprint(wide[::2, :, 1::3], dtype) == expected
    assert fingerprint(np.ascontiguousarray(array[::-1, :, ::-1])[::-1, :, ::-1], dtype) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expanded_tensor_is_its_copy(dtype: str) -> None:
    view = np.broadcast_to(noise(dtype, (5, 1, 3)), (5, 4, 3))
    assert fingerprint(view, dtype) == fingerprint(view.copy(), dtype)


def test_what_other_hashes_miss_changes_it() -> None:
    array = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    seen = {fingerprint(array), fingerprint(-array), fingerprint(np.ascontiguousarray(array.T))}
    for row in (1, 2, 4, 8, 16, 32, 63):
        swapped = array.copy()
        swapped[[0, row]] = swapped[[row, 0]]
        seen.add(fingerprint(swapped))
    flipped = array.copy()
    flipped[5, 5] *= -1
    seen.add(fingerprint(flipped))
    assert len(seen) == 11


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_any_single_bit_changes_it(dtype: str) -> None:
    array = noise(dtype, (40,))
    original = fingerprint(array, dtype)
    for bit in range(8 * array.nbytes):
        changed = array.copy()
        changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert fingerprint(changed, dtype) != original


def cuts(size: int, pieces: list[int]) -> list[slice]:
    edges = [0, *pieces, size]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@grid(
    dtype=DTYPES,
    edges=[([4], []), ([], [6]), ([3], [5]), ([1, 2, 7], [1, 2, 3, 10])],
    ids={"edges": ["rows", "columns", "blocks", "odd"]},
    backend=BACKENDS,
    fixtures=["backend"],
)
def test_shards_add_up(dtype: str, edges: tuple[list[int], list[int]]) -> None:
    rows, columns = edges
    whole = noise(dtype, (9, 13))
    parts = []
    for row, column in itertools.product(cuts(9, rows), cuts(13, columns)):
        shard = ShardPosition((row.start, column.start), whole.shape)
        views = whole[row, column], np.ascontiguousarray(whole[row, column]), np.asfortranarray(whole[row, column])
        prints = {fingerprint(view, dtype, shard) for view in views}
        assert len(prints) == 1
        parts += prints
    assert merge_fingerprints(parts) == fingerprint(whole, dtype)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
def test_words_beyond_16_gib(dtype: str) -> None:
    """A shard far into a huge tensor, against the definition."""
    array = noise(dtype, (64,))
    kind = DTYPES[dtype]
    first = 2**34 // kind.itemsize - 30  # the high half of the word index changes on the way
    expected = 0
    for place, byte in enumerate(array.view(np.uint8).tolist(), first * kind.itemsize):
        word = place >> 2
        x = (word % 2**32 * 0x9E3779B1 + (word >> 32) * 0x85EBCA6B) % 2**32 ^ 0x61C8864F
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        expected += (byte << 8 * (place & 3)) * x
    assert fingerprint(array, dtype, ShardPosition((first,), (2**36,))) == expected % 2**64
    backwards = np.ascontiguousarray(array[::-1])[::-1]
    assert fingerprint(backwards, dtype, ShardPosition((first,), (2**36,))) == expected % 2**64


@pytest.mark.parametrize(
    "shard",
    [
        ShardPosition((0,), (4, 4)),
        ShardPosition((3, 0), (4, 4)),
        ShardPosition((-1, 0), (4, 4)),
        ShardPosition((0, 0), (4,)),
    ],
)
def test_a_shard_outside_the_whole_is_refused(shard: ShardPosition) -> None:
    with pytest.raises(ValueError, match="does not lie within"):
        fingerprint(np.zeros((2, 4), np.float32), shard=shard)


def test_a_large_tensor_in_every_layout() -> None:
    array = noise("float32", (1000, 700))
    expected = fingerprint(array)
    assert fingerprint(np.asfortranarray(array)) == expected
    wide = np.zeros((1000, 1400), np.float32)
    wide[:, ::2] = array
    assert fingerprint(wide[:, ::2]) == expected
