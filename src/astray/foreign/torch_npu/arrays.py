"""Reads the folder that `wrap_async_datadump_hook` fills: one .npy file for each tensor, described by its name.

`16_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy`: the number is that of the inputs,
or outputs, of one call, and `input0` is the first tensor among them, whichever argument it was. The file holds the
memory of the tensor as the device had it; shape, stride and offset locate the tensor in it.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astray.checkpoints.torch_files import MOST_EXPANDED
from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.foreign.dump_rows import ValueLocation, shape_of
from astray.foreign.torch_npu.names import Array, DumpedTensor, Floats, TensorName, TorchNpuDump, parse
from astray.stats import DTYPES
from astray.stats.dtypes import widen
from astray.store.safe_paths import entries

_FILE = re.compile(
    r"(\d{1,18}_.+_(?:forward|backward)_(?:input|output))(\d{1,9})"
    r"_shape\[([\d,]*)\]_stride\[([\d,]*)\]_offset\[(\d{1,18})\]_format\[(-?\d{1,3})\]\.npy"
)
_PLAIN_FORMATS = (-1, 0, 1, 2, 16, 27, 30)
"""Ascend's formats in which shape and stride describe the memory of a tensor; in the others it is cut into tiles."""


class ArrayFile(NamedTuple):
    """A file, and what its name says of the tensor in it."""

    path: Path
    name: TensorName
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    format: int

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: the order in which tensors were dumped."""
        return self.name.number or 0, int(self.name.path)


def recognises(folder: Path) -> bool:
    """Whether a folder holds such files."""
    try:
        return bool(tensor_files(folder))
    except RunError:
        return False


def tensor_files(folder: Path) -> list[Path]:
    """The files of tensors in a folder. Raises RunError when it cannot be read."""
    return [path for path in entries(folder) if _FILE.fullmatch(path.name)]


def read(folder: Path) -> TorchNpuDump:
    """The tensors of a folder. Raises RunError where there are none."""
    files, problems = [], []
    for path in tensor_files(folder):
        file = _array_file(path)
        if file is None:
            problems.append(f"The name of {path.name} does not describe a possible tensor. It is left out.")
        else:
            files.append(file)
    if not files:
        raise RunError(f"{folder} holds no tensor of torch_npu.hooks. {' '.join(problems[:1])}".rstrip())
    return TorchNpuDump([_dumped(file, problems) for file in sorted(files, key=lambda file: file.order)], problems)


def _array_file(path: Path) -> ArrayFile | None:
    match = _FILE.fullmatch(path.name)
    assert match is not None, "called only for names that match"
    name = parse(f"{match[1]}.{match[2]}")
    shape, stride = (shape_of([int(number) for number in text.split(",") if number]) for text in match.group(3, 4))
    if name is None or shape is None or stride is None or len(shape) != len(stride):
        return None
    return ArrayFile(path, name, shape, stride, int(match[5]), int(match[6]))


def _dumped(file: ArrayFile, problems: list[str]) -> DumpedTensor:
    values, note, dtype = None, None, ""
    try:
        dtype = npy.describe(file.path).dtype
        _check(file)
        values = ValueLocation(file.path, partial(_load, file), math.prod(file.shape) * DTYPES[dtype].itemsize)
    except RunError as error:
        note = str(error)
        problems.append(note)
    return DumpedTensor(
        file.name,
        f"{file.name.number}_{file.name.unnumbered}",
        dtype,
        file.shape,
        numbers=partial(_floats, file, dtype) if note is None else partial(_raise, note),
        values=values,
        note=note,
        counts_tensors=True,
    )


def _raise(why: str) -> Floats:
    raise RunError(why)


def _check(file: ArrayFile) -> None:
    """Raises RunError when the tensor cannot be made from what the file holds."""
    if file.format not in _PLAIN_FORMATS:
        raise RunError(
            f"{file.path.name} is in the format {file.format} of Ascend, which only a device can undo: its values "
            "are left out. Dump it with the tensor in the format 2."
        )
    held = math.prod(npy.describe(file.path).shape)
    last = file.offset + sum((size - 1) * step for size, step in zip(file.shape, file.stride, strict=True))
    if math.prod(file.shape) and last >= held:
        raise RunError(
            f"{file.path.name} holds {held} elements, and by its name the tensor reaches to element {last}. Its "
            "values are left out."
        )
    nbytes = math.prod(file.shape) * DTYPES[npy.describe(file.path).dtype].itemsize
    if math.prod(file.shape) > held and nbytes > MOST_EXPANDED:
        raise RunError(
            f"{file.path.name} holds {held} elements, and by its name the tensor repeats them to {nbytes:,} bytes. "
            "Its values are left out."
        )


def _load(file: ArrayFile) -> Array:
    whole = npy.read(file.path)
    if not math.prod(file.shape):
        return np.empty(file.shape, whole.dtype)
    flat = whole.reshape(-1)[file.offset :]
    strides = tuple(step * flat.itemsize for step in file.stride)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, file.shape, strides)).reshape(file.shape)


def _floats(file: ArrayFile, dtype: str) -> Floats:
    return widen(_load(file), dtype).reshape(-1)
