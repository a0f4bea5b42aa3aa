"""Parts of tensors: the slice whose values are kept (`Part`), and the position of a distributed part in the whole.

A `Part` is written like an index: `0:1, ..., :64`. Recording keeps only that part; store and compare read it back. It
works on shapes and strides only, so that slicing costs nothing. A run stores its text, so equal parts have equal texts.

`whole_shape` reads the `placement` of a row, which `capture` writes as docs/reference/format.md describes. Where a
distributed part is a box within the whole, its fingerprint and its `first_bad` count elements as the whole does; where
it is not, or that is not known, as the part by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from astray.errors import UsageError
from astray.safe_text import parse_json

_FORM = "Write it like an index: '0:1, ..., :64', with numbers, begin:end:step and at most one '...'."
_SPAN = re.compile(r"(-?\d{1,18})?\s*:\s*(-?\d{1,18})?(?:\s*:\s*(\d{1,18})?)?")


class Span(NamedTuple):
    """The slice of one dimension, with the meaning of Python's slices: negative from the end, clipped at the end."""

    begin: int = 0
    end: int | None = None
    step: int = 1

    def indices(self, size: int) -> range:
        """The indices it selects of a dimension of this size."""
        return range(size)[slice(*self)]

    def __str__(self) -> str:
        begin = self.begin if self.begin or self.end == 1 else ""  # 0:1 reads better than :1
        return f"{begin}:{'' if self.end is None else self.end}" + (f":{self.step}" if self.step != 1 else "")


@dataclass(frozen=True)
class Part:
    """Slices of the first dimensions of a tensor and of its last ones; those in between are whole.

    >>> part = Part.parse("0, ..., :64")
    >>> part.apply_shape((8, 12, 100), (1200, 100, 1))
    (0, (1, 12, 64), (1200, 100, 1))
    >>> str(part)
    '0:1, ..., :64'

    A number keeps its dimension, with length 1.
    """

    first: tuple[Span, ...]
    last: tuple[Span, ...] = ()

    @classmethod
    def parse(cls, value: Any) -> Part:
        """From a text, a number, a slice, or several in a list or tuple, such as `numpy.s_[0:1, ..., :64]` gives."""
        if isinstance(value, Part):
            return value
        if isinstance(value, str):
            return _read(value)
        return cls._of(value if isinstance(value, list | tuple) else [value], value)

    @classmethod
    def _of(cls, items: Sequence[Any], original: object) -> Part:
        spans = [
            None if item is ... or (isinstance(item, str) and item == "...") else _span(item, original)
            for item in items
        ]
        if not spans:
            raise UsageError(f"{original!r} names no dimension. {_FORM}")
        if spans.count(None) > 1:
            raise UsageError(f"{original!r} has more than one '...'. {_FORM}")
        gap = spans.index(None) if None in spans else len(spans)
        first, last = spans[:gap], spans[gap + 1 :]
        return cls(tuple(filter(None, first)), tuple(filter(None, last)))

    def apply_shape(
        self, shape: Sequence[int], stride: Sequence[int]
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        """Offset in elements, shape and stride of the part.

        None when there is nothing to slice: the tensor has fewer dimensions than are named, or the part is all of it.
        A slice outside of the tensor makes a dimension of length 0, as in Python.
        """
        between = len(shape) - len(self.first) - len(self.last)
        if between < 0:
            return None
        spans = (*self.first, *(Span(),) * between, *self.last)
        taken = [span.indices(size) for span, size in zip(spans, shape, strict=True)]
        lengths = tuple(map(len, taken))
        if lengths == tuple(shape):
            return None
        offset = 0 if 0 in lengths else sum(r.start * step for r, step in zip(taken, stride, strict=True))
        return offset, lengths, tuple(r.step * step for r, step in zip(taken, stride, strict=True))

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor: of the part, or of all of it when there is nothing to slice."""
        layout = self.apply_shape(shape, (0,) * len(shape))
        return tuple(shape) if layout is None else layout[1]

    def cut(self, array: Any) -> Any:
        """The part of a numpy array, as a view; the array itself when there is nothing to slice."""
        if self.shape_of(array.shape) == array.shape:
            return array
        return array[(*(slice(*span) for span in self.first), ..., *(slice(*span) for span in self.last))]

    def __str__(self) -> str:
        others = ("...",) if self.last or not self.first else ()
        return ", ".join([*map(str, self.first), *others, *map(str, self.last)])


@lru_cache(maxsize=1024)  # a run repeats one text for every tensor
def _read(text: str) -> Part:
    return Part._of([item.strip() for item in text.split(",")], text)


def _span(item: Any, original: object) -> Span:
    """The span of one item of an index."""
    bounds = _bounds(item)
    if bounds is None or any(bound is not None and type(bound) is not int for bound in bounds):
        raise UsageError(f"{original!r} is not a part of a tensor. {_FORM}")
    begin, end, step = bounds[0] or 0, bounds[1], 1 if bounds[2] is None else bounds[2]
    if step < 1:
        raise UsageError(f"{original!r} has a step of {step}; it must be at least 1. {_FORM}")
    if end is not None and (begin < 0) == (end < 0) and end <= begin:
        raise UsageError(f"{original!r} keeps nothing of any tensor. {_FORM}")
    return Span(begin, end, step)


def _bounds(item: Any) -> tuple[Any, Any, Any] | None:
    """Begin, end and step of an item of an index; None when it is not one."""
    if isinstance(item, str):
        if re.fullmatch(r"-?\d{1,18}", item):
            return _bounds(int(item))
        match = _SPAN.fullmatch(item)
        if match is None:
            return None
        begin, end, step = (None if bound is None else int(bound) for bound in match.groups())
        return begin, end, step
    if isinstance(item, slice):
        return item.start, item.stop, item.step
    return (item, item + 1 or None, None) if type(item) is int else None  # nothing comes after -1, the last


Stretches = Sequence[Sequence[int]]
"""The indices that a part holds along one dimension, in order: stretches of (first index, length)."""


def period_of(stretches: Stretches, size: int) -> int | None:
    """The distance at which several stretches of a dimension repeat, if that makes a box of them.

    >>> period_of([(0, 2), (4, 2)], 8)  # columns 0 and 1 of a 2 × 4 matrix
    4
    """
    (first, length), (second, _), *_ = stretches
    period = second - first
    regular = all(tuple(each) == (first + number * period, length) for number, each in enumerate(stretches))
    return period if regular and size % period == 0 and first % period + length <= period else None


_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What reading a placement of another version, or of a damaged disk, may raise."""


def whole_shape(placement: str) -> tuple[int, ...] | None:
    """The shape of the whole tensor, if a part counts its elements there.

    >>> whole_shape('{"shape":[10,6],"offset":[5,0]}'), whole_shape('{"shape":[10,6],"offset":null}')
    ((10, 6), None)
    """
    try:
        fields = parse_json(placement)
        shape = tuple(fields["shape"])
        if fields["offset"] is None:
            return None
        if not all(type(size) is int and 0 <= size < 1 << 60 for size in shape):
            return None
        uneven = any(period_of(runs, shape[int(dim)]) is None for dim, runs in fields.get("runs", {}).items())
    except _MALFORMED:
        return None
    return None if uneven else shape
