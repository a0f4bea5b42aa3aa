"""Safetensors files written as a stream: valid for the safetensors library at every moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from astray.errors import RunError
from astray.records import Blob
from astray.store.deferred import TensorBytes
from astray.store.run_format.shard_file import TensorBytesReader, shard_name
from astray.store.writing import values_writer as module
from astray.store.writing.values_writer import ValuesWriter


def values_of(array: np.ndarray, name: str = "0.output.0", dtype: str | None = None) -> TensorBytes:
    return TensorBytes(memoryview(array.tobytes()), name, dtype or array.dtype.name, array.shape, None)


def load(path: Path) -> dict[str, Any]:
    """What the safetensors library finds; opening checks that entries cover the file without a hole."""
    with safe_open(path, "np") as file:
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping


def test_the_library_opens_the_file_at_every_moment(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    expected: dict[str, np.ndarray] = {}
    for i in range(50):
        array = np.arange(i + 1, dtype=np.float32)
        writer.write([values_of(array, f"{i}.output.0")])
        writer.drain()
        expected[f"{i}.output.0"] = array
        found = load(tmp_path / shard_name(0))
        assert expected.keys() <= found.keys()
        assert "__free" in found
        assert np.array_equal(found[f"{i}.output.0"][:], array)
    writer.close()
    found = load(tmp_path / shard_name(0))
    assert {name for name in found if not name.startswith("__pad")} == expected.keys()
    assert (tmp_path / shard_name(0)).stat().st_size < 200_000


def test_a_shard_takes_no_space_it_does_not_use(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    writer.write([values_of(np.zeros(3))])
    writer.drain()
    stat = (tmp_path / shard_name(0)).stat()
    assert stat.st_size > 1 << 30
    assert stat.st_blocks * 512 < 1 << 20
    writer.close()


def test_blobs_point_at_the_bytes_and_are_aligned(tmp_path: Path) -> None:
    writer, reader = ValuesWriter(tmp_path), TensorBytesReader(tmp_path)
    arrays = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in (1, 64, 0, 63, 65, 1000)]
    group = [values_of(array, str(n)) for n, array in enumerate(arrays)]
    writer.write(group[:2])
    writer.drain()
    writer.write(group[2:])
    writer.drain()
    writer.close()
    for values, array in zip(group, arrays, strict=True):
        assert values.data is None
        assert values.blob is not None
        assert values.blob.offset % 64 == 0 or not array.size
        assert np.array_equal(reader.read(values.blob), array)
    assert (writer.count, writer.nbytes) == (6, sum(a.size for a in arrays))


def test_the_next_shard_begins_when_data_or_header_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADER_BYTES", (4096, 8192))
    writer = ValuesWriter(tmp_path, shard_bytes=1000)
    sizes = [400, 400, 400, 5000, 10, *[1] * 300]
    group = [values_of(np.full(size, i % 251, np.uint8), f"{i}") for i, size in enumerate(sizes)]
    writer.write(group)
    writer.drain()
    writer.close()
    files = [values.blob.file for values in group if values.blob]
    assert files[:5] == [0, 0, 1, 2, 3]
    assert files == sorted(files)
    reader = TensorBytesReader(tmp_path)
    for i, values in enumerate(group):
        assert values.blob is not None
        assert reader.read(values.blob).tolist() == [i % 251] * sizes[i]
        assert load(tmp_path / shard_name(values.blob.file))[f"{i}"][:].tolist() == [i % 251] * sizes[i]
    lengths = [int.from_bytes((tmp_path / shard_name(n)).read_bytes()[:8], "little") + 8 for n in set(files)]
    assert lengths[:3] == [4096, 8192, 8192]


@pytest.mark.parametrize(
    ("dtype", "array", "kind", "shape"),
    [
        ("float32", np.zeros((2, 3), np.float32), "F32", [2, 3]),
        ("float64", np.array(1.5), "F64", []),
        ("bfloat16", np.zeros((4, 1), np.uint16), "BF16", [4, 1]),
        ("float16", np.zeros(4, np.float16), "F16", [4]),
        ("float8_e4m3fn", np.zeros(4, np.uint8), "F8_E4M3", [4]),
        ("float8_e5m2", np.zeros(4, np.uint8), "F8_E5M2", [4]),
        ("float8_e8m0fnu", np.zeros((2, 2), np.uint8), "U8", [2, 2]),  # older readers do not know it
        ("bool", np.zeros((0, 7), np.bool_), "BOOL", [0, 7]),
        ("uint64", np.zeros(2, np.uint64), "U64", [2]),
        ("complex64", np.zeros((2, 3), np.complex64), "F32", [2, 3, 2]),
        ("complex128", np.zeros((), np.complex128), "F64", [2]),
        ("quint4x2", np.zeros(5, np.uint8), "U8", [5]),
    ],
)
def test_dtypes(tmp_path: Path, dtype: str, array: np.ndarray, kind: str, shape: list[int]) -> None:
    writer = ValuesWriter(tmp_path)
    writer.write([values_of(array, "x", dtype)])
    writer.drain()
    writer.close()
    found = load(tmp_path / shard_name(0))["x"]
    assert (found.get_dtype(), found.get_shape()) == (kind, shape)


def test_bytes_that_do_not_fit_their_shape_are_stored_as_bytes(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    writer.write([TensorBytes(memoryview(bytes(10)), "x", "float32", (3,), None)])
    writer.drain()
    writer.close()
    assert load(tmp_path / shard_name(0))["x"].get_shape() == [10]


def test_names_stay_unique_and_valid(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    names = ["a", "a", "a", "__free", 'quo"te\\', "層", "caf\udce9", "x" * 1000, "x" * 1001]
    writer.write([values_of(np.array([i]), name) for i, name in enumerate(names)])
    writer.drain()
    writer.close()
    found = load(tmp_path / shard_name(0))
    kept = {name: found[name][:].item() for name in found if not name.startswith("__pad")}
    assert kept == {
        "a": 0,
        "a#2": 1,
        "a#3": 2,
        "__free#2": 3,
        'quo"te\\': 4,
        "層": 5,
        "caf\\udce9": 6,
        "x" * 256: 7,
        "x" * 256 + "#2": 8,
    }


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    writer.write([values_of(np.zeros(2), "0.output.0")])
    writer.drain()
    with (tmp_path / shard_name(0)).open("rb") as file:
        header = json.loads(file.read(128 << 10)[8:])
    assert header["0.output.0"] == {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    assert header["__free"]["data_offsets"] == [16, 1 << 30]
    writer.close()


def test_full_shards_are_cut_only_at_the_end(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path, shard_bytes=1000)
    writer.write([values_of(np.zeros(600, np.uint8), str(n)) for n in range(3)])
    writer.drain()
    assert all("__free" in load(tmp_path / shard_name(n)) for n in range(3))
    writer.close()
    assert [list(load(tmp_path / shard_name(n))) for n in range(3)] == [["0"], ["1"], ["2"]]


def test_nothing_written_makes_no_file(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    writer.write([])
    writer.drain()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_missing_and_cut_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"values-00003\.safetensors is missing.* can be read without it"):
        TensorBytesReader(tmp_path).read(Blob(3, 0, 4))
    (tmp_path / shard_name(0)).write_bytes(b"")
    with pytest.raises(RunError, match=r"values-00000\.safetensors cannot be read: "):
        TensorBytesReader(tmp_path).read(Blob(0, 0, 4))
    (tmp_path / shard_name(1)).write_bytes(b"abcdef")
    assert TensorBytesReader(tmp_path).read(Blob(1, 2, 4)).tobytes() == b"cdef"
    with pytest.raises(RunError, match=r"ends after 6 bytes, before this tensor's values at 4–8"):
        TensorBytesReader(tmp_path).read(Blob(1, 4, 4))
