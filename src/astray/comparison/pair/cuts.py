"""Along which dimension a batch was cut into micro steps, as the shapes of a tensor in both runs tell.

Feeds `groups`. A shape alone does not tell which dimension is the batch, but two runs do that cut it differently: it is
the one in which their shapes differ.
"""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, ...]

NO_BATCH, APART = -1, -2
"""In place of the dimension to join along: all shapes are the same; they differ in more than one dimension."""


class Along(NamedTuple):
    """The dimension to join along, or why there is none; whether sizes differ, and add up to the same on both sides."""

    dim: int
    differ: bool
    adds_up: bool
    same_cut: bool = False  # each part has its counterpart
    stacks: bool = True  # the parts of each run by itself could be laid end to end along the first dimension


def along(reference: list[Shape], candidate: list[Shape]) -> Along:
    """What the shapes of a tensor in the micro steps of both runs say.

    >>> along([(8, 3)], [(2, 3), (6, 3)])
    Along(dim=0, differ=True, adds_up=True, same_cut=False, stacks=True)
    >>> along([(3, 3)], [(3, 3), (3, 3)]).dim, along([(4, 4)], [(2, 2), (2, 2)]).dim
    (-1, -2)
    """
    shapes, stacks = [*reference, *candidate], _stack(reference) and _stack(candidate)
    if not reference or not candidate:  # nobody to ask
        return Along(NO_BATCH if len(set(shapes)) == 1 else 0 if stacks else APART, False, True, stacks=stacks)
    if len({len(shape) for shape in shapes}) > 1:
        return Along(APART, True, False, stacks=stacks)
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    same = reference == candidate
    if not dims:
        return Along(NO_BATCH, False, True, same, stacks)
    if len(dims) > 1:
        return Along(APART, True, False, stacks=stacks)
    totals = [sum(shape[dims[0]] for shape in side) for side in (reference, candidate)]
    return Along(dims[0], True, totals[0] == totals[1], same, stacks)


def _stack(shapes: list[Shape]) -> bool:
    """Whether tensors of these shapes can be laid end to end along the first dimension."""
    return all(shapes) and len({shape[1:] for shape in shapes}) <= 1
