"""Reads the `placement` of a row: which part of a distributed tensor it is, and whether it is known which.

`capture` writes it, in the form that docs/format.md describes. Where a part is a box within the whole, its fingerprint
and its `first_bad` count elements as the whole does; where it is none, or nobody knows, as the part by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from astray.safe_text import read_plain

Runs = Sequence[Sequence[int]]
"""The indices that a part holds along one dimension, in order: stretches of (first index, how many)."""


def period_of(runs: Runs, size: int) -> int | None:
    """The distance at which several stretches of a dimension repeat, if that makes a box of them.

    >>> period_of([(0, 2), (4, 2)], 8)  # columns 0 and 1 of a 2 × 4 matrix
    4
    """
    (first, length), (second, _), *_ = runs
    period = second - first
    alike = all(tuple(run) == (first + number * period, length) for number, run in enumerate(runs))
    return period if alike and size % period == 0 and first % period + length <= period else None


_OTHER = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What comes of reading what another version of the recorder wrote, or a damaged disk."""


def whole_shape(placement: str) -> tuple[int, ...] | None:
    """The shape of the whole tensor, if a part counts its elements there.

    >>> whole_shape('{"shape":[10,6],"offset":[5,0]}'), whole_shape('{"shape":[10,6],"offset":null}')
    ((10, 6), None)
    """
    try:
        found = read_plain(placement)
        shape = tuple(found["shape"])
        if found["offset"] is None:
            return None
        if not all(type(size) is int and 0 <= size < 1 << 60 for size in shape):
            return None
        uneven = any(period_of(runs, shape[int(dim)]) is None for dim, runs in found.get("runs", {}).items())
    except _OTHER:
        return None
    return None if uneven else shape
