"""How a tensor of the candidate lies in the reference: transposed, with its dimensions in another order, reshaped.

Read from a mapping file, used where rows are read, where values are measured, and where weights are loaded. A rule
says what to do to the candidate's tensor, so that it is laid out as the reference's; `undo` goes the other way.

Counts and extremes of a tensor do not depend on the order of its elements, and sums only in their last bits. A
fingerprint does: it says nothing about a tensor whose elements a rule moves. A rule that only reshapes leaves them in
their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy.typing as npt

Shape = tuple[int, ...]

WORDS = ("transpose", "permute", "reshape")

EXAMPLES = "transpose, {transpose: [0, 1]}, {permute: [3, 2, 0, 1]}, {reshape: [8, -1]}, or a list of these"

_MOST_DIMENSIONS = 6
"""Of so many dimensions every order is tried, to find the one that fits."""


@dataclass(frozen=True)
class LayoutStep:
    """One operation: its word in the file, and its numbers; `transpose` without any is of the last two dimensions."""

    word: str
    numbers: Shape = ()

    def shape(self, shape: Shape) -> Shape:
        """The shape that it makes of another. Raises ValueError with what is wrong."""
        if self.word == "reshape":
            return self._reshaped(shape)
        return tuple(shape[dim] for dim in self.order(shape))

    def order(self, shape: Shape) -> Shape:
        """The dimensions in their new order."""
        dims = len(shape)
        if self.word == "permute":
            if sorted(dim % dims if dims and -dims <= dim < dims else -1 for dim in self.numbers) != list(range(dims)):
                raise ValueError(f"it permutes {len(self.numbers)} dimensions and the tensor has {dims}")
            return tuple(dim % dims for dim in self.numbers)
        one, other = self.numbers or (-2, -1)
        if not all(-dims <= dim < dims for dim in (one, other)):
            raise ValueError(f"it transposes dimensions {one} and {other} and the tensor has {dims}")
        order = list(range(dims))
        order[one], order[other] = order[other], order[one]
        return tuple(order)

    def apply(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of a tensor as this step lays them out."""
        if self.word == "reshape":
            return values.reshape(self.shape(values.shape))
        return values.transpose(self.order(values.shape))

    def undo(self, values: npt.NDArray[Any], shape: Shape) -> npt.NDArray[Any]:
        """Values that this step laid out, as they were in a tensor of this shape."""
        if self.word == "reshape":
            return values.reshape(shape)
        order = self.order(shape)
        return values.transpose([order.index(dim) for dim in range(len(order))])

    def moves(self, shape: Shape) -> bool:
        """Whether elements of a tensor of this shape come into another order."""
        if self.word == "reshape":
            return False
        kept = [dim for dim in self.order(shape) if shape[dim] != 1]
        return kept != sorted(kept)

    def _reshaped(self, shape: Shape) -> Shape:
        count, known = math.prod(shape), math.prod(size for size in self.numbers if size != -1)
        sizes = tuple(count // known if size == -1 and known else size for size in self.numbers)
        if math.prod(sizes) != count:
            raise ValueError(f"{list(self.numbers)} does not have the tensor's {count:,} elements")
        return sizes

    def __str__(self) -> str:
        return f"{{{self.word}: {list(self.numbers)}}}" if self.numbers else self.word


@dataclass(frozen=True)
class Layout:
    """What to do to a tensor of the candidate, step by step, so that it is laid out as the reference's.

    >>> layout = Layout.parse("transpose")
    >>> layout.shape((3, 8)), str(layout)
    ((8, 3), 'transpose')
    >>> Layout.parse([{"reshape": [4, 2, 3]}, {"permute": [2, 0, 1]}]).shape((8, 3))
    (3, 4, 2)
    """

    steps: tuple[LayoutStep, ...]

    @classmethod
    def parse(cls, rule: Any) -> Layout:
        """A rule as a mapping file has it. Raises ValueError for what is none."""
        return cls(tuple(_steps(rule)))

    def shape(self, shape: Shape) -> Shape:
        """The shape that a tensor gets. Raises ValueError, with what is wrong, for one that the rule does not fit."""
        for step in self.steps:
            shape = step.shape(shape)
        return shape

    def apply(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values as the reference lays them out: a view where that is possible."""
        for step in self.steps:
            values = step.apply(values)
        return values

    def undo(self, values: npt.NDArray[Any], shape: Shape) -> npt.NDArray[Any]:
        """Values that are laid out as the reference's, as a tensor of this shape has them in the candidate."""
        for step, before in reversed(list(zip(self.steps, self._shapes(shape), strict=False))):
            values = step.undo(values, before)
        return values

    def moves(self, shape: Shape) -> bool:
        """Whether elements of a tensor of this shape come into another order, so that its fingerprint says nothing."""
        return any(step.moves(before) for step, before in zip(self.steps, self._shapes(shape), strict=False))

    def _shapes(self, shape: Shape) -> list[Shape]:
        """The shape before the first step, and after each."""
        shapes = [shape]
        for step in self.steps:
            shapes.append(step.shape(shapes[-1]))
        return shapes

    def __str__(self) -> str:
        return str(self.steps[0]) if len(self.steps) == 1 else f"[{', '.join(map(str, self.steps))}]"


TRANSPOSE = Layout((LayoutStep("transpose"),))


def _steps(rule: Any) -> Iterator[LayoutStep]:
    for step in rule if isinstance(rule, list) else [rule]:
        if step == "transpose":
            yield LayoutStep("transpose")
            continue
        word, numbers = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", None)
        if word not in WORDS or not isinstance(numbers, list) or not numbers or not all(map(_is_whole, numbers)):
            raise ValueError(f"{step!r:.80} is not a layout; there are {EXAMPLES}")
        if word == "transpose" and len(numbers) != 2:
            raise ValueError(f"transpose takes two dimensions, and {numbers} are {len(numbers)}")
        if word == "reshape" and (numbers.count(-1) > 1 or min(numbers) < -1):
            raise ValueError(f"reshape takes sizes, of which one may be -1, and {numbers} are others")
        yield LayoutStep(word, tuple(numbers))
    if rule == []:
        raise ValueError(f"a list of nothing is not a layout; there are {EXAMPLES}")


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def fitting_layout(candidate: Sequence[int], reference: Sequence[int]) -> Layout | None:
    """The order of dimensions that makes one shape of the other, if there is exactly one; None also for equal shapes.

    >>> print(fitting_layout((3, 8), (8, 3)), fitting_layout((5, 5, 3, 8), (8, 3, 5, 5)))
    transpose None
    >>> print(fitting_layout((5, 7, 3, 8), (8, 3, 5, 7)))
    {permute: [3, 2, 0, 1]}
    """
    one, other = tuple(candidate), tuple(reference)
    if one == other or sorted(one) != sorted(other) or len(one) > _MOST_DIMENSIONS:
        return None
    if len(one) == 2:
        return TRANSPOSE
    orders = [order for order in permutations(range(len(one))) if tuple(one[dim] for dim in order) == other]
    return Layout((LayoutStep("permute", orders[0]),)) if len(orders) == 1 else None
