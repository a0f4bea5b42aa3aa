"""The native kernels, with the same functions as `numpy_kernels`. Importing it fails where the extension is missing."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.process import configured_threads
from astray.stats import _native, dtypes
from astray.stats._native import contrast, measure, measuring, slice_errors
from astray.stats.types import Strided

__all__ = ["contrast", "factorize", "gather", "measure", "measuring", "pack", "set_threads", "slice_errors"]

Array = npt.NDArray[Any]


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def gather(tensor: Strided, positions: npt.NDArray[np.int64]) -> Array:
    """See `astray.stats.kernels.gather`."""
    out = np.empty(positions.shape, dtypes.find(tensor.dtype).storage)
    if not _native.gather(tensor, _address(positions), positions.size, _address(out)):
        raise IndexError(f"Positions must lie in 0 … {tensor.size - 1} for a tensor of shape {tensor.shape}.")
    return out


def pack(tensor: Strided, into: npt.NDArray[np.uint8]) -> None:
    """See `astray.stats.kernels.pack`."""
    _native.pack(tensor, _address(into))


def factorize(data: npt.NDArray[np.uint8], offsets: Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """See `astray.stats.kernels.factorize`."""
    rows = max(offsets.size - 1, 0)
    codes, first = np.empty(rows, np.int32), np.empty(rows, np.int64)
    count = _native.factorize(
        _address(data), _address(offsets), offsets.itemsize, rows, _address(codes), _address(first)
    )
    return codes, first[:count].copy()


def set_threads(count: int) -> None:
    """See `astray.stats.kernels.set_threads`; 0 means the default."""
    _native.set_threads(count or configured_threads() or _cores())


def _cores() -> int:
    """The cores this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


set_threads(0)
