"""A tensor → numbers: the functions the rest of astray calls, whichever code runs them.

The native extension is used where it was built, plain numpy otherwise; `ASTRAY_KERNELS=numpy` in the environment forces
numpy. Both give the same results. `BACKEND` says which one is used.
"""

from __future__ import annotations

import os
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.stats import dtypes, numpy_kernels
from astray.stats.fingerprint import merge_fingerprints
from astray.stats.types import Contrast, Measurement, Measurements, ShardPosition, Slices, Strided

__all__ = [
    "BACKEND",
    "Contrast",
    "Measurement",
    "Measurements",
    "ShardPosition",
    "Slices",
    "Strided",
    "contrast",
    "factorize",
    "gather",
    "measure",
    "merge_fingerprints",
    "pack",
    "sample_positions",
    "set_threads",
    "slice_errors",
]


def _choose_backend() -> ModuleType:
    if os.environ.get("ASTRAY_KERNELS") == "numpy":
        return numpy_kernels
    try:
        from astray.stats import native_kernels
    except ImportError:  # installed where there was no compiler
        return numpy_kernels
    return native_kernels


_backend = _choose_backend()

BACKEND = "numpy" if _backend is numpy_kernels else "native"
"""Which code does the work: "native" or "numpy"."""

measuring: Any = getattr(_backend, "measuring", None)
"""`measure` for native callers, as a capsule; None without the extension."""


def measure(
    tensor: Strided, *, statistics: bool = True, fingerprint: bool = True, shard: ShardPosition | None = None
) -> Measurement:
    """Measure a tensor in one pass: its statistics over the finite elements, and its fingerprint.

    Statistics are accumulated in float64; see `astray.records.Statistics`. Integers of 64 bits are converted to float64
    first, so beyond 2⁵³ they are rounded. A complex tensor of n elements is measured as 2n real numbers.

    `shard` says that the tensor is a part of a larger one: its fingerprint is then that part's share of the whole
    one's, to be added up by `merge_fingerprints`.

    >>> values = np.array([3.0, -4.0, np.nan], np.float32)
    >>> measure(Strided.from_numpy(values)).statistics
    Statistics(min=-4.0, max=3.0, mean=-0.5, std=3.5, l2=5.0, absmax=4.0, zeros=0, nan=1, inf=0, count=3,
               first_bad=2, first_bad_value=nan)
    """
    return _backend.measure(tensor, statistics, fingerprint, shard)  # type: ignore[no-any-return]


def contrast(reference: Strided, candidate: Strided, *, rtol: float = 1e-5, atol: float = 1e-8) -> Contrast:
    """Compare two tensors element by element, in row-major order, in one pass over both.

    They must have the same number of elements; shapes, strides and dtypes may differ. Values are compared in float64,
    where 64-bit integers beyond 2⁵³ are rounded (`different` is exact all the same when both have one integer dtype).
    `rtol` and `atol` only set what `within_tolerance` counts; their defaults are those of `allclose`.

    >>> reference, candidate = np.array([1.0, 2.0]), np.array([1.0, 2.5])
    >>> result = contrast(Strided.from_numpy(one), Strided.from_numpy(other))
    >>> result.different, result.max_abs_error, result.max_abs_index, result.max_rel_error
    (1, 0.5, 1, 0.25)
    """
    if reference.size != candidate.size:
        raise ValueError(
            f"Tensors of {reference.size} and {candidate.size} elements (shapes {reference.shape} and "
            f"{candidate.shape}) have no pairs to compare. Compare their statistics instead."
        )
    if (reference.dtype[:7] == "complex") != (candidate.dtype[:7] == "complex"):
        raise ValueError(f"A complex tensor has no pairs with a real one: {reference.dtype} against {candidate.dtype}.")
    return _backend.contrast(reference, candidate, rtol, atol)  # type: ignore[no-any-return]


