"""What is written without torch is what torch reads, and what our own reader reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from astray import checkpoints
from astray.foreign.array_files import ALIGNMENT, TorchTensor, write_torch_file
from astray.stats import DTYPES


def tensor_of(dtype: str) -> tuple[np.ndarray, torch.Tensor]:
    """Six elements of this dtype, as numpy stores them and as torch has them."""
    raw = np.arange(6 * DTYPES[dtype].itemsize, dtype=np.uint8) % (2 if dtype == "bool" else 60)
    bits = torch.from_numpy(raw.copy())
    return raw.view(DTYPES[dtype].storage).reshape(2, 3), bits.view(getattr(torch, dtype)).reshape(2, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_a_tensor_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    array, expected = tensor_of(dtype)
    write_torch_file(tmp_path / "one.pt", TorchTensor(array, dtype))
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert found.dtype == expected.dtype
    assert found.shape == (2, 3)
    assert not found.requires_grad
    assert found.untyped_storage().tolist() == expected.untyped_storage().tolist()
    with checkpoints.open(tmp_path / "one.pt") as mine:
        values, name, shape = mine.read("tensor")
    assert (values.tobytes(), name, shape) == (array.tobytes(), dtype, (2, 3))


def test_nests_and_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    content = {
        "name": "layers.0 äß\ud800",
        "numbers": [0, -1, 1 << 31, -(1 << 70), 255, 0.1, float("inf")],
        "others": (True, False, None, (), [], {}),
        "deep": {"a": [({"b": 1},)]},
    }
    write_torch_file(tmp_path / "plain.pt", content)
    assert torch.load(tmp_path / "plain.pt", weights_only=True) == content


def test_layouts_sizes_and_sharing(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    content = (
        TorchTensor(base.transpose(2, 0, 1), "float32"),
        TorchTensor(base, "float32"),
        TorchTensor(base, "float32"),
        TorchTensor(np.float32(7).reshape(()), "float32"),
        TorchTensor(np.empty((0, 5), np.float32), "float32"),
    )
    write_torch_file(tmp_path / "many.pt", content)
    moved, one, same, scalar, empty = torch.load(tmp_path / "many.pt", weights_only=True)
    assert torch.equal(moved, torch.from_numpy(base.transpose(2, 0, 1).copy()))
    assert torch.equal(one, torch.from_numpy(base))
    assert one.data_ptr() == same.data_ptr()
    assert scalar.shape == ()
    assert scalar.item() == 7
    assert empty.shape == (0, 5)


def test_tensors_begin_where_torch_may_map_them(tmp_path: Path) -> None:
    path = tmp_path / "aligned.pt"
    write_torch_file(path, {str(size): TorchTensor(np.ones(size, np.float32), "float32") for size in (1, 3, 17)})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for entry in archive.infolist():
            start = entry.header_offset + 30 + len(entry.filename) + len(entry.extra)
            assert start % ALIGNMENT == 0
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert [tensor.sum().item() for tensor in mapped.values()] == [1, 3, 17]


def test_what_has_no_place_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="A object has no place"):
        write_torch_file(tmp_path / "odd.pt", {"x": object()})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="bfloat16 is stored as uint16, not as float32"):
        write_torch_file(tmp_path / "odd.pt", TorchTensor(np.ones(2, np.float32), "bfloat16"))
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_hundreds_of_bytes(tmp_path: Path) -> None:
    numbers = {str(bits): sign << bits for bits in (31, 63, 2030, 2039, 2040, 9000) for sign in (1, -1)}
    write_torch_file(tmp_path / "numbers.pt", {**numbers, "tensor": TorchTensor(np.ones(1, np.float32), "float32")})
    found = torch.load(tmp_path / "numbers.pt", weights_only=False)
    assert {name: found[name] for name in numbers} == numbers
