"""Leaves out rows that no recording has written: a damaged file may say anything, in cells that are well-formed.

Between the tables of a rank and everything that reads them, so that nobody else has to ask whether a step is negative
or a shape is one. What is left out is told, with the first row and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from astray.record import Phase, Role
from astray.store.columns import Coded, Table
from astray.store.native.schema import CALLS, TENSORS, Column
from astray.wording import counted

Bools = npt.NDArray[np.bool_]

FARTHEST = 1 << 53
"""Numbers of calls, steps and values end here: what is counted one by one never gets so far, and floats hold it."""

MOST_DIMENSIONS = 64  # of an array of numpy, and of most operations of torch
MOST_ELEMENTS = 1 << 58  # so that their bytes, 16 for each at most, fit into 63 bits

_COUNTED = ("zeros", "nan", "inf")
_MAGNITUDES = ("std", "l2", "absmax")
_EXTREMES = ("min", "max", "absmax")  # of finite elements
_NUMBERED = ("seq", "step", "micro", "call")
_WORDS = {"phase": frozenset(get_args(Phase)), "role": frozenset(get_args(Role))}


class _Wrong(NamedTuple):
    """Which rows break a rule, the column that shows it, and what there should be."""

    rows: Bools
    column: str
    expected: str


def sound_calls(table: Table) -> tuple[Table, list[str]]:
    """The calls that can have been recorded, and a sentence about the others."""
    return _sound(table, "calls", [*_common(table, CALLS), *_repeated(table)])


def sound_tensors(table: Table) -> tuple[Table, list[str]]:
    """The tensors that can have been recorded, and a sentence about the others."""
    return _sound(table, "tensors", [*_common(table, TENSORS), *_measured(table)])


def _sound(table: Table, name: str, broken: list[_Wrong]) -> tuple[Table, list[str]]:
    if not broken:
        return table, []
    bad = np.logical_or.reduce([wrong.rows for wrong in broken])
    row = int(np.argmax(bad))
    first = next(wrong for wrong in broken if wrong.rows[row])
    cell = table.row(row)[first.column]
    count = int(bad.sum())
    told = (
        f"{count:,} of {counted(len(table), name.removesuffix('s'))} {'says' if count == 1 else 'say'} what was never "
        f"recorded, and {'is' if count == 1 else 'are'} left out. The first is row {row}, with {first.column} "
        f"{_shown(cell)} in place of {first.expected}."
    )
    return table.take(~bad), [told]


def _shown(cell: Any) -> str:
    text = "nothing" if cell is None else repr(list(cell)) if isinstance(cell, tuple) else repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _common(table: Table, columns: tuple[Column, ...]) -> Iterator[_Wrong]:
    """Cells that are missing, words that are unknown, numbers that are negative or beyond all counting."""
    for column in columns:
        if not column.nullable:
            yield from _any(~table.valid(column.name), column.name, "what every row has")
        if column.type in ("int32", "int64"):
            numbers = table.numbers(column.name)
            least = 0 if column.name in _NUMBERED else -1  # which stands for none
            yield from _any((numbers < least) | (numbers > FARTHEST), column.name, "a number that something can have")
        elif column.name in _WORDS:
            known = _WORDS[column.name]
            unknown = _cells(table.coded(column.name), known.__contains__)
            yield from _any(unknown, column.name, f"one of {', '.join(sorted(known))}")


def _repeated(table: Table) -> Iterator[_Wrong]:
    """Calls whose number another call before them has."""
    seq = table.numbers("seq")
    if len(seq) > 1 and not (np.diff(seq) > 0).all():
        again = np.ones(len(seq), np.bool_)
        again[np.unique(seq, return_index=True)[1]] = False
        yield from _any(again, "seq", "a number of its own")


def _measured(table: Table) -> Iterator[_Wrong]:
    """Shapes that are none, and statistics that contradict themselves."""
    for name in ("shape", "stride"):
        yield from _any(_cells(table.coded(name), _is_shape if name == "shape" else _is_stride), name, f"a {name}")
    count, special = table.numbers("count"), np.zeros(len(table), np.int64)
    for name in _COUNTED:  # an element is one of these at most
        special += np.clip(table.numbers(name), 0, FARTHEST)
        yield from _any((count >= 0) & (special > count), name, "no more than there are elements")
    for name in _MAGNITUDES:
        yield from _any(table.numbers(name) < 0, name, "a magnitude")
    for name in _EXTREMES:
        yield from _any(np.isinf(table.numbers(name)), name, "a finite number")
    yield from _any(table.numbers("min") > table.numbers("max"), "min", "at most the largest element")


def _any(rows: Bools, column: str, expected: str) -> Iterator[_Wrong]:
    if rows.any():
        yield _Wrong(rows, column, expected)


def _cells(column: Coded[Any], is_right: Any) -> Bools:
    """Which rows hold a value that is not right; the few distinct ones are looked at."""
    wrong = np.array([*(not is_right(value) for value in column.values), False], np.bool_)
    return np.asarray(wrong[column.codes])


def _is_shape(sizes: tuple[int, ...]) -> bool:
    if len(sizes) > MOST_DIMENSIONS or min(sizes, default=0) < 0:
        return False
    return prod(max(size, 1) for size in sizes) <= MOST_ELEMENTS


def _is_stride(steps: tuple[int, ...]) -> bool:
    return len(steps) <= MOST_DIMENSIONS and all(abs(step) <= MOST_ELEMENTS for step in steps)
