"""Compares two tensors that lie in pieces, each side cut in its own way, without ever putting them together.

Reads the parts of joined micro steps, feeds `evidence`. Where one side has four parts and the other two, there are four
stretches that are whole on both; each is compared by itself, and `merging` adds up what was found.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.merging import merge_contrasts
from astray.stats.kernels import Contrast, Strided, contrast


class Pieces(NamedTuple):
    """The parts of a tensor, in order, and the dimension in which they follow each other.

    samples: how many samples of the batch each part has, 0 where that is not known.
    """

    dim: int
    parts: list[npt.NDArray[Any]]
    samples: tuple[int, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """Where each part begins along the dimension, and where the last one ends."""
        return [0, *np.cumsum([part.shape[self.dim] for part in self.parts]).tolist()]

    def fits(self, other: Pieces) -> bool:
        """Whether both have the same shape as wholes."""
        one, two = (list(side.parts[0].shape) for side in (self, other))
        if len(one) != len(two):
            return False
        one[self.dim], two[self.dim] = self.bounds[-1], other.bounds[-1]
        return one == two

    @property
    def whole(self) -> npt.NDArray[Any]:
        """All parts together."""
        return np.concatenate(self.parts, axis=self.dim) if len(self.parts) > 1 else self.parts[0]

    def samples_last(self) -> Pieces | None:
        """The same parts if their dimension is another one with the samples inside it, such as time · batch.

        Such parts do not follow each other, but lie side by side in each row of the outer dimension. None where a part
        has as many rows as samples, or sizes do not tell.
        """
        sizes = [part.shape[self.dim] for part in self.parts]
        if len(self.samples) != len(sizes) or 0 in self.samples or any(map(operator.mod, sizes, self.samples)):
            return None
        outer = set(map(operator.floordiv, sizes, self.samples))
        if len(outer) != 1 or outer == {1}:
            return None
        shapes = [
            (*part.shape[: self.dim], *outer, count, *part.shape[self.dim + 1 :]) for part, count in self._counted
        ]
        return Pieces(self.dim + 1, [part.reshape(shape) for part, shape in zip(self.parts, shapes, strict=True)])

    @property
    def _counted(self) -> Iterator[tuple[npt.NDArray[Any], int]]:
        return zip(self.parts, self.samples, strict=True)

    def between(self, begin: int, end: int) -> npt.NDArray[Any]:
        """A stretch that lies in one of the parts, as a view."""
        number = int(np.searchsorted(self.bounds, begin, side="right")) - 1
        first = self.bounds[number]
        cut: npt.NDArray[Any] = self.parts[number][(slice(None),) * self.dim + (slice(begin - first, end - first),)]
        return cut


def stretches(reference: Pieces, candidate: Pieces) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """What lies in one part on either side, both sides of it. Both must have the same size along the dimension."""
    bounds = sorted({*reference.bounds, *candidate.bounds})
    for begin, end in pairwise(bounds):
        yield reference.between(begin, end), candidate.between(begin, end)


def contrast_blocks(
    reference: Iterator[npt.NDArray[Any]], candidate: Iterator[npt.NDArray[Any]], dtypes: tuple[str, str]
) -> Contrast:
    """How far apart two tensors are that come in flat blocks, each side in blocks of its own."""
    found: list[Contrast] = []
    here, there = np.empty(0), np.empty(0)
    while True:
        here = here if here.size else next(reference, here)
        there = there if there.size else next(candidate, there)
        size = min(here.size, there.size)
        if not size:
            break
        sides = Strided.from_numpy(here[:size], dtypes[0]), Strided.from_numpy(there[:size], dtypes[1])
        found.append(contrast(*sides))
        here, there = here[size:], there[size:]
    return found[0] if len(found) == 1 else merge_contrasts(found)


def contrast_pieces(reference: Pieces, candidate: Pieces, dtypes: tuple[str, str]) -> tuple[Contrast, bool]:
    """How far apart two tensors are, and whether they have the same bits."""
    found: list[Contrast] = []
    equal = dtypes[0] == dtypes[1]
    for here, there in stretches(reference, candidate):
        found.append(contrast(Strided.from_numpy(here, dtypes[0]), Strided.from_numpy(there, dtypes[1])))
        equal = equal and here.tobytes() == there.tobytes()
    return merge_contrasts(found), equal
