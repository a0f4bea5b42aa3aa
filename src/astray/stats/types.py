"""What the kernels take and what they return.

A tensor reaches them as an address with strides, so that neither they nor their callers need a framework, and no array
object is made for the thousands of small tensors of a step. Nothing here keeps the memory alive: the caller must.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.records import Statistics
from astray.stats import dtypes


class Strided(NamedTuple):
    """A tensor in CPU memory.

    `address` is that of its first element in logical order. Strides count elements, as torch does; 0 repeats (an
    expanded dimension) and a negative one walks backwards.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any], dtype: str | None = None) -> Strided:
        """Describe a numpy array, which the caller must keep alive.

        `dtype` is needed where numpy lacks the type: bfloat16 held as uint16, 8-bit floats as uint8. Negative strides
        are taken as they are. A view whose strides are not multiples of the element (a field of a structured array) or
        whose bytes are swapped cannot be described; copy it first.
        """
        name = dtype or array.dtype.name
        itemsize = dtypes.find(name).itemsize
        if itemsize != array.itemsize or not array.dtype.isnative:
            raise ValueError(f"{array.dtype} elements cannot be read as {name}. Convert the array with astype first.")
        if any(step % itemsize for step in array.strides):
            raise ValueError(f"Strides {array.strides} are not multiples of {itemsize} bytes. Copy the array first.")
        stride = tuple(step // itemsize for step in array.strides)
        return cls(array.__array_interface__["data"][0], name, array.shape, stride)

    @property
    def size(self) -> int:
        """The number of elements; a complex one counts once here."""
        return prod(self.shape)

    def view(self) -> npt.NDArray[Any]:
        """The memory as a read-only array of the storage type, without copying; valid while the memory lives."""
        storage = dtypes.find(self.dtype).storage
        if self.size == 0:
            return np.empty(self.shape, storage)
        return np.asarray(_Memory(self, storage))


class _Memory:
    """Implements numpy's array interface for an address."""

    def __init__(self, tensor: Strided, storage: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.address, True),
            "typestr": storage.str,
            "shape": tensor.shape,
            "strides": tuple(step * storage.itemsize for step in tensor.stride),
        }


class ShardPosition(NamedTuple):
    """Where a shard sits in the whole tensor: the index of its first element, and the shape of the whole."""

    offset: tuple[int, ...]
    full_shape: tuple[int, ...]


class Measurement(NamedTuple):
    """The result of `measure`; None for what was not requested."""

    statistics: Statistics | None
    fingerprint: int | None


class Measurements(NamedTuple):
    """The measurements of many tensors, as columns.

    `moments` has the six measures of a `Statistics`, NaN where there is none; `counts` its four counts. `first_bad` is
    −1 where all is finite.
    """

    moments: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    fingerprints: npt.NDArray[np.uint64]
    first_bad: npt.NDArray[np.int64]
    first_bad_value: npt.NDArray[np.float64]

    def at(self, index: int) -> tuple[Statistics, int]:
        """The statistics and the fingerprint of one tensor."""
        cells = (*self.moments[:, index], *self.counts[:, index], self.first_bad[index], self.first_bad_value[index])
        named = dict(zip(Statistics._fields, (cell.item() for cell in cells), strict=True))
        statistics = Statistics.of(named)
        assert statistics is not None, "every count is known"
        return statistics, int(self.fingerprints[index])


class Contrast(NamedTuple):
    """How far a candidate is from its reference, element by element.

    `count` is all elements, `finite` those where both sides are finite: every measure is over these, computed in
    float64, and None when there are none. d is candidate − reference. Indices are flat and row-major, the first one
    on ties, −1 where there is none; those of complex tensors count real numbers (2 × element, + 1 for the imaginary
    part). A result beyond the range of float64 is inf, never NaN.
    """

    count: int  # type: ignore[assignment]  # tuples have a method of this name, which is not needed
    finite: int
    different: int
    """Elements whose values differ. Two NaN are equal, and so are 0 and −0."""
    mean_reference: float | None
    std_reference: float | None
    l2_reference: float | None
    mean_candidate: float | None
    std_candidate: float | None
    l2_candidate: float | None
    dot: float | None
    cosine: float | None
    """dot / (l2_reference · l2_candidate), right even where dot itself is beyond float64; None when a norm is 0."""
    sum_abs_error: float | None
    l2_error: float | None
    """√Σd²."""
    max_abs_error: float | None
    max_abs_index: int
    max_rel_error: float | None
    """The largest |d| / |reference| where the reference is not 0; None when it is 0 everywhere."""
    max_rel_index: int
    sum_rel_error: float | None
    """The sum of those ratios; right to 1e-6 where both types fit float32, which they may be computed in."""
    rel_count: int
    """Elements with a reference other than 0: the divisor that makes sum_rel_error a mean."""
    within_tolerance: int
    """Elements with |d| ≤ atol + rtol · |reference|."""
    within_1e3: int
    """Elements with |d| ≤ 0.001 · |reference|."""
    within_5e3: int
    """Elements with |d| ≤ 0.005 · |reference|."""
    max_ulp: int | None
    """The largest distance in representable numbers; None unless both have the same float type."""
    mean_ulp: float | None
    nan_reference: int
    nan_candidate: int
    inf_reference: int
    inf_candidate: int
    nonfinite_mismatch: int
    """Elements where only one side is not finite, or both are but differ (NaN against inf, inf against −inf)."""
    first_nonfinite_mismatch: int


class Slices(NamedTuple):
    """How far a candidate is from its reference in parts of a tensor: slices (all elements with one index), and rows.

    furthest: ‖d‖ of the slice that is furthest off · √(how many slices there are), which is ‖d‖ of the tensor if all
    slices are as far off. dim, index: which one; the first on ties.
    typical: likewise of the median of all rows (of an even number, the larger one); NaN where there are not eight of at
    least 16 elements, and of complex numbers. A row is what lies along the last dimension: the features of one token.
    """

    furthest: float
    dim: int
    index: int  # type: ignore[assignment]  # tuples have a method of this name, which is not needed
    typical: float
