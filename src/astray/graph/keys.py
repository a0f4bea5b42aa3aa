"""Keys as integers: many columns become one, and equal keys are found by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["find", "mixed_key", "number_repeats", "one_key", "repeats"]


Ints = npt.NDArray[np.integer[Any]]

_LARGEST = 1 << 62


def one_key(columns: Sequence[Ints]) -> Ints:
    """One integer for each distinct combination of the columns' values, as digits of a mixed radix."""
    key = np.zeros(len(columns[0]), np.int64)
    if not len(key):
        return key
    radix = 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        digits = high - low + 1
        if radix * digits > _LARGEST:  # too many possible keys for 64 bits: number only those that occur
            distinct, key = np.unique(key, return_inverse=True)
            radix = len(distinct)
        if radix * digits > _LARGEST:  # and of numbers that are far apart, those that are there
            distinct, column = np.unique(column, return_inverse=True)
            low, digits = 0, len(distinct)
        key *= digits
        key += column
        key -= low
        radix *= digits
    return key


def mixed_key(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """The same of columns that need all of 64 bits, such as fingerprints. Collisions are only by chance."""
    key = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        key ^= column.astype(np.uint64, copy=False)
        key *= np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(32)
    return key


def number_repeats(keys: Ints) -> Ints:
    """How often each key came before: [a, b, a, a] gives [0, 0, 1, 2]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    lengths = np.diff(np.append(first, len(keys)))
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.arange(len(keys)) - np.repeat(first, lengths)
    return numbers


def find(wanted: Ints, among: Ints) -> Ints:
    """Where in `among`, which has no repeats, each wanted key is; −1 where it is not."""
    if not len(among):
        return np.full(len(wanted), -1)
    order = np.argsort(among, kind="stable")
    place = np.searchsorted(among, wanted, sorter=order)
    found = order[np.minimum(place, len(among) - 1)]
    return np.where(among[found] == wanted, found, -1)


def repeats(keys: Ints) -> bool:
    """Whether a key occurs more than once."""
    ordered = np.sort(keys)
    return bool(np.any(ordered[1:] == ordered[:-1]))
