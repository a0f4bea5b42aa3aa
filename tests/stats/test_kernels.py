"""The other kernels: samples, copies, string codes, and the choice of backend."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import astray.stats
from astray.stats import DTYPES, Strided, kernels, sample_positions
from pairwise import grid
from stats.arrays import LAYOUTS, noise
from stats.backends import BACKENDS


def test_the_public_names() -> None:
    assert astray.stats.__all__ == sorted(astray.stats.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(astray.stats, name) for name in astray.stats.__all__)


@pytest.mark.parametrize(("count", "samples"), [(1000, 4), (10**6, 1000), (10**12, 4096), (1025, 1024), (7, 3), (5, 1)])
def test_samples_are_sorted_distinct_and_one_from_each_stretch(count: int, samples: int) -> None:
    positions = sample_positions(count, samples)
    assert positions.dtype == np.int64
    assert positions.size == samples
    assert np.all(np.diff(positions) > 0)
    # One in each stretch of count / samples, the first starting at 0.
    stretches = [int(position) * samples // count for position in positions]
    assert max(abs(stretch - index) for index, stretch in enumerate(stretches)) <= 1
    assert 0 <= positions[0] <= positions[-1] < count


def test_samples_never_change() -> None:
    """Two runs, perhaps years apart, must sample the same elements."""
    assert sample_positions(1000, 4).tolist() == [62, 481, 701, 767]
    assert sample_positions(10**12, 3).tolist() == [14561646396, 582713738920, 922087693307]


def test_samples_keep_in_step_with_no_row_length() -> None:
    columns = np.bincount(sample_positions(1 << 20, 1 << 10) % 1024, minlength=1024)
    assert columns.max() <= 8


def test_all_elements_when_there_are_no_more() -> None:
    assert sample_positions(5, 5).tolist() == [0, 1, 2, 3, 4]
    assert sample_positions(3, 100).tolist() == [0, 1, 2]
    assert sample_positions(0, 10).size == 0


def test_samples_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        sample_positions(10, 2)[0] = 1


@pytest.mark.usefixtures("backend")
@grid(dtype=DTYPES, layout=LAYOUTS, backend=BACKENDS, fixtures=["backend"])
def test_pack_and_gather(dtype: str, layout: str) -> None:
    base = noise(dtype, (40, 50))
    array = LAYOUTS[layout](base)
    tensor = Strided.from_numpy(array, dtype)
    packed = kernels.pack(tensor)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == array.tobytes()
    positions = sample_positions(array.size, 17)[::-1]
    gathered = kernels.gather(tensor, positions)
    assert gathered.dtype == DTYPES[dtype].storage
    assert gathered.tobytes() == array.reshape(-1)[positions].tobytes()


@pytest.mark.usefixtures("backend")
def test_pack_large_tensors() -> None:
    array = noise("float32", (1100, 1300))
    for view in (array, array.T, array[:, ::2], array.reshape(11, 100, 1300).transpose(1, 2, 0)):
        assert kernels.pack(Strided.from_numpy(view)).tobytes() == view.tobytes()


@pytest.mark.usefixtures("backend")
def test_pack_into_a_buffer() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Strided.from_numpy(array.T)
    buffer = bytearray(25)
    result = kernels.pack(tensor, memoryview(buffer)[1:])
    assert bytes(buffer[1:]) == array.T.tobytes() == result.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        kernels.pack(tensor, bytes(24))
    with pytest.raises(ValueError, match="24 bytes"):
        kernels.pack(tensor, bytearray(23))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("position", [-1, 3])
def test_gather_refuses_what_lies_outside(position: int) -> None:
    array = np.zeros(3, np.float32)
    with pytest.raises(IndexError, match="0 … 2"):
        kernels.gather(Strided.from_numpy(array), np.array([0, position]))


def column(strings: list[bytes], dtype: type[np.signedinteger]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, strings)]).astype(dtype)
    return np.frombuffer(b"".join(strings), np.uint8), offsets


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("distinct", [1, 10, 5000])
def test_factorize(dtype: type[np.signedinteger], distinct: int) -> None:
    rng = np.random.default_rng(0)
    names = [bytes(rng.integers(0, 3, size % 40, dtype=np.uint8)) for size in range(distinct)]
    strings = [names[i] for i in rng.integers(0, distinct, 8000)]
    codes, first = kernels.factorize(*column(strings, dtype))
    seen: dict[bytes, int] = {}
    assert codes.tolist() == [seen.setdefault(text, len(seen)) for text in strings]
    assert [strings[row] for row in first] == list(seen)
    assert (codes.dtype, first.dtype) == (np.int32, np.int64)


@pytest.mark.usefixtures("backend")
def test_factorize_edges() -> None:
    for offsets in ([], [0]):
        codes, first = kernels.factorize(np.zeros(0, np.uint8), np.array(offsets, np.int32))
        assert codes.size == first.size == 0
    codes, first = kernels.factorize(np.zeros(0, np.uint8), np.zeros(4, np.int64))
    assert (codes.tolist(), first.tolist()) == ([0, 0, 0], [0])
    # Zero bytes and lengths count: these four differ.
    codes, _ = kernels.factorize(*column([b"", b"\0", b"\0\0", b"\0\0\0\0\0\0\0\0\0"], np.int64))
    assert codes.tolist() == [0, 1, 2, 3]
    # A sliced Arrow column starts somewhere else.
    codes, _ = kernels.factorize(np.frombuffer(b"xxabab", np.uint8), np.array([2, 4, 6], np.int32))
    assert codes.tolist() == [0, 0]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("offsets", [[0, 3, 2], [-1, 2], [0, 9]])
def test_factorize_refuses_offsets_outside(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="0 … 4"):
        kernels.factorize(np.zeros(4, np.uint8), np.array(offsets, np.int64))
    with pytest.raises(ValueError, match="int16"):
        kernels.factorize(np.zeros(4, np.uint8), np.array(offsets, np.int16))


@pytest.mark.usefixtures("backend")
def test_threads_must_be_some() -> None:
    with pytest.raises(ValueError, match="At least one"):
        kernels.set_threads(0)
    kernels.set_threads(None)


def test_numpy_can_be_forced() -> None:
    environment = os.environ | {"ASTRAY_KERNELS": "numpy"}
    code = "import astray.stats; print(astray.stats.BACKEND)"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "numpy"


def test_importing_stats_imports_no_framework() -> None:
    code = "import sys, astray.stats; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
