"""Which rows of a rank are one value, and which hold the same bits.

Recordings have the column `value`. Runs of format 3 and older, other tools' dumps, and tensors without a version
counter do not: there the value is derived from the bits, by fingerprint or else by statistics. Rows with equal bits are
one value, except for constants such as zeros, which many tensors hold. For those, and where nothing was recorded of the
numbers, an input is taken to be the last earlier result of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.graph.calls import Bools, CallTree, Ints
from astray.graph.keys import one_key
from astray.store import Table

LARGEST = 1 << 62
"""No recording has so many values. A column that says so is damaged."""

_ALIKE = ("min", "max", "mean", "l2")
_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class Contents(NamedTuple):
    """What the tensors of a rank hold.

    code: the same for equal bits in one dtype and number of elements; 0 where nothing is known.
    telling: whether no other tensor is likely to hold the same: a constant of zeros, ones or another whole number is
        everywhere, and so is a tensor without one finite element.
    dtype, low, high: the least and the largest finite element, and in which dtype.
    """

    code: npt.NDArray[np.uint64]
    telling: Bools
    dtype: Ints
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def may_be_part(self, rows: Ints, of: Ints) -> Bools:
        """Whether rows may be views of others: nothing in them is below or above what is there."""
        with np.errstate(invalid="ignore"):
            beyond = (self.low[rows] < self.low[of]) | (self.high[rows] > self.high[of])
        return np.asarray(~beyond | (self.dtype[rows] != self.dtype[of]))


def contents(tensors: Table) -> Contents:
    """The bits of every row, as one number each."""
    low, high, size = (tensors.numbers(name) for name in ("min", "max", "count"))
    known, measured = tensors.valid("fingerprint"), (size >= 0) | ~np.isnan(high)  # a dump may not tell the size
    prints = tensors.numbers("fingerprint").astype(np.uint64, copy=False)
    code = np.where(known, prints, np.uint64(0))
    rest = np.flatnonzero(~known & measured)
    if len(rest):
        parts = [np.ascontiguousarray(tensors.numbers(name)[rest], np.float64).view(np.uint64) for name in _ALIKE]
        code[rest] = _mixed([*parts, tensors.numbers("zeros")[rest]])
    elements = np.where(size >= 0, size, _elements(tensors))
    code = _mixed([code, elements, tensors.coded("dtype").codes]) | np.uint64(1)
    code = np.where(known | measured, code, np.uint64(0))
    with np.errstate(invalid="ignore"):
        common = measured & ~((low < high) | (low != np.rint(low)) & ~np.isnan(low))
    telling = (known | measured) & ~common & ~(known & (prints == 0))
    return Contents(code, telling, tensors.coded("dtype").codes, low, high)


def number_values(tree: CallTree, tensors: Table, call_rows: Ints, held: Contents) -> Ints:
    """The number of each row's value: the column `value`, and numbers behind those where it has none."""
    value = tensors.numbers("value").astype(np.int64)
    value[value >= LARGEST] = -1
    unknown = np.flatnonzero(value < 0)
    if not len(unknown):
        return value
    place = one_key([tree.calls.numbers("step"), tree.calls.numbers("micro")])
    place = np.append(place, -1)[call_rows]
    telling = held.telling[unknown]
    _by_bits(value, unknown[telling], place, held)
    _by_order(value, unknown[~telling], place, held, tree, tensors, call_rows)
    return value


def _by_bits(value: Ints, rows: Ints, place: Ints, held: Contents) -> None:
    """Number rows alike that hold the same in one micro step, and like those with a number that do, too."""
    known = np.flatnonzero((value >= 0) & held.telling)
    at = np.concatenate([known, rows])
    first, group = _grouped(_mixed([held.code[at], place[at]]))
    given = value[at[first]]  # of a group the rows with a number come first
    fresh = np.flatnonzero(given < 0)
    fresh = fresh[np.argsort(at[first[fresh]], kind="stable")]
    given[fresh] = np.arange(len(fresh)) + value.max(initial=-1) + 1
    value[rows] = given[group[len(known) :]]


def _by_order(
    value: Ints, rows: Ints, place: Ints, held: Contents, tree: CallTree, tensors: Table, call_rows: Ints
) -> None:
    """Number results anew, and inputs like the last result of the same form before them."""
    if not len(rows):
        return
    calls = call_rows[rows]
    form = [tensors.coded(name).codes[rows] for name in ("dtype", "shape")]
    phase = np.append(tree.calls.coded("phase").codes, -1)[calls]
    key = _mixed([held.code[rows], place[rows], phase, *form])
    order = np.argsort(key, kind="stable")
    begins = np.concatenate([[True], key[order][1:] != key[order][:-1]])
    result, call = ~goes_in(tensors)[rows][order], calls[order]
    # A call that gives what the last call inside it gave has it from there.
    around = np.append(tree.outer, -1)[np.roll(call, 1)]
    same = result & np.roll(result, 1) & (around == call) & (call >= 0) & ~begins
    number = np.maximum.accumulate(np.where(begins | (result & ~same), np.arange(len(order)), 0))
    _, compact = np.unique(rows[order][number], return_inverse=True)
    value[rows[order]] = compact.reshape(-1) + value.max(initial=-1) + 1


def goes_in(tensors: Table) -> Bools:
    """Rows of tensors that their call takes; what it gives are outputs and gradients."""
    role = tensors.coded("role")
    return np.isin(role.codes, [role.code(name) for name in ("input", "parameter", "state")])


def _grouped(keys: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Of each distinct key the first place, and for each key which of these it is."""
    order = np.argsort(keys)  # not stable, which takes several times as long
    ordered = keys[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(begins) - 1
    return np.minimum.reduceat(order, np.flatnonzero(begins)) if len(order) else order, group


def _elements(tensors: Table) -> Ints:
    shape = tensors.coded("shape")
    sizes = [int(np.prod(one, dtype=np.int64)) for one in shape.values]
    return np.array([*sizes, 0], np.int64)[shape.codes]


def _mixed(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """One number for several, which no two combinations are likely to share."""
    found = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found ^= column.astype(np.uint64)
        found *= _ODD[0]
        found ^= found >> np.uint64(29)
        found *= _ODD[1]
        found ^= found >> np.uint64(32)
    return found
