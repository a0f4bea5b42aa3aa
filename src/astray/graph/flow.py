"""Which rows of a rank are one value, and which result made it.

Recordings have the column `value`. Runs of format 3 and older, other tools' dumps, and tensors without a version
counter do not: there `number_values` derives it from the bits, by fingerprint or else by statistics. Rows with equal
bits are one value, except for constants such as zeros, which many tensors hold. For those, and where nothing was
recorded of the numbers, an input is taken to be the last earlier result of the same shape and dtype.

A value is made by the result that shows it first. That is a result of the innermost call, because a call's results are
recorded after those of the calls inside it. A call that returns one of its inputs unchanged made nothing. The maker of
a view (another part of a memory, or another order) is the call that returned this view, or else the call that made the
memory. Memory that unrecorded code wrote and that holds the bits of an earlier result is a copy of it; so the maker of
a weight is the optimizer's result of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.graph.calls import NO_ROW, Bools, CallTree, Ints
from astray.graph.keys import one_key
from astray.store import Table


class ValueFlow(CallTree):
    """The flow of values through the calls of a rank, as columns over its tensors."""

    def __init__(self, calls: Table, tensors: Table, call_rows: Ints) -> None:
        super().__init__(calls)
        self.tensors, self.call_rows = tensors, call_rows

    @cached_property
    def takes(self) -> Bools:
        """Rows of what a call takes: inputs, parameters and states. The others are what it gives."""
        return goes_in(self.tensors)

    @cached_property
    def contents(self) -> ValueColumns:
        """What the rows hold, as far as their bits show it."""
        return contents(self.tensors)

    @cached_property
    def value(self) -> Ints:
        """Which value each row is; derived from the bits where it was not recorded."""
        return number_values(self, self.tensors, self.call_rows, self.contents)

    @cached_property
    def maker(self) -> Ints:
        """For each row the result that made what it shows, −1 where no recorded call did. A maker has itself.

        Of a call's result it is that of the innermost call that gave it, of a weight what the optimizer left of it the
        step before. What a program saves by itself was made by none of its saves.
        """
        return find_makers(self._number, self.contents, self.call_rows, self._is_given)

    @cached_property
    def producer(self) -> Ints:
        """For each row that goes into a call the result that made it, −1 where no recorded call did, and for others."""
        return np.where(self.takes, self.maker, NO_ROW)

    @cached_property
    def source_call(self) -> Ints:
        """The call of each row's `producer`, −1 where there is none."""
        return np.where(self.producer >= 0, self.call_rows[self.producer], NO_ROW)

    @cached_property
    def first_seen(self) -> Ints:
        """For each row the first that shows the same value. Where nothing has made it, the first that was given it."""
        first = np.full(int(self._flows.max(initial=-1)) + 1, NO_ROW)
        first[self._flows[::-1]] = np.arange(len(self._flows))[::-1]
        return first[self._flows]

    @cached_property
    def _number(self) -> Ints:
        """Values by numbers from 0 on. Those of the last steps of a long program are large."""
        least, most = int(self.value.min(initial=0)), int(self.value.max(initial=0))
        if most - least <= 4 * len(self.value):
            return self.value - least
        return np.unique(self.value, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _is_given(self) -> Bools:
        """What a call takes, and what a program saves by itself: no call has made it that shows it."""
        saved = np.append(self._is("kind", "custom") & self.is_forward, False)
        return np.asarray(self.takes | saved[self.call_rows])

    @cached_property
    def _flows(self) -> Ints:
        """One number for all rows that show the same: its maker, or behind those the value that nothing has made.

        Of these, values that hold the same bits in one step are one: a weight that an optimizer finds where it was.
        """
        unmade = np.flatnonzero(self.maker < 0)
        numbers, first = np.unique(self._number[unmade], return_index=True)
        rows = unmade[first]
        step = np.append(self.calls.numbers("step"), NO_ROW)[self.call_rows[rows]]
        code = np.where(
            self.contents.distinctive[rows], self.contents.code[rows], numbers.astype(np.uint64) * np.uint64(2)
        )
        order = np.lexsort((rows, step, code))
        begins = np.concatenate([[True], (np.diff(code[order]) != 0) | (np.diff(step[order]) != 0)])[: len(order)]
        same = np.empty(len(order), np.int64)
        same[order] = numbers[order][np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        of_value = np.arange(int(self._number.max(initial=-1)) + 1)
        of_value[numbers] = same
        return np.where(self.maker >= 0, self.maker, of_value[self._number] + len(self.maker))


def find_makers(value: Ints, held: ValueColumns, call: Ints, takes: Bools) -> Ints:
    """For each row the result that made what it shows, −1 where no recorded call did; a maker has itself.

    call: of each row. takes: whether the call takes it. Rows are in the order of observation.
    """
    rows = np.arange(len(value))
    exact = _exact(value, held)
    found = _made_first(exact, call, takes)[exact]
    found = np.where(found <= rows, found, NO_ROW)
    by_memory = _made_first(value, call, takes)[value]
    views = np.flatnonzero((found < 0) & (by_memory <= rows))
    views = views[held.may_be_part(views, by_memory[views])]  # else it was written past its version counter
    found[views] = by_memory[views]
    lost = np.flatnonzero((found < 0) & takes & held.distinctive)
    if len(lost):
        makers = np.flatnonzero((found == rows) & held.distinctive)
        found[lost] = _last_alike(held, makers, lost)
    return found


def _exact(value: Ints, held: ValueColumns) -> Ints:
    """A number for each value in each order and part in which it is seen: for most values there is one of these."""
    usual = np.zeros(int(value.max(initial=-1)) + 1, np.uint64)
    usual[value[::-1]] = held.code[::-1]
    odd = np.flatnonzero(usual[value] != held.code)
    found = value.copy()
    if len(odd):
        pair = (value[odd].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ held.code[odd]
        found[odd] = np.unique(pair, return_inverse=True)[1].reshape(-1) + len(usual)
    return found


def _made_first(number: Ints, call: Ints, takes: Bools) -> Ints:
    """For each number the row that made it; the number of rows where none did."""
    nowhere = len(number)
    first = np.full(int(number.max(initial=-1)) + 1, nowhere)
    first[number[::-1]] = np.arange(nowhere)[::-1]
    given = np.append(takes, True)[first]  # seen first where a call takes it
    first[given] = nowhere
    # Unrecorded code made these, and the call around that code may still be the one that returns the value.
    late = np.flatnonzero(~takes & given[number])
    if len(late):
        taken = np.flatnonzero(takes & given[number])
        taken = taken[np.isin(call[taken], call[late])]
        gives, has = (call[at].astype(np.int64) * (len(first) + 1) + number[at] for at in (late, taken))
        late = late[~np.isin(gives, has)]
        first[number[late[::-1]]] = late[::-1]
    return first


def _last_alike(held: ValueColumns, makers: Ints, wanted: Ints) -> Ints:
    """For each wanted row the last maker before it with the same bits."""
    makers = makers[np.isin(held.code[makers], held.code[wanted])]
    at = np.concatenate([makers, wanted])
    order = np.lexsort((at, held.code[at]))
    is_maker = order < len(makers)
    last = np.maximum.accumulate(np.where(is_maker, np.arange(len(order)), -1))
    source = np.where(last >= 0, at[order[last]], NO_ROW)
    alike = (source >= 0) & (held.code[source] == held.code[at[order]])
    found = np.empty(len(at), np.int64)
    found[order] = np.where(alike, source, NO_ROW)
    return found[len(makers) :]


# -- which rows are one value ------------------------------------------------------------------------------------------


LARGEST = 1 << 62
"""No recording has so many values. A column with such a number is damaged."""

_ALIKE = ("min", "max", "mean", "l2")
_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class ValueColumns(NamedTuple):
    """What the tensors of a rank hold.

    code: the same for equal bits in one dtype and number of elements; 0 where nothing is known.
    distinctive: whether equal bits mean the same value: constants of zeros, ones or another whole number are in many
        tensors, and so is a tensor without a finite element.
    dtype, low, high: the dtype, and the least and the largest finite element.
    """

    code: npt.NDArray[np.uint64]
    distinctive: Bools
    dtype: Ints
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def may_be_part(self, rows: Ints, of: Ints) -> Bools:
        """Whether rows may be views of others: no element of them is below or above those of the others."""
        with np.errstate(invalid="ignore"):
            beyond = (self.low[rows] < self.low[of]) | (self.high[rows] > self.high[of])
        return np.asarray(~beyond | (self.dtype[rows] != self.dtype[of]))


def goes_in(tensors: Table) -> Bools:
    """Rows of tensors that their call takes; what it gives are outputs and gradients."""
    role = tensors.coded("role")
    return np.isin(role.codes, [role.code(name) for name in ("input", "parameter", "state")])


def contents(tensors: Table) -> ValueColumns:
    """The bits of every row, as one number each."""
    low, high, size = (tensors.numbers(name) for name in ("min", "max", "count"))
    known, measured = tensors.valid("fingerprint"), (size >= 0) | ~np.isnan(high)  # a dump may lack the size
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
    distinctive = (known | measured) & ~common & ~(known & (prints == 0))
    return ValueColumns(code, distinctive, tensors.coded("dtype").codes, low, high)


def number_values(tree: CallTree, tensors: Table, call_rows: Ints, held: ValueColumns) -> Ints:
    """The number of each row's value: the column `value`, and numbers behind those where it has none."""
    value = tensors.numbers("value").astype(np.int64)
    value[value >= LARGEST] = -1
    unknown = np.flatnonzero(value < 0)
    if not len(unknown):
        return value
    place = one_key([tree.calls.numbers("step"), tree.calls.numbers("micro")])
    place = np.append(place, -1)[call_rows]
    distinctive = held.distinctive[unknown]
    _by_bits(value, unknown[distinctive], place, held)
    _by_order(value, unknown[~distinctive], place, held, tree, tensors, call_rows)
    return value


def _by_bits(value: Ints, rows: Ints, place: Ints, held: ValueColumns) -> None:
    """Give rows with the same bits in one micro step the same number; that of a numbered row, if there is one."""
    known = np.flatnonzero((value >= 0) & held.distinctive)
    at = np.concatenate([known, rows])
    first, group = _grouped(_mixed([held.code[at], place[at]]))
    given = value[at[first]]  # of a group the rows with a number come first
    fresh = np.flatnonzero(given < 0)
    fresh = fresh[np.argsort(at[first[fresh]], kind="stable")]
    given[fresh] = np.arange(len(fresh)) + value.max(initial=-1) + 1
    value[rows] = given[group[len(known) :]]


def _by_order(
    value: Ints, rows: Ints, place: Ints, held: ValueColumns, tree: CallTree, tensors: Table, call_rows: Ints
) -> None:
    """Give each result a number of its own, and inputs that of the last result of the same form before them."""
    if not len(rows):
        return
    calls = call_rows[rows]
    form = [tensors.coded(name).codes[rows] for name in ("dtype", "shape")]
    phase = np.append(tree.calls.coded("phase").codes, -1)[calls]
    key = _mixed([held.code[rows], place[rows], phase, *form])
    order = np.argsort(key, kind="stable")
    begins = np.concatenate([[True], key[order][1:] != key[order][:-1]])
    result, call = ~goes_in(tensors)[rows][order], calls[order]
    # A result like the last one of a call inside is that one, passed on.
    around = np.append(tree.outer, -1)[np.roll(call, 1)]
    same = result & np.roll(result, 1) & (around == call) & (call >= 0) & ~begins
    number = np.maximum.accumulate(np.where(begins | (result & ~same), np.arange(len(order)), 0))
    _, compact = np.unique(rows[order][number], return_inverse=True)
    value[rows[order]] = compact.reshape(-1) + value.max(initial=-1) + 1


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
