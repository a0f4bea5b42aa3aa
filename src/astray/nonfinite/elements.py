"""Which element of a tensor is the first that is NaN or infinite, and where it is: by its row, or by kept values.

Every row of today says so beside its statistics. Runs of before do not; there the values tell, where all were kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.nonfinite.alarm import Element
from astray.nonfinite.step_rows import StepRows
from astray.placement import whole_shape
from astray.stats import dtypes

Values = Callable[[int], npt.NDArray[Any] | None]
"""The values of a row of the step's tensors as they were stored; None when they were not kept."""

_CELLS = ("dtype", "shape", "first_bad", "first_bad_value", "placement")


def first_bad(rows: StepRows, row: int, values: Values | None) -> Element | None:
    """The first element of a tensor that is no finite number; None where that is not known."""
    return told_by(rows.tensors[list(_CELLS)].row(row)) or _by_values(rows, row, values)


def told_by(cells: Mapping[str, Any]) -> Element | None:
    """The element that a row tells, given its cells; None where everything is finite, or it is not known."""
    place = cells["first_bad"]
    if place is None or place < 0:
        return None
    whole = None if cells["placement"] is None else whole_shape(cells["placement"])
    shape = cells["shape"] if whole is None else whole
    value = cells["first_bad_value"]
    value = math.nan if value is None else value  # NaN is null in a table without a mask
    dtype = dtypes.DTYPES.get(cells["dtype"])
    is_complex = dtype is not None and dtype.kind == "complex"
    if place >= prod(shape) * (1 + is_complex):  # the row contradicts itself
        return None
    if not is_complex:
        return Element(_unravelled(place, shape), value, whole=whole)
    place, imaginary = divmod(place, 2)
    return Element(_unravelled(place, shape), value, "imaginary" if imaginary else "real", whole)


def _by_values(rows: StepRows, row: int, values: Values | None) -> Element | None:
    tensors = rows.tensors
    partial = tensors.valid("part")[row] or int(tensors.numbers("sampled")[row]) >= 0
    raw = values(row) if values is not None and not partial else None
    if raw is None:
        return None
    numbers = raw if raw.dtype.kind in "fc" else dtypes.decode(raw, str(tensors["dtype"][row]))
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if not len(wrong):
        return None
    value, index = numbers.reshape(-1)[wrong[0]], _unravelled(int(wrong[0]), numbers.shape)
    if value.dtype.kind != "c":
        return Element(index, float(value))
    real = not np.isfinite(value.real)
    return Element(index, float(value.real if real else value.imag), "real" if real else "imaginary")


def _unravelled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(one) for one in np.unravel_index(place, shape))
