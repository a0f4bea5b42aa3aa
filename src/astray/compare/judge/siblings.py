"""The gains of siblings: rows of the same family at other sites of the same two runs.

Reads the gains of `surprise`, and keeps those of a noise run. A fault is the odd one out among its siblings, however
large the noise is that all of them share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.compare.keys import one_key
from astray.compare.rows import Bools, Floats, Ints


class Others(NamedTuple):
    """For each row the largest gain among its family at other sites, and at how many."""

    largest: Floats
    sites: Ints


def largest_of_others(gain: Floats, family: Ints, site: Ints, *, least: int) -> Others:
    """Leave each row's own site out.

    >>> others = largest_of_others(np.array([9.0, 1.0, 2.0]), np.zeros(3, int), np.arange(3), least=1)
    >>> others.largest.tolist(), others.sites.tolist()
    ([2.0, 9.0, 9.0], [2, 2, 2])

    least: families of fewer others are not worth the time.
    """
    largest, count = np.zeros(len(gain)), np.zeros(len(gain), np.int64)
    if not len(gain):
        return Others(largest, count)
    order = np.lexsort((site, family))
    families, sites = family[order], site[order]
    new_family = np.concatenate([[True], families[1:] != families[:-1]])
    new_site = new_family | np.concatenate([[True], sites[1:] != sites[:-1]])
    members = np.flatnonzero(new_site)
    by_site = np.maximum.reduceat(gain[order], members)
    starts = np.flatnonzero(new_family[members])  # families, among the sites
    sizes = np.diff(np.append(starts, len(members)))
    first = np.maximum.reduceat(by_site, starts)
    whose = np.repeat(np.arange(len(starts)), sizes)
    top = by_site == first[whose]
    alone = np.add.reduceat(top, starts) == 1  # else another site has the same
    rest = np.where(top, -np.inf, by_site)
    second = np.maximum.reduceat(rest, starts)
    others = np.where(top & alone[whose], second[whose], first[whose])
    spread = np.cumsum(new_site) - 1
    largest[order] = np.maximum(others, 0.0)[spread]
    count[order] = (sizes[whose] - 1)[spread]
    largest[count < least] = 0.0
    return Others(largest, count)


def largest_before(gain: Floats, family: Ints, site: Ints) -> Others:
    """Of the sites of a family that came before, in the order of the rows: whatever is wrong later has no part in it.

    >>> largest_before(np.array([1.0, 9.0, 2.0]), np.zeros(3, int), np.arange(3)).largest.tolist()
    [0.0, 1.0, 9.0]
    """
    if not len(gain):
        return Others(np.zeros(0), np.zeros(0, np.int64))
    _, first, number = np.unique(one_key([family, site]), return_index=True, return_inverse=True)
    by_site = np.zeros(len(first))
    np.maximum.at(by_site, number, gain)
    order = np.lexsort((first, family[first]))
    families = family[first][order]
    begins = np.concatenate([[True], families[1:] != families[:-1]])
    group = np.cumsum(begins) - 1
    largest = _running(by_site[order], group, begins)
    count = np.arange(len(order)) - np.flatnonzero(begins)[group]
    found, counts = np.zeros(len(first)), np.zeros(len(first), np.int64)
    found[order], counts[order] = largest, count
    return Others(found[number], counts[number])


def _running(numbers: Floats, group: Ints, begins: Bools) -> Floats:
    """The largest number before each, within its group; 0 for the first."""
    levels, rank = np.unique(numbers, return_inverse=True)
    running = np.maximum.accumulate(group * len(levels) + rank)
    before = np.concatenate([[0], running[:-1]]) - group * len(levels)
    return np.where(begins, 0.0, levels[np.maximum(before, 0)])


class Gains(NamedTuple):
    """The gains that a noise run showed: by measure and row of the reference's tensors, the largest of a family."""

    by_row: dict[str, Floats]
    rows: Ints  # of the reference's tensors, for each pair; −1 for none

    def of(self, name: str, at: Ints) -> Floats:
        """The gains of some pairs; NaN where the noise run has none."""
        return np.append(self.by_row[name], np.nan)[self.rows[at]]


def largest_of_family(gain: Floats, family: Ints) -> Floats:
    """For each row the largest gain in its family, itself included."""
    _, number = np.unique(family, return_inverse=True)
    largest = np.zeros(int(number.max(initial=-1)) + 1)
    np.maximum.at(largest, number, gain)
    return largest[number]
