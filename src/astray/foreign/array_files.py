"""Files of arrays and tensors that several tools' dumps use: .npy files read and written, torch's files written.

Nothing is unpickled on reading, and values are memory-mapped. `write_torch_file` writes, without torch, what
`torch.load(…, weights_only=True)` opens: a zip with a pickle and the bytes of the tensors beside it, each at a multiple
of 64 bytes, so that torch can map them. The pickle is assembled here, opcode by opcode: Python's pickler would import
torch to look up the names in it.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import TensorSpec, is_shape, row_major
from astray.checkpoints.torch_objects import STORAGES
from astray.errors import RunError
from astray.stats.dtypes import DTYPES

Array = npt.NDArray[Any]

_NAMES = {dtype.storage.str: name for name, dtype in reversed(DTYPES.items()) if dtype.storage.kind in "fc"}
_NAMES |= {np.dtype(name).str: name for name in DTYPES if hasattr(np, name) and name not in ("bool",)}
_NAMES["|b1"] = "bool"

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def describe(path: Path) -> TensorSpec:
    """The dtype and shape of the array in a file. Raises RunError when there is none that can be read."""
    return _header(path)[0]


def read(path: Path) -> Array:
    """The array in row-major order; memory-mapped if the file has it in that order."""
    spec, dtype, column_major, start = _header(path)
    if not spec.size:
        return np.empty(spec.shape, dtype)
    try:
        mapped = np.memmap(path, dtype, "r", start, spec.shape, "F" if column_major else "C")
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from None
    whole = np.ascontiguousarray(np.asarray(mapped)).reshape(spec.shape)
    return whole.astype(DTYPES[spec.dtype].storage, copy=False)


def write_npy(path: Path, array: Array) -> None:
    """Write an array, atomically."""
    draft = path.with_name(f".{path.name[-200:]}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            np.lib.format.write_array(_Stream(file), np.asarray(array), allow_pickle=False)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class _Stream:
    """Hides that an object is a file: numpy's errors for real files have neither errno nor message."""

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write


def _header(path: Path) -> tuple[TensorSpec, np.dtype[Any], bool, int]:
    try:
        with path.open("rb") as file:
            shape, column_major, dtype = _read_header(file)
            start = file.tell()
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # noqa: BLE001 - numpy's parser raises anything for a damaged header
        raise RunError(f"{path} is not a numpy array: {_first_line(error)}.") from None
    if dtype.hasobject:
        raise RunError(
            f"{path} holds Python objects, for which a pickle would have to be run. Save its arrays without them."
        )
    name = _NAMES.get(dtype.newbyteorder("<").str if dtype.byteorder == ">" else dtype.str)
    if name is None:
        raise RunError(f"{path} holds {dtype}, which is not a type of tensors.")
    spec = TensorSpec(name, shape)
    needed = start + math.prod(shape) * dtype.itemsize
    if size < needed:
        raise RunError(f"{path} ends after {size:,} of {needed:,} bytes: it was cut. Copy it again.")
    return spec, dtype, column_major, start


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is not known")
    shape, column_major, dtype = _HEADERS[version](file)
    if not is_shape(shape):
        raise ValueError(f"the shape {shape} is impossible")
    return tuple(shape), column_major, dtype


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


# -- files of torch ----------------------------------------------------------------------------------------------------

ALIGNMENT = 64
"""Bytes; torch's own alignment of the tensors in its files."""

_ROOT = "archive"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip file: equal content gives equal bytes
_LOCAL_HEADER_BYTES = 30
_PADDING = struct.Struct("<2sH")  # an extra field that readers of zip files skip, as torch writes it
_ZIP64_FIELD_BYTES = 20  # zipfile puts this field before it where sizes need 64 bits


class TorchTensor(NamedTuple):
    """A tensor: its elements, as `astray.stats.DTYPES` stores them (bfloat16 as uint16), and the name of its dtype."""

    array: npt.NDArray[Any]
    dtype: str


Nest: TypeAlias = "TorchTensor | bool | int | float | str | list[Nest] | tuple[Nest, ...] | dict[str, Nest] | None"


