"""Statistics and the fingerprint of a tensor that comes in blocks, put together as if it had come whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import Spec
from astray.records import Statistics
from astray.stats import DTYPES, Measurement, Shard, Strided, measure, merge_fingerprints


def measure_blocks(blocks: Iterable[npt.NDArray[Any]], spec: Spec) -> Measurement:
    """Measure blocks that follow each other in row-major order. One block alone gives what `measure` gives."""
    found: list[Measurement] = []
    start = 0
    for block in blocks:
        whole = block.size == spec.size
        shard = None if whole else Shard((start,), (spec.size,))
        found.append(measure(Strided.from_numpy(block, spec.dtype), shard=shard))
        start += block.size
    if not found:
        nothing = np.empty(0, DTYPES[spec.dtype].storage)
        return measure(Strided.from_numpy(nothing, spec.dtype))
    if len(found) == 1:
        return found[0]
    statistics = [one.statistics for one in found if one.statistics is not None]
    prints = [one.fingerprint for one in found if one.fingerprint is not None]
    return Measurement(merge_statistics(statistics), merge_fingerprints(prints))


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of a whole from those of its parts; exact but for the rounding of float64.

    Each part counts its first bad element as the whole does.

    >>> one, other = Statistics(0, 2, 1, 1, 2, 2, 1, 0, 0, 2), Statistics(4, 4, 4, 0, 4, 4, 0, 1, 0, 2)
    >>> merge_statistics([one, other])[:4]
    (0, 4, 2.0, 1.632993161855452)
    """
    counts = [sum(part[field] or 0 for part in parts) for field in range(6, 10)]
    known = [part for part in parts if part.absmax is not None]
    bad = ((part.first_bad, part.first_bad_value) for part in parts if part.first_bad is not None)
    first = min(bad, default=(None, None))
    if not known:
        return Statistics(None, None, None, None, None, None, *map(int, counts), *first)
    weights = [part.count - part.nan - part.inf for part in known]
    total = sum(weights)
    scale = max(_number(part.absmax) for part in known) or 1.0  # so that no square overflows
    means = [_number(part.mean) / scale for part in known]
    mean = math.fsum(weight * one for weight, one in zip(weights, means, strict=True)) / total
    spread = math.fsum(
        weight * ((_number(part.std) / scale) ** 2 + (one - mean) ** 2)
        for weight, one, part in zip(weights, means, known, strict=True)
    )
    return Statistics(
        min(_number(part.min) for part in known),
        max(_number(part.max) for part in known),
        mean * scale,
        math.sqrt(spread / total) * scale,
        math.sqrt(math.fsum((_number(part.l2) / scale) ** 2 for part in known)) * scale,
        max(_number(part.absmax) for part in known),
        *map(int, counts),
        *first,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
