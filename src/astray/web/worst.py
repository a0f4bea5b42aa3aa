"""The elements that are furthest off, found block by block; of one run, the largest ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST = 20


class Worst:
    """The places with the greatest sizes: of equal ones the first. Sizes of 0 are none."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._sizes = np.empty(0)
        self._places = np.empty(0, np.int64)
        self._values = np.empty((0, 2))

    def add(self, begin: int, sizes: Floats, *values: Floats) -> None:
        """The sizes and the values of the elements from a place on."""
        floor = self._sizes[-1] if len(self._sizes) == self._most else 0.0
        if not sizes.size or sizes.max() <= floor:
            return
        found = np.flatnonzero(sizes > floor)
        if len(found) > self._most:  # of those as large as the last, the first: a stable sort of few decides
            least = np.partition(sizes[found], len(found) - self._most)[len(found) - self._most]
            found = np.concatenate([found[sizes[found] > least], found[sizes[found] == least][: self._most]])
            found.sort()
        both = np.stack([one[found] for one in (values[0], values[-1])], axis=1)
        self._sizes = np.concatenate([self._sizes, sizes[found]])
        self._places = np.concatenate([self._places, found + begin])
        self._values = np.concatenate([self._values, both])
        order = np.argsort(-self._sizes, kind="stable")[: self._most]
        self._sizes, self._places, self._values = self._sizes[order], self._places[order], self._values[order]

    def found(self) -> list[tuple[int, float, float]]:
        """Place and both values of each, the worst first."""
        return [
            (int(place), float(one), float(other))
            for place, (one, other) in zip(self._places.tolist(), self._values.tolist(), strict=True)
        ]
