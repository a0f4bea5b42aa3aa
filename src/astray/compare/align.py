"""Pairs the tensors of two runs.

Why were these two tensors paired? Because they have the same key: step, micro, site, call, phase, role and path, in the
same rank, and both or neither are of a recomputed forward call. The backward of a recomputed call is the ordinary
one, and is paired with that of a run without checkpointing. Nothing else counts: not time, not the order of execution,
not the shape. When a run holds the same key several times, the first is paired with the first, the second with the
second.

The pairs come in the reference's order of observation. What only the candidate has comes right after the row that it
followed there, so that the merged order reads like one execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from astray.compare.rows import Bools, Ints, Rows

KEY = ("step", "micro", "site", "call", "phase", "again", "role", "path")
_LARGEST = 1 << 62


class Alignment(NamedTuple):
    """For each pair its place among the rows of either side, −1 where that side has none."""

    reference: Ints
    candidate: Ints

    @property
    def matched(self) -> Bools:
        return (self.reference >= 0) & (self.candidate >= 0)


def align(reference: Rows, candidate: Rows) -> Alignment:
    """Pair the rows of one rank by key."""
    columns = [np.concatenate([reference.columns[name], candidate.columns[name]]) for name in KEY]
    keys = one_key(columns)
    left, right = keys[: len(reference)], keys[len(reference) :]
    if np.array_equal(left, right):  # two runs of one program: nothing to look for
        same = np.arange(len(left))
        return Alignment(same, same)
    if _repeats(left) or _repeats(right):
        occurrence = np.concatenate([number_repeats(left), number_repeats(right)])
        keys = one_key([keys, occurrence])
        left, right = keys[: len(reference)], keys[len(reference) :]
    return merge(find(left, right), len(right))


def one_key(columns: Sequence[Ints]) -> Ints:
    """One integer for each distinct combination of the columns' values, as digits of a mixed radix."""
    key = np.zeros(len(columns[0]), np.int64)
    if not len(key):
        return key
    radix = 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        digits = high - low + 1
        if radix * digits > _LARGEST:  # too many possible keys for 64 bits: number only those that occur
            distinct, key = np.unique(key, return_inverse=True)
            radix = len(distinct)
        key *= digits
        key += column
        key -= low
        radix *= digits
    return key


def number_repeats(keys: Ints) -> Ints:
    """How often each key came before: [a, b, a, a] gives [0, 0, 1, 2]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    lengths = np.diff(np.append(first, len(keys)))
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.arange(len(keys)) - np.repeat(first, lengths)
    return numbers


def find(wanted: Ints, among: Ints) -> Ints:
    """Where in `among`, which has no repeats, each wanted key is; −1 where it is not."""
    if not len(among):
        return np.full(len(wanted), -1)
    order = np.argsort(among, kind="stable")
    place = np.searchsorted(among, wanted, sorter=order)
    found = order[np.minimum(place, len(among) - 1)]
    return np.where(among[found] == wanted, found, -1)


def merge(partner: Ints, candidates: int) -> Alignment:
    """Lay the candidate's lone rows between the pairs. `partner` is the candidate row of each reference row, or −1."""
    matched = np.flatnonzero(partner >= 0)
    home = np.full(candidates, -1)  # the reference row of each candidate row
    home[partner[matched]] = matched
    lone = np.flatnonzero(home < 0)
    # the last candidate row at or before each one that has a partner; −1 before the first such row
    last = np.maximum.accumulate(np.where(home >= 0, np.arange(candidates), -1))[lone]
    follows = np.where(last >= 0, home[last], -1)
    # a stable sort keeps a reference row before the lone rows that follow it, and those in their own order
    order = np.argsort(np.concatenate([np.arange(len(partner)), follows]), kind="stable")
    reference = np.concatenate([np.arange(len(partner)), np.full(len(lone), -1)])[order]
    return Alignment(reference, np.concatenate([partner, lone])[order])


def _repeats(keys: Ints) -> bool:
    ordered = np.sort(keys)
    return bool(np.any(ordered[1:] == ordered[:-1]))
