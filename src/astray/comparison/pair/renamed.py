"""Finds out which tensor of one checkpoint is which of another whose names differ, for `astray map`.

There is no order to go by: some files are sorted by name, others are in the order of the modules. So tensors are paired
that have the same bits, and of the others those of the same shape and the same numbers in their names, the most similar
names first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

MOST_SIMILAR = 200
"""So many tensors of one shape and one set of numbers are compared with each other by name; more have no partner."""


class Named(NamedTuple):
    """A tensor by what it may be recognised by. `bits` is None where they tell nothing, as in a tensor of zeros."""

    name: str
    shape: tuple[int, ...]
    bits: int | None


def pair_renamed(reference: list[Named], candidate: list[Named]) -> list[tuple[int, int]]:
    """Which tensor is which, as places in the two lists, in the order of the first.

    >>> pair_renamed([Named("h.0.w", (2, 3), None), Named("h.1.w", (2, 3), None)], [Named("l.1.w", (2, 3), None)])
    [(1, 0)]
    """
    paired = dict(_by_bits(reference, candidate))
    taken = set(paired.values())
    for left, right in _by_names(reference, candidate, paired):
        if left not in paired and right not in taken:
            paired[left] = right
            taken.add(right)
    return sorted(paired.items())


def _by_bits(reference: list[Named], candidate: list[Named]) -> Iterator[tuple[int, int]]:
    """Those whose bits nobody else has, on either side."""
    sides: list[dict[object, list[int]]] = []
    for side in (reference, candidate):
        found: dict[object, list[int]] = defaultdict(list)
        for place, tensor in enumerate(side):
            if tensor.bits is not None:
                found[tensor.shape, tensor.bits].append(place)
        sides.append(found)
    for key, left in sides[0].items():
        right = sides[1].get(key, [])
        if len(left) == len(right) == 1:
            yield left[0], right[0]


def _by_names(reference: list[Named], candidate: list[Named], paired: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Those that may be the same, the most similar names first; a transposed shape will do where nothing else does."""
    taken = set(paired.values())
    groups: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (tensors, known) in enumerate(((reference, paired.keys()), (candidate, taken))):
        for place, tensor in enumerate(tensors):
            if place not in known:
                groups[tuple(sorted(tensor.shape)), tuple(_numbers(tensor.name))][side].append(place)
    found = [
        (_likeness(reference[left], candidate[right]), left, right)
        for lefts, rights in groups.values()
        if max(len(lefts), len(rights)) <= MOST_SIMILAR
        for left in lefts
        for right in rights
    ]
    yield from ((left, right) for _, left, right in sorted(found, key=lambda one: (-one[0], one[1], one[2])))


def _likeness(one: Named, other: Named) -> float:
    words, others = (re.findall(r"[a-z]+", tensor.name.lower()) for tensor in (one, other))
    same_end = words[-1:] == others[-1:]
    return SequenceMatcher(None, words, others, autojunk=False).ratio() + same_end + (one.shape == other.shape)


def _numbers(name: str) -> list[str]:
    return re.findall(r"\b\d+\b", name)
