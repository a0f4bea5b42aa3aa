"""Checks kept values against the row that tells of them: a disk or a copy may have changed them since.

A row has the fingerprint of the whole tensor, so one bit that is another is seen. Of a slice, a sample or a part of a
distributed tensor it is not theirs; then the row's statistics must have room for what was kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from astray.stats import dtypes
from astray.stats.kernels import Strided, measure
from astray.store.columns import Table

_SLACK = 1e-5
"""How far statistics that were measured on a device may be off, relative to the largest element."""


def fits(tensors: Table, row: int, values: npt.NDArray[Any]) -> bool:
    """Whether kept values, as they were stored, can be those that the row was measured from."""
    is_whole = tensors["part"][row] is None and int(tensors.numbers("sampled")[row]) < 0
    if is_whole and tensors["placement"][row] is None and bool(tensors.valid("fingerprint")[row]):
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        found = measure(Strided.from_numpy(raw), statistics=False).fingerprint
        return found == int(tensors.numbers("fingerprint")[row])
    return _has_room(tensors.row(row), values)


def _has_room(known: dict[str, Any], values: npt.NDArray[Any]) -> bool:
    """Whether a row's statistics allow for values that are some of its tensor's."""
    counts = [known[name] for name in ("count", "nan", "inf")]
    if known["dtype"] not in dtypes.DTYPES or any(count is None or count < 0 for count in counts):
        return True
    found = measure(Strided.from_numpy(values, known["dtype"]), fingerprint=False).statistics
    if found is None or found.nan > known["nan"] or found.inf > known["inf"]:
        return found is None
    if found.min is None or found.max is None:
        return True
    low, high = known["min"], known["max"]
    if low is None or high is None:
        return False
    slack = _SLACK * max(abs(low), abs(high))
    return bool(low - slack <= found.min and found.max <= high + slack)
