"""Which statistics contradict each other: a mean beyond the largest element, an element beyond what its dtype holds.

A damaged file says such things, and what is computed from them are numbers that no tensor has. The reader of our runs
(`run_format/validation.py`) and those of dumps (`foreign/dump_rows.py`) ask here before anything else sees a row.
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
"""Above any number of calls, steps, elements and values: counting one by one never gets so far. Exact in float64."""

LOOSE = 2.0
"""Statistics are off by roundings, those that other tools take in half precision by more, but not by this factor."""


class Contradiction(NamedTuple):
    """Which rows break a rule, the column that shows it, and what should be there."""

    rows: Bools
    column: str
    expected: str


def contradictions(numbers: Callable[[str], npt.NDArray[Any]], dtype: DictionaryColumn[Any]) -> Iterator[Contradiction]:
    """Rows of statistics that no tensor has. `numbers` gives a column; NaN, or −1 in a count, stands for unknown."""
    count, special = numbers("count"), np.zeros(len(dtype), np.int64)
    for name in COUNTED:  # an element is at most one of these
        special += np.clip(numbers(name), 0, FARTHEST)
        yield from any_of((count >= 0) & (special > count), name, "no more than there are elements")
    for name in MAGNITUDES:
        yield from any_of(numbers(name) < 0, name, "a magnitude")
    for name in EXTREMES:
        yield from any_of(np.isinf(numbers(name)), name, "a finite number")
    yield from any_of(numbers("min") > numbers("max"), "min", "at most the largest element")
    ends = [DTYPES[name].max if name in DTYPES else np.inf for name in dtype.values]
    largest = np.array([*ends, np.inf])[dtype.codes]
    with np.errstate(over="ignore", invalid="ignore"):  # twice a number near the largest is infinite, which allows any
        for name in EXTREMES:
            yield from any_of(np.abs(numbers(name)) > LOOSE * largest, name, "what its dtype can hold")
        extreme, absmax = np.fmax(np.abs(numbers("min")), np.abs(numbers("max"))), numbers("absmax")
        apart = (absmax > LOOSE * extreme) | (extreme > LOOSE * absmax)
        yield from any_of(apart, "absmax", "the larger of its extremes")
        reach = LOOSE * np.fmin(np.fmax(extreme, absmax), largest)  # the dtype's largest where no extreme is known
        for name in ("mean", "std"):
            yield from any_of(np.abs(numbers(name)) > reach, name, "no more than its largest element")
        most = np.where(count >= 0, reach * np.sqrt(np.maximum(count, 0)), np.inf)
        yield from any_of(numbers("l2") > most, "l2", "what so many elements add up to")


def any_of(rows: Bools, column: str, expected: str) -> Iterator[Contradiction]:
    """The contradiction of these rows; none where no row is set."""
    if rows.any():
        yield Contradiction(rows, column, expected)
