"""Pairs the tensors of two runs.

Why were these two tensors paired? Because they have the same key: step, micro, site, call, phase, role and path, in the
same rank, and both or neither are of a recomputed forward call. The backward of a recomputed call is the ordinary
one, and is paired with that of a run without checkpointing. Nothing else counts: not time, not the order of execution,
not the shape. When a run holds the same key several times, the first is paired with the first, the second with the
second. Three things make an exception, for which `partners` finds out which call is which: functions of which one run
has more calls, modules whose calls come in another order and have plain arguments that tell them apart, and runs whose
names say nothing, if the user says so.

The pairs come in the reference's order of observation. What only the candidate has comes right after the row that it
followed there, so that the merged order reads like one execution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.pair.partners import Words, numbered_alike, partners
from astray.comparison.rows import Bools, Ints, Rows
from astray.graph.keys_keys import find, number_repeats, one_key, repeats

KEY = ("step", "micro", "site", "call", "phase", "again", "role", "path")
ANONYMOUS = ("step", "micro", "phase", "again", "role", "path")
"""The key where names say nothing."""


class Alignment(NamedTuple):
    """For each pair its place among the rows of either side, −1 where that side has none."""

    reference: Ints
    candidate: Ints

    @property
    def matched(self) -> Bools:
        return (self.reference >= 0) & (self.candidate >= 0)


def align(
    reference: Rows, candidate: Rows, words: Words, *, in_order: bool = False, same_shape: bool = False
) -> Alignment:
    """Pair the rows of one rank.

    in_order: by the order of execution and by what was called, whatever the sites are called.
    same_shape: tensors of different shapes are no pair.
    """
    partner: Ints
    candidate = numbered_alike(reference, candidate, words)
    if _has_same_keys(reference, candidate):  # two runs of one program: each row has its partner at its own place
        partner = np.arange(len(reference))
    else:
        partner = find(*_keys(reference, candidate, words, in_order))
    if same_shape:
        shapes = reference.columns["form"], np.append(candidate.columns["form"], -1)
        partner = np.where(shapes[0] == shapes[1][partner], partner, -1)
    return merge(partner, len(candidate))


def _has_same_keys(reference: Rows, candidate: Rows) -> bool:
    return all(np.array_equal(reference.columns[name], candidate.columns[name]) for name in KEY)


def _keys(reference: Rows, candidate: Rows, words: Words, in_order: bool) -> tuple[Ints, Ints]:
    """One number for each row, which its partner has too and nobody else."""
    columns = {name: np.concatenate([reference.columns[name], candidate.columns[name]]) for name in KEY}
    keys = one_key([columns[name] for name in (ANONYMOUS if in_order else KEY)])
    left, right = keys[: len(reference)], keys[len(reference) :]
    if in_order or not np.array_equal(left, right):
        partner = np.concatenate(partners(reference, candidate, words, in_order))
        if partner.any():
            columns["call"] = np.where(partner > 0, 0, columns["call"])
            keys = one_key([*(columns[name] for name in (ANONYMOUS if in_order else KEY)), partner])
            left, right = keys[: len(reference)], keys[len(reference) :]
    if repeats(left) or repeats(right):
        keys = one_key([keys, np.concatenate([number_repeats(left), number_repeats(right)])])
        left, right = keys[: len(reference)], keys[len(reference) :]
    return left, right


def merge(partner: Ints, candidates: int) -> Alignment:
    """Lay the candidate's lone rows between the pairs. `partner` is the candidate row of each reference row, or −1."""
    if len(partner) == candidates and np.array_equal(partner, np.arange(candidates)):
        return Alignment(partner, partner)
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