def slice_errors(reference: Strided, candidate: Strided, largest: float) -> Slices | None:
    """How large the error is in the furthest slice (a row, head, channel, position), and in a typical row.

    A slice is all elements with one index in one dimension. Only dimensions with at least two slices of at least 16
    elements each are considered; None without any. Only pairs that are finite on both sides count.
    Both sides must have the same shape. `largest` is the largest error, as `contrast` returned it: errors are
    scaled by it, so that no square leaves the range of float64.

    >>> reference = np.zeros((4, 16))
    >>> candidate = reference.copy()
    >>> candidate[2] = 1.0
    >>> slice_errors(Strided.from_numpy(reference), Strided.from_numpy(candidate), 1.0)
    Slices(furthest=8.0, dim=0, index=2, typical=nan)
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"Tensors of shapes {reference.shape} and {candidate.shape} have no slices in common.")
    if (reference.dtype[:7] == "complex") != (candidate.dtype[:7] == "complex"):
        raise ValueError(f"A complex tensor has no pairs with a real one: {reference.dtype} against {candidate.dtype}.")
    fields = _backend.slice_errors(reference, candidate, largest)
    return None if fields is None else Slices(*fields)


@lru_cache(maxsize=256)  # the same few sizes come thousands of times a step
def sample_positions(count: int, samples: int) -> npt.NDArray[np.int64]:
    """Choose which elements stand for a tensor of `count`: `samples` of them, or all when there are no more.

    One from each of `samples` equal stretches, at an offset chosen by a hash: spread evenly, and yet not aligned with
    any row length. The choice depends on the two numbers alone, so two runs sample the same elements. Sorted,
    distinct, read-only.

    >>> sample_positions(1000, 4)
    array([ 62, 481, 701, 767])
    """
    if samples >= count:
        positions = np.arange(count, dtype=np.int64)
    else:
        stretch = np.arange(samples + 1, dtype=np.int64)
        quotient, remainder = divmod(count, samples)
        starts = stretch * quotient + stretch * remainder // samples
        jitter = _scramble(stretch[:-1].astype(np.uint64) + np.uint64(count)) % np.diff(starts).astype(np.uint64)
        positions = starts[:-1] + jitter.astype(np.int64)
    positions.flags.writeable = False
    return positions


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gather(tensor: Strided, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Copy out the raw elements at these row-major positions, as an array of the dtype's storage type."""
    return _backend.gather(tensor, np.ascontiguousarray(positions, np.int64))  # type: ignore[no-any-return]


def pack(tensor: Strided, into: Any = None) -> npt.NDArray[np.uint8]:
    """Copy a tensor's bytes in row-major order, without gaps, into a writable buffer or a new array; returns the bytes.

    `into` may be anything with a contiguous writable buffer that has exactly the tensor's size.
    """
    nbytes = tensor.size * dtypes.find(tensor.dtype).itemsize
    if into is None:
        out = np.empty(nbytes, np.uint8)
    else:
        out = np.frombuffer(into, np.uint8)
        if out.size != nbytes or not out.flags.writeable:
            state = "writable" if out.flags.writeable else "read-only"
            raise ValueError(f"pack needs a writable buffer of {nbytes} bytes; this one is {state} and has {out.size}.")
    if nbytes:
        _backend.pack(tensor, out)
    return out


def factorize(
    data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32] | npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Number byte strings in the order they first appear: string i is data[offsets[i]:offsets[i + 1]].

    Returns the number of every row, and for every number the row where it first appeared. This is the layout of an
    Arrow string column, and what turns key columns into integers to join on.

    >>> factorize(np.frombuffer(b"abaab", np.uint8), np.array([0, 1, 2, 3, 5], np.int32))
    (array([0, 1, 0, 2], dtype=int32), array([0, 1, 3]))
    """
    text = np.ascontiguousarray(data).view(np.uint8)
    edges: npt.NDArray[Any] = np.ascontiguousarray(offsets)
    if edges.dtype not in (np.int32, np.int64):
        raise ValueError(f"Offsets are int32 or int64; these are {edges.dtype}.")
    if edges.size and (edges[0] < 0 or edges[-1] > text.size or np.any(edges[1:] < edges[:-1])):
        raise ValueError(f"Offsets must rise within 0 … {text.size}, the size of the data.")
    return _backend.factorize(text, edges)  # type: ignore[no-any-return]


def set_threads(count: int | None) -> None:
    """Limit the threads of one native call; None returns to `ASTRAY_THREADS`, or else to the number of cores.

    Results do not depend on it, down to the last bit. The numpy kernels use one thread whatever is set.
    """
    if count is not None and count < 1:
        raise ValueError(f"At least one thread is needed; got {count}.")
    _backend.set_threads(count or 0)
