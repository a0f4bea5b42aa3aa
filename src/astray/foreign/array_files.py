"""numpy's files of one array each, as several dumps have them. Nothing is unpickled; values are mapped, not read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import Spec, is_shape
from astray.errors import RunError
from astray.stats.dtypes import DTYPES

Array = npt.NDArray[Any]

_NAMES = {dtype.storage.str: name for name, dtype in reversed(DTYPES.items()) if dtype.storage.kind in "fc"}
_NAMES |= {np.dtype(name).str: name for name in DTYPES if hasattr(np, name) and name not in ("bool",)}
_NAMES["|b1"] = "bool"

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def describe(path: Path) -> Spec:
    """The dtype and shape of the array in a file. Raises RunError when there is none that can be read."""
    return _header(path)[0]


def read(path: Path) -> Array:
    """The array, in row-major order, mapped from the file where it lies so."""
    spec, dtype, column_major, start = _header(path)
    if not spec.size:
        return np.empty(spec.shape, dtype)
    try:
        mapped = np.memmap(path, dtype, "r", start, spec.shape, "F" if column_major else "C")
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from None
    whole = np.ascontiguousarray(np.asarray(mapped)).reshape(spec.shape)
    return whole.astype(DTYPES[spec.dtype].storage, copy=False)


def write(path: Path, array: Array) -> None:
    """Write an array so that it is either there in full or not at all."""
    draft = path.with_name(f".{path.name[-200:]}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            np.lib.format.write_array(_Stream(file), np.asarray(array), allow_pickle=False)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class _Stream:
    """A file that numpy does not know to be one: where it does, an error of the disk has neither a number nor words."""

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write


def _header(path: Path) -> tuple[Spec, np.dtype[Any], bool, int]:
    try:
        with path.open("rb") as file:
            shape, column_major, dtype = _read_header(file)
            start = file.tell()
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # noqa: BLE001 - whatever numpy's parser says of a damaged header
        raise RunError(f"{path} is no array of numpy's: {_first_line(error)}.") from None
    if dtype.hasobject:
        raise RunError(
            f"{path} holds Python objects, for which a pickle would have to be run. Save its arrays without them."
        )
    name = _NAMES.get(dtype.newbyteorder("<").str if dtype.byteorder == ">" else dtype.str)
    if name is None:
        raise RunError(f"{path} holds {dtype}, which is no type of tensors.")
    spec = Spec(name, shape)
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
        raise ValueError(f"the shape {shape} is none")
    return tuple(shape), column_major, dtype


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
