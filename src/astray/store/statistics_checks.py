"""Which statistics contradict each other: a mean beyond the largest element, an element beyond what its dtype holds.

A damaged file says such things, and whoever computes with them meets numbers that no tensor has. Both kinds of readers
ask here, that of our own runs and those of other tools' dumps, before anything else sees a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.stats import DTYPES
from astray.store.columns import DictionaryColumn

Bools = npt.NDArray[np.bool_]

EXTREMES = ("min", "max", "absmax")  # of finite elements
MAGNITUDES = ("std", "l2", "absmax")
COUNTED = ("zeros", "nan", "inf")

FARTHEST = 1 << 53
"""Numbers of calls, steps, elements and values end here: what is counted one by one never gets so far, and floats hold
it."""

LOOSE = 2.0
"""Statistics are off by roundings, and those that other tools take in half precision by more, but by no such factor."""


class Contradiction(NamedTuple):
    """Which rows break a rule, the column that shows it, and what there should be."""

    rows: Bools
    column: str
    expected: str


def contradictions(numbers: Callable[[str], npt.NDArray[Any]], dtype: DictionaryColumn[Any]) -> Iterator[Contradiction]:
    """Rows of statistics that no tensor has. `numbers` gives a column of them: NaN, or −1 of a count, is not known."""
    count, special = numbers("count"), np.zeros(len(dtype), np.int64)
    for name in COUNTED:  # an element is one of these at most
        special += np.clip(numbers(name), 0, FARTHEST)
        yield from any_of((count >= 0) & (special > count), name, "no more than there are elements")
    for name in MAGNITUDES:
        yield from any_of(numbers(name) < 0, name, "a magnitude")
    for name in EXTREMES:
        yield from any_of(np.isinf(numbers(name)), name, "a finite number")
    yield from any_of(numbers("min") > numbers("max"), "min", "at most the largest element")
    ends = [DTYPES[name].max if name in DTYPES else np.inf for name in dtype.values]
    largest = np.array([*ends, np.inf])[dtype.codes]
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the largest, twice as much is any
        for name in EXTREMES:
            yield from any_of(np.abs(numbers(name)) > LOOSE * largest, name, "what its dtype can hold")
        extreme, absmax = np.fmax(np.abs(numbers("min")), np.abs(numbers("max"))), numbers("absmax")
        apart = (absmax > LOOSE * extreme) | (extreme > LOOSE * absmax)
        yield from any_of(apart, "absmax", "the larger of its extremes")
        reach = LOOSE * np.fmin(np.fmax(extreme, absmax), largest)  # that of the dtype where no extreme is known
        for name in ("mean", "std"):
            yield from any_of(np.abs(numbers(name)) > reach, name, "no more than its largest element")
        most = np.where(count >= 0, reach * np.sqrt(np.maximum(count, 0)), np.inf)
        yield from any_of(numbers("l2") > most, "l2", "what so many elements add up to")


def any_of(rows: Bools, column: str, expected: str) -> Iterator[Contradiction]:
    """A rule that some rows break; nothing where none does."""
    if rows.any():
        yield Contradiction(rows, column, expected)
