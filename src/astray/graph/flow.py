"""Which result made the value of each row.

A value is made by the result that shows it first. That is a result of the innermost call, because a call's results are
recorded after those of the calls inside it. A call that returns one of its inputs unchanged made nothing. The maker of
a view (another part of a memory, or another order) is the call that returned this view, or else the call that made the
memory. Memory that unrecorded code wrote and that holds the bits of an earlier result is a copy of it; so the maker of
a weight is the optimizer's result of the step before.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from astray.graph.calls import NO_ROW, Bools, CallTree, Ints
from astray.graph.values import Contents, contents, goes_in, number_values
from astray.store import Table


class Flow(CallTree):
    """The flow of values through the calls of a rank, as columns over its tensors."""

    def __init__(self, calls: Table, tensors: Table, call_rows: Ints) -> None:
        super().__init__(calls)
        self.tensors, self.call_rows = tensors, call_rows

    @cached_property
    def takes(self) -> Bools:
        """Rows of what a call takes: inputs, parameters and states. The others are what it gives."""
        return goes_in(self.tensors)

    @cached_property
    def contents(self) -> Contents:
        """What the rows hold, as far as their bits tell."""
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
        """For each row the first that shows the same value. Of one that nothing has made: who was given it first."""
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
        code = np.where(self.contents.telling[rows], self.contents.code[rows], numbers.astype(np.uint64) * np.uint64(2))
        order = np.lexsort((rows, step, code))
        begins = np.concatenate([[True], (np.diff(code[order]) != 0) | (np.diff(step[order]) != 0)])[: len(order)]
        same = np.empty(len(order), np.int64)
        same[order] = numbers[order][np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        of_value = np.arange(int(self._number.max(initial=-1)) + 1)
        of_value[numbers] = same
        return np.where(self.maker >= 0, self.maker, of_value[self._number] + len(self.maker))


def find_makers(value: Ints, held: Contents, call: Ints, takes: Bools) -> Ints:
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
    lost = np.flatnonzero((found < 0) & takes & held.telling)
    if len(lost):
        makers = np.flatnonzero((found == rows) & held.telling)
        found[lost] = _last_alike(held, makers, lost)
    return found


def _exact(value: Ints, held: Contents) -> Ints:
    """One number for each value in each order and part in which it is seen: for most values there is one of these."""
    usual = np.zeros(int(value.max(initial=-1)) + 1, np.uint64)
    usual[value[::-1]] = held.code[::-1]
    odd = np.flatnonzero(usual[value] != held.code)
    found = value.copy()
    if len(odd):
        pair = (value[odd].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ held.code[odd]
        found[odd] = np.unique(pair, return_inverse=True)[1].reshape(-1) + len(usual)
    return found


def _made_first(number: Ints, call: Ints, takes: Bools) -> Ints:
    """For each number the row that made it, or one behind all rows."""
    nowhere = len(number)
    first = np.full(int(number.max(initial=-1)) + 1, nowhere)
    first[number[::-1]] = np.arange(nowhere)[::-1]
    given = np.append(takes, True)[first]  # seen first where a call takes it
    first[given] = nowhere
    # Code that was not recorded has made these, and a call that is around it may still be the one to give it.
    late = np.flatnonzero(~takes & given[number])
    if len(late):
        taken = np.flatnonzero(takes & given[number])
        taken = taken[np.isin(call[taken], call[late])]
        gives, has = (call[at].astype(np.int64) * (len(first) + 1) + number[at] for at in (late, taken))
        late = late[~np.isin(gives, has)]
        first[number[late[::-1]]] = late[::-1]
    return first


def _last_alike(held: Contents, makers: Ints, wanted: Ints) -> Ints:
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
