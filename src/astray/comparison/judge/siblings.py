"""The gains of siblings: rows of the same family (`Sources.families`) at other sites of the same two runs.

Reads gains from `surprise`, and holds those of a noise run. A fault is the odd one out among its siblings, however
large the noise is that all of them share.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Bools, Floats, Ints


class SiblingGains(NamedTuple):
    """For each row the largest gain among its family at other sites, and at how many."""

    largest: Floats
    sites: Ints


class Families:
    """Rows by family and site, sorted once for every use of their gains.

    >>> families = Families(np.zeros(3, int), np.arange(3))
    >>> families.others(np.array([9.0, 1.0, 2.0])).largest.tolist()  # each row's own site is left out
    [2.0, 9.0, 9.0]
    >>> families.before(np.array([1.0, 9.0, 2.0])).largest.tolist()  # only sites that came before
    [0.0, 1.0, 9.0]
    """

    def __init__(self, family: Ints, site: Ints) -> None:
        self._order = np.lexsort((site, family))
        families, sites = family[self._order], site[self._order]
        new_family = _changes(families)
        self._new_site = new_family | _changes(sites)
        self._members = np.flatnonzero(self._new_site)
        self._starts = np.flatnonzero(new_family[self._members])  # families, among the sites
        self._sizes = np.diff(np.append(self._starts, len(self._members)))
        self._family = np.repeat(np.arange(len(self._starts)), self._sizes)
        self._site_of_row = np.cumsum(self._new_site) - 1

    def others(self, gain: Floats) -> SiblingGains:
        """The largest gain of each row's family at other sites."""
        by_site, starts, family = self._by_site(gain), self._starts, self._family
        if not len(by_site):
            return SiblingGains(by_site, self._members)
        first = np.maximum.reduceat(by_site, starts)
        top = by_site == first[family]
        alone = np.add.reduceat(top, starts) == 1  # else another site has the same
        second = np.maximum.reduceat(np.where(top, -np.inf, by_site), starts)
        others = np.where(top & alone[family], second[family], first[family])
        return SiblingGains(self._spread_out(np.maximum(others, 0.0)), self._spread_out(self._sizes[family] - 1))

    def before(self, gain: Floats) -> SiblingGains:
        """The largest gain of each row's family at sites that came before, in the order of the rows."""
        by_site = self._by_site(gain)
        if not len(by_site):
            return SiblingGains(by_site, self._members)
        order = self._by_appearance
        begins = np.zeros(len(order), np.bool_)
        begins[self._starts] = True
        largest, count = np.zeros(len(order)), np.zeros(len(order), np.int64)
        largest[order] = running_maximum(by_site[order], self._family, begins)
        count[order] = np.arange(len(order)) - self._starts[self._family]
        return SiblingGains(self._spread_out(largest), self._spread_out(count))

    @cached_property
    def _by_appearance(self) -> Ints:
        """The sites, family by family, in the order in which they came."""
        first = np.minimum.reduceat(self._order, self._members)
        return np.lexsort((first, self._family))

    def _by_site(self, gain: Floats) -> Floats:
        return np.maximum.reduceat(gain[self._order], self._members) if len(gain) else gain

    def _spread_out(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        by_row = np.empty(len(self._order), numbers.dtype)
        by_row[self._order] = numbers[self._site_of_row]
        return by_row


def _changes(column: Ints) -> Bools:
    return np.concatenate([[True], column[1:] != column[:-1]])[: len(column)]


def running_maximum(numbers: Floats, group: Ints, begins: Bools) -> Floats:
    """The largest number before each within its group, 0 for the first. No number is negative.

    Groups and numbers are put into one integer each, so that one running maximum serves all groups: numbers that are
    not negative are in order by their bits, of which float32 has few enough.
    """
    bits = numbers.astype(np.float32).view(np.int32)
    running = np.maximum.accumulate((group.astype(np.int64) << 32) | bits)
    before = (np.concatenate([[0], running[:-1]]) & 0xFFFFFFFF).astype(np.int32)
    return np.where(begins, 0.0, before.view(np.float32).astype(np.float64))


class Gains(NamedTuple):
    """The gains that a noise run showed, by measure and row of the reference's tensors.

    by_row: in the row's own step. It counts as no steadier than its siblings there: its own gain, or the root mean
    square of the family's gains if that is more. in_any_step: the largest of the same tensor in any step, for rows that
    have no siblings.
    """

    by_row: dict[str, Floats]
    in_any_step: dict[str, Floats]
    rows: Ints  # of the reference's tensors, for each pair; −1 for none

    def take(self, at: Ints) -> Gains:
        """Those of some pairs."""
        return self._replace(rows=self.rows[at])

    def of(self, name: str, at: Ints, alone: Bools) -> Floats:
        """The gains of some pairs by a measure; NaN where the noise run has none. alone: pairs without siblings."""
        by_row, in_any_step = (
            np.append(column[name], np.nan)[self.rows[at]] for column in (self.by_row, self.in_any_step)
        )
        return np.where(alone, in_any_step, by_row)


def largest_of_family(gain: Floats, family: Ints) -> Floats:
    """For each row the largest gain in its family, itself included."""
    _, number = np.unique(family, return_inverse=True)
    largest = np.zeros(int(number.max(initial=-1)) + 1)
    np.maximum.at(largest, number, gain)
    return largest[number]


def rms_of_family(gain: Floats, family: Ints) -> Floats:
    """For each row the root mean square of the gains in its family."""
    _, number = np.unique(family, return_inverse=True)
    return np.asarray(np.sqrt(np.bincount(number, gain * gain) / np.bincount(number))[number])
