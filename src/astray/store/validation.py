"""Drops what a damaged file holds: rows that no recording writes, and kept values that are not those of their row.

`run_format/reader.py` passes both tables through this module, so that no later stage has to check whether a step is
negative or a shape is valid. Dropped rows become a sentence with the first of them and what is wrong with it. Values
may have been changed by a disk or a copy: `matches_row` detects one wrong bit by the fingerprint of the whole tensor;
values of a slice, a sample or a shard only have to lie within the row's statistics. `contradictions` also serves the
readers of other tools' dumps (`foreign/dump_rows.py`): what is computed from damaged statistics are numbers that no
tensor has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import MOST_DIMENSIONS, MOST_ELEMENTS, is_shape
from astray.records import Phase, Role
from astray.stats import DTYPES, dtypes
from astray.stats.kernels import Strided, measure
from astray.store.columns import DictionaryColumn, Table
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.wording import counted

Bools = npt.NDArray[np.bool_]

EXTREMES = ("min", "max", "absmax")  # of finite elements
MAGNITUDES = ("std", "l2", "absmax")
COUNTED = ("zeros", "nan", "inf")

MOST_COUNTED = 1 << 53
"""Above any number of calls, steps, elements and values: counting one by one never gets so far. Exact in float64."""

TOLERANCE_FACTOR = 2.0
"""Statistics are off by roundings, those that other tools take in half precision by more, but not by this factor."""

_STATISTICS = ("min", "max", "mean", "std", "l2", "absmax")
_NUMBERED = ("seq", "step", "micro", "call")
_WORDS = {"phase": frozenset(get_args(Phase)), "role": frozenset(get_args(Role))}

_TOLERANCE = 1e-5
"""How far statistics that were measured on a device may be off, relative to the largest element."""


def valid_calls(table: Table) -> tuple[Table, list[str]]:
    """The calls that can have been recorded, and a sentence about the others."""
    return _without_invalid(table, "calls", [*_common(table, CALLS), *_repeated(table)])


def valid_tensors(table: Table) -> tuple[Table, list[str]]:
    """The tensors that can have been recorded, and a sentence about the others."""
    return _without_invalid(table, "tensors", [*_common(table, TENSORS), *_measured(table)])


def matches_row(tensors: Table, row: int, values: npt.NDArray[Any]) -> bool:
    """Whether kept values, as they were stored, can be those that the row was measured from."""
    is_whole = tensors["part"][row] is None and int(tensors.numbers("sampled")[row]) < 0
    if is_whole and tensors["placement"][row] is None and bool(tensors.valid("fingerprint")[row]):
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        fingerprint = measure(Strided.from_numpy(raw), statistics=False).fingerprint
        return fingerprint == int(tensors.numbers("fingerprint")[row])
    return _fits_statistics(tensors.row(row), values)


def _without_invalid(table: Table, name: str, broken: list[Contradiction]) -> tuple[Table, list[str]]:
    if not broken:
        return table, []
    bad = np.logical_or.reduce([wrong.rows for wrong in broken])
    row = int(np.argmax(bad))
    first = next(wrong for wrong in broken if wrong.rows[row])
    cell = table.row(row)[first.column]
    count = int(bad.sum())
    sentence = (
        f"{count:,} of {counted(len(table), name.removesuffix('s'))} {'says' if count == 1 else 'say'} what was never "
        f"recorded, and {'is' if count == 1 else 'are'} left out. The first is row {row}, with {first.column} "
        f"{_cell_text(cell)} in place of {first.expected}."
    )
    return table.take(~bad), [sentence]


def _cell_text(cell: Any) -> str:
    text = "nothing" if cell is None else repr(list(cell)) if isinstance(cell, tuple) else repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _common(table: Table, columns: tuple[Column, ...]) -> Iterator[Contradiction]:
    """Cells that are missing, words that are unknown, numbers that are negative or beyond `MOST_COUNTED`."""
    for column in columns:
        if not column.nullable:
            yield from contradiction_if(~table.valid(column.name), column.name, "what every row has")
        if column.type in ("int32", "int64"):
            numbers = table.numbers(column.name)
            least = 0 if column.name in _NUMBERED else -1  # −1 stands for null
            yield from contradiction_if(
                (numbers < least) | (numbers > MOST_COUNTED), column.name, "a number that something can have"
            )
        elif column.name in _WORDS:
            known = _WORDS[column.name]
            unknown = _cells(table.coded(column.name), known.__contains__)
            yield from contradiction_if(unknown, column.name, f"one of {', '.join(sorted(known))}")


def _repeated(table: Table) -> Iterator[Contradiction]:
    """Calls with the number of a call before them."""
    seq = table.numbers("seq")
    if len(seq) > 1 and not (np.diff(seq) > 0).all():
        again = np.ones(len(seq), np.bool_)
        again[np.unique(seq, return_index=True)[1]] = False
        yield from contradiction_if(again, "seq", "a number of its own")


def _measured(table: Table) -> Iterator[Contradiction]:
    """Shapes that no tensor has, and statistics that contradict each other."""
    for name in ("shape", "stride"):
        yield from contradiction_if(
            _cells(table.coded(name), is_shape if name == "shape" else _is_stride), name, f"a {name}"
        )
    for name in _STATISTICS:  # an unknown statistic is null, never NaN
        yield from contradiction_if(table.valid(name) & np.isnan(table.numbers(name)), name, "a number")
    yield from contradictions(table.numbers, table.coded("dtype"))


def _cells(column: DictionaryColumn[Any], is_right: Any) -> Bools:
    """Which rows hold a value that is not right; only the distinct ones are checked."""
    wrong = np.array([*(not is_right(value) for value in column.values), False], np.bool_)
    return np.asarray(wrong[column.codes])


def _is_stride(steps: tuple[int, ...]) -> bool:
    return len(steps) <= MOST_DIMENSIONS and all(abs(step) <= MOST_ELEMENTS for step in steps)


def _fits_statistics(known: dict[str, Any], values: npt.NDArray[Any]) -> bool:
    """Whether values can be a part of a tensor with these statistics."""
    counts = [known[name] for name in ("count", "nan", "inf")]
    if known["dtype"] not in dtypes.DTYPES or any(count is None or count < 0 for count in counts):
        return True
    kept = measure(Strided.from_numpy(values, known["dtype"]), fingerprint=False).statistics
    if kept is None or kept.nan > known["nan"] or kept.inf > known["inf"]:
        return kept is None
    if kept.min is None or kept.max is None:
        return True
    low, high = known["min"], known["max"]
    if low is None or high is None:
        return False
    slack = _TOLERANCE * max(abs(low), abs(high))
    return bool(low - slack <= kept.min and kept.max <= high + slack)


# -- which statistics contradict each other ----------------------------------------------------------------------------


class Contradiction(NamedTuple):
    """Which rows break a rule, the column that shows it, and what was expected."""

    rows: Bools
    column: str
    expected: str


def contradictions(numbers: Callable[[str], npt.NDArray[Any]], dtype: DictionaryColumn[Any]) -> Iterator[Contradiction]:
    """Rows of statistics that no tensor has. `numbers` returns a column; NaN, or −1 in a count, stands for unknown."""
    count, special = numbers("count"), np.zeros(len(dtype), np.int64)
    for name in COUNTED:  # an element is at most one of these
        special += np.clip(numbers(name), 0, MOST_COUNTED)
        yield from contradiction_if((count >= 0) & (special > count), name, "no more than there are elements")
    for name in MAGNITUDES:
        yield from contradiction_if(numbers(name) < 0, name, "a magnitude")
    for name in EXTREMES:
        yield from contradiction_if(np.isinf(numbers(name)), name, "a finite number")
    yield from contradiction_if(numbers("min") > numbers("max"), "min", "at most the largest element")
    ends = [DTYPES[name].max if name in DTYPES else np.inf for name in dtype.values]
    largest = np.array([*ends, np.inf])[dtype.codes]
    with np.errstate(over="ignore", invalid="ignore"):  # twice a number near the largest is infinite, which allows any
        for name in EXTREMES:
            yield from contradiction_if(
                np.abs(numbers(name)) > TOLERANCE_FACTOR * largest, name, "what its dtype can hold"
            )
        extreme, absmax = np.fmax(np.abs(numbers("min")), np.abs(numbers("max"))), numbers("absmax")
        apart = (absmax > TOLERANCE_FACTOR * extreme) | (extreme > TOLERANCE_FACTOR * absmax)
        yield from contradiction_if(apart, "absmax", "the larger of its extremes")
        reach = TOLERANCE_FACTOR * np.fmin(
            np.fmax(extreme, absmax), largest
        )  # the dtype's largest where no extreme is known
        for name in ("mean", "std"):
            yield from contradiction_if(np.abs(numbers(name)) > reach, name, "no more than its largest element")
        most = np.where(count >= 0, reach * np.sqrt(np.maximum(count, 0)), np.inf)
        yield from contradiction_if(numbers("l2") > most, "l2", "what so many elements add up to")


def contradiction_if(rows: Bools, column: str, expected: str) -> Iterator[Contradiction]:
    """Yields the contradiction of these rows, if there is any such row."""
    if rows.any():
        yield Contradiction(rows, column, expected)