def write_torch_file(path: Path, content: Nest) -> None:
    """Write a file as `torch.save(content, path)` would, atomically.

    >>> write_torch_file(path, {"module": "layers.0", "input": (TorchTensor(array, "float32"), 0.5, None)})
    >>> torch.load(path, weights_only=True)["input"][0].shape
    torch.Size([8, 128])

    An array that occurs several times is stored once, and loads as tensors that share their memory.
    """
    pickled = _Pickle()
    pickled.add(content)
    draft = path.with_name(f".{path.name[-200:]}.{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
            _put(archive, "data.pkl", pickled.bytes())
            _put(archive, "byteorder", b"little")
            for key, array in enumerate(pickled.arrays):
                _put(archive, f"data/{key}", array.reshape(-1).view(np.uint8).data)
            _put(archive, "version", b"3\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _put(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}", _EPOCH)
    large = len(data) >= zipfile.ZIP64_LIMIT
    assert archive.fp is not None
    start = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(entry.filename) + _PADDING.size
    gap = -(start + _ZIP64_FIELD_BYTES * large) % ALIGNMENT
    entry.extra = _PADDING.pack(b"FB", gap) + bytes(gap)
    entry.file_size = len(data)
    with archive.open(entry, "w", force_zip64=large) as file:
        file.write(data)


class _Pickle:
    """The pickle that `torch.save` writes, in protocol 2 and without memoisation."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self._storages: dict[int, int] = {}  # the number of a storage by the id of its array
        self._kept: list[npt.NDArray[Any]] = []  # keeps the arrays alive, so that their ids stay unique
        self._code = bytearray(b"\x80\x02")

    def bytes(self) -> bytes:
        """The whole pickle."""
        return bytes(self._code + b".")

    def add(self, value: Nest) -> None:
        """Push a value."""
        if isinstance(value, TorchTensor):
            self._tensor(value)
        elif isinstance(value, dict):
            self._code += b"}("
            for key, item in value.items():
                self.add(key)
                self.add(item)
            self._code += b"u"
        elif isinstance(value, tuple):
            self._tuple(*value)
        elif isinstance(value, list):
            self._code += b"]("
            for item in value:
                self.add(item)
            self._code += b"e"
        else:
            self._code += _scalar(value)

    def _tuple(self, *items: Nest) -> None:
        self._code += b"("
        for item in items:
            self.add(item)
        self._code += b"t"

    def _tensor(self, tensor: TorchTensor) -> None:
        """A call that makes the tensor from its storage, which is outside of the pickle."""
        dtype, shape = DTYPES[tensor.dtype], tensor.array.shape
        if tensor.array.dtype != dtype.storage:
            raise ValueError(f"{dtype.name} is stored as {dtype.storage}, not as {tensor.array.dtype}.")
        typed = _STORAGE_OF.get(dtype.name)  # newer dtypes have no storage class
        self._global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self._code += b"((" + _scalar("storage")
        self._global(*(("torch", typed) if typed else ("torch.storage", "UntypedStorage")))
        size = tensor.array.size * (1 if typed else dtype.itemsize)
        self._code += _scalar(str(self._storage(tensor.array))) + _scalar("cpu") + _scalar(size) + b"tQ" + _scalar(0)
        self._tuple(*shape)
        self._tuple(*row_major(shape))
        self._code += _scalar(False)  # requires_grad, followed by the hooks: none
        self._global("collections", "OrderedDict")
        self._code += b")R"
        if not typed:
            self._global("torch", dtype.name)
        self._code += b"tR"

    def _storage(self, array: npt.NDArray[Any]) -> int:
        number = self._storages.setdefault(id(array), len(self.arrays))
        if number == len(self.arrays):
            self._kept.append(array)
            self.arrays.append(np.ascontiguousarray(array))
        return number

    def _global(self, module: str, name: str) -> None:
        self._code += f"c{module}\n{name}\n".encode()


def _scalar(value: Nest) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        if len(raw) < 256:
            return b"\x8a" + bytes([len(raw)]) + raw
        return b"\x8b" + struct.pack("<i", len(raw)) + raw
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    raise TypeError(f"A {type(value).__name__} has no place in such a file.")
