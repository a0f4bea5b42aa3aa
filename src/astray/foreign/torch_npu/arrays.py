"""Reads the folder that `wrap_async_datadump_hook` fills: a file of numpy's for each tensor; its name says the rest.

`16_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy`: the number is that of the inputs,
or outputs, of one call, and `input0` the first tensor among them, wherever it stood among the arguments. The file holds
the memory of the tensor as the device had it; shape, stride and offset say how the tensor lies in it.
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
"""Formats of Ascend in which a tensor lies as its shape and stride say; in the others it is cut into tiles."""


class ArrayFileName(NamedTuple):
    """What the name of a file says."""

    path: Path
    name: TensorName
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    format: int

    @property
    def sorts(self) -> tuple[int, int]:
        """The order in which tensors were dumped."""
        return self.name.number or 0, int(self.name.path)


def recognises(folder: Path) -> bool:
    """Whether a folder holds such files."""
    try:
        return bool(dumped_in(folder))
    except RunError:
        return False


def dumped_in(folder: Path) -> list[Path]:
    """The files of tensors in a folder. Raises RunError when it cannot be read."""
    return [path for path in entries(folder) if _FILE.fullmatch(path.name)]


def read(folder: Path) -> TorchNpuDump:
    """The tensors of a folder. Raises RunError where there are none."""
    places, problems = [], []
    for path in dumped_in(folder):
        place = _place(path)
        if place is None:
            problems.append(f"The name of {path.name} says nothing that a tensor could be. It is left out.")
        else:
            places.append(place)
    if not places:
        raise RunError(f"{folder} holds no tensor of torch_npu.hooks. {' '.join(problems[:1])}".rstrip())
    return TorchNpuDump([_dumped(place, problems) for place in sorted(places, key=lambda place: place.sorts)], problems)


def _place(path: Path) -> ArrayFileName | None:
    found = _FILE.fullmatch(path.name)
    assert found is not None, "asked for only where it fits"
    name = parse(f"{found[1]}.{found[2]}")
    shape, stride = (shape_of([int(one) for one in text.split(",") if one]) for text in found.group(3, 4))
    if name is None or shape is None or stride is None or len(shape) != len(stride):
        return None
    return ArrayFileName(path, name, shape, stride, int(found[5]), int(found[6]))


def _dumped(place: ArrayFileName, problems: list[str]) -> DumpedTensor:
    values, note, dtype = None, None, ""
    try:
        dtype = npy.describe(place.path).dtype
        _check(place)
        values = ValueLocation(place.path, partial(_load, place), math.prod(place.shape) * DTYPES[dtype].itemsize)
    except RunError as error:
        note = str(error)
        problems.append(note)
    return DumpedTensor(
        place.name,
        f"{place.name.number}_{place.name.unnumbered}",
        place.path.name,
        dtype,
        place.shape,
        numbers=partial(_floats, place, dtype) if note is None else partial(_refuse, note),
        values=values,
        note=note,
        counts_tensors=True,
    )


def _refuse(why: str) -> Floats:
    raise RunError(why)


def _check(place: ArrayFileName) -> None:
    """Raises RunError when the tensor is not to be had from what the file holds."""
    if place.format not in _PLAIN_FORMATS:
        raise RunError(
            f"{place.path.name} is in the format {place.format} of Ascend, which only a device can undo: its values "
            "are left out. Dump it with the tensor in the format 2."
        )
    held = math.prod(npy.describe(place.path).shape)
    last = place.offset + sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
    if math.prod(place.shape) and last >= held:
        raise RunError(
            f"{place.path.name} holds {held} elements, and by its name the tensor reaches to element {last}. Its "
            "values are left out."
        )
    nbytes = math.prod(place.shape) * DTYPES[npy.describe(place.path).dtype].itemsize
    if math.prod(place.shape) > held and nbytes > MOST_EXPANDED:
        raise RunError(
            f"{place.path.name} holds {held} elements, and by its name the tensor repeats them to {nbytes:,} bytes. "
            "Its values are left out."
        )


def _load(place: ArrayFileName) -> Array:
    whole = npy.read(place.path)
    if not math.prod(place.shape):
        return np.empty(place.shape, whole.dtype)
    flat = whole.reshape(-1)[place.offset :]
    strides = tuple(step * flat.itemsize for step in place.stride)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, place.shape, strides)).reshape(place.shape)


def _floats(place: ArrayFileName, dtype: str) -> Floats:
    return widen(_load(place), dtype).reshape(-1)
