"""Which rows are of one call, and which call lies in which: for every row of a comparison or of a run.

Calls are numbered in the order in which they are first seen, so that the next number is the next call, also where a
step begins. A module's outputs are seen after the calls inside it: rows of one call need not be neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.graph import graph_of
from astray.store import RankRun, RunData

Ints = npt.NDArray[np.int64]


class CallIndex(NamedTuple):
    """For each row the number of its call, for each call that of the one around it (−1 for an outermost one)."""

    of_row: Ints
    parent: Ints
    rank: Ints  # of each call
    first: Ints  # of each call its first row
    order: Ints  # all rows, those of a call together
    begin: Ints  # where in `order` each call begins, and the end

    def rows(self, call: int) -> list[int]:
        """The rows of a call, in order."""
        found: list[int] = self.order[self.begin[call] : self.begin[call + 1]].tolist()
        return found


def calls_of_pairs(comparison: ComparisonData) -> CallIndex:
    """The calls of a comparison. What only the candidate has of a call that both made belongs to that call."""
    pairs = comparison.pairs
    ranks, here, there = (pairs.numbers(name) for name in ("rank", "call_reference", "call_candidate"))
    return _joined(
        len(pairs),
        (
            (rank, rows, *_of_rank(comparison.reference.ranks.get(rank), comparison.candidate.ranks.get(rank),
                                   here[rows], there[rows]))
            for rank, rows in _by_rank(ranks)
        ),
    )  # fmt: skip


def calls_of_rows(run: RunData, rank_of: Ints, row_of: Ints) -> CallIndex:
    """The calls of a run, for rows given by rank and place in its table."""
    none = np.full(len(row_of), -1)
    return _joined(
        len(row_of),
        (
            (rank, rows, *_of_rank(run.ranks[rank], None, run.ranks[rank].call_rows[row_of[rows]], none[rows]))
            for rank, rows in _by_rank(rank_of)
        ),
    )


def _by_rank(ranks: Ints) -> Iterator[tuple[int, Ints]]:
    for rank in np.unique(ranks).tolist():
        yield rank, np.flatnonzero(ranks == rank)


def _joined(count: int, ranks: Iterator[tuple[int, Ints, Ints, Ints]]) -> CallIndex:
    """The calls of all ranks in one numbering."""
    of_row = np.full(count, -1)
    parents, owners, found = [], [], 0
    for rank, rows, group, parent in ranks:
        of_row[rows] = group + found
        parents.append(np.where(parent >= 0, parent + found, -1))
        owners.append(np.full(len(parent), rank))
        found += len(parent)
    order = np.argsort(of_row, kind="stable")
    begin = np.searchsorted(of_row[order], np.arange(found + 1))
    nothing = [np.empty(0, np.int64)]
    return CallIndex(
        of_row,
        np.concatenate(parents or nothing),
        np.concatenate(owners or nothing),
        order[begin[:-1]],
        order,
        begin,
    )


def _of_rank(left: RankRun | None, right: RankRun | None, here: Ints, there: Ints) -> tuple[Ints, Ints]:
    """For rows of one rank, given by their calls on both sides: the number of each, and of each number its parent."""
    sizes = [0 if run is None else len(run.calls) for run in (left, right)]
    home = np.full(sizes[1] + 1, -1)  # what a call of the candidate is in the reference
    matched = (here >= 0) & (there >= 0)
    home[there[matched]] = here[matched]
    key = np.where(here >= 0, here, np.where(home[there] >= 0, home[there], sizes[0] + there))
    known, first, group = np.unique(key, return_index=True, return_inverse=True)
    number = np.empty(len(known), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(known))
    around = _enclosing_keys(left, right, sizes, home)
    group_of = np.full(len(around) + 1, -1)
    group_of[known] = number
    outer = around[known]
    while len(again := np.flatnonzero((outer >= 0) & (group_of[outer] < 0))):  # a call that has no rows itself
        outer[again] = around[outer[again]]
    parent = np.full(len(known), -1)
    parent[number] = np.where(outer >= 0, group_of[outer], -1)
    return number[group.reshape(-1)], parent


def _enclosing_keys(left: RankRun | None, right: RankRun | None, sizes: list[int], home: Ints) -> Ints:
    """For each key, a call of the reference or behind those one of the candidate, the key of the call around it."""
    here, there = (np.empty(0, np.int64) if run is None else graph_of(run).enclosings for run in (left, right))
    return np.concatenate([here, np.where(there < 0, -1, np.where(home[there] >= 0, home[there], sizes[0] + there))])
