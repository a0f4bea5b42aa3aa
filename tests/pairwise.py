"""Parametrizes a test over a grid of which `make test` runs a selection; the rest is marked slow.

Most faults show with two of the parameters (this dtype in this layout, this size with this backend), so the selection
has each value of each axis together with each value of every other. Where one test takes a process or a second, it has
each value once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def grid(
    ids: Mapping[str, Sequence[str]] | None = None,
    fixtures: Sequence[str] = (),
    pairs: bool = True,
    **axes: Iterable[Any],
) -> pytest.MarkDecorator:
    """All combinations of the axes; those outside of the selection are slow.

    ids: names of the values of an axis, where `str` does not give them.
    fixtures: axes that are fixtures with parameters, such as `backend`.
    pairs: select every pair of values; else each value once.
    """
    values = {name: list(given) for name, given in axes.items()}
    named = {name: list((ids or {}).get(name) or map(str, given)) for name, given in values.items()}
    sizes = [len(given) for given in values.values()]
    selected = set(pairwise(sizes) if pairs else diagonal(sizes))
    return pytest.mark.parametrize(
        tuple(values),
        [
            pytest.param(
                *(given[at] for given, at in zip(values.values(), combination, strict=True)),
                id="-".join(name[at] for name, at in zip(named.values(), combination, strict=True)),
                marks=() if combination in selected else pytest.mark.slow,
            )
            for combination in product(*(range(len(given)) for given in values.values()))
        ],
        indirect=list(fixtures),
    )


def diagonal(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of positions in which each position of each axis occurs."""
    return [tuple(row % size for size in sizes) for row in range(max(sizes))]


def pairwise(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of positions, one for each axis, in which every pair of positions of two axes occurs.

    Axis by axis, the largest first: each combination so far gets the position that adds most new pairs, and pairs that
    are still missing get combinations of their own.
    """
    order = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    rows: list[dict[int, int]] = [{}]
    for axis in order:
        before = order[: order.index(axis)]
        missing = {(other, at, here) for other in before for at in range(sizes[other]) for here in range(sizes[axis])}
        if len(before) < 2:  # every combination is needed
            rows = [{**row, axis: here} for row in rows for here in range(sizes[axis])]
            continue
        for number, row in enumerate(rows):
            turn = [(number + here) % sizes[axis] for here in range(sizes[axis])]  # ties go to each in turn
            row[axis] = max(turn, key=lambda here, row=row: sum((o, row[o], here) in missing for o in before))
            missing -= {(other, row[other], row[axis]) for other in before}
        while missing:
            other, at, here = min(missing)
            row = {**dict.fromkeys(before, 0), other: at, axis: here}
            rows.append(row)
            missing -= {(one, row[one], here) for one in before}
    return [tuple(row[axis] for axis in range(len(sizes))) for row in rows]


def missing_pairs(sizes: Sequence[int], rows: Iterable[Sequence[int]]) -> set[Hashable]:
    """The pairs of positions that occur in none of the rows."""
    axes = range(len(sizes))
    wanted = {
        (one, other, at, there)
        for one, other in combinations(axes, 2)
        for at in range(sizes[one])
        for there in range(sizes[other])
    }
    return wanted - {(one, other, row[one], row[other]) for row in rows for one, other in combinations(axes, 2)}
