"""One column of a table, before it is written: where its cells are, and the Arrow buffers they become.

Cells are items of rows, or numbers that came as arrays. The rows of a step are gone through by the native extension
when it is there, and by plain Python otherwise, which takes several times as long; both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.store.native.schema import Column

Row = tuple[Any, ...]

Buffer = bytes | memoryview
"""Bytes; `len` is how many."""

Encoded = tuple[int, tuple[Buffer, ...]]
"""How many nulls a column has, and its buffers in Arrow's order. One that is not needed is empty."""

ITSELF = -1
"""Cells are items of the row itself."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Item `item` of each row, or of the tuple that is item `within` of it. Where that tuple is not there, it is null.

    A row may be None: the cell is null then too.
    """

    rows: list[Any]
    item: int
    within: int = ITSELF

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: slice) -> Cells:
        return Cells(self.rows[rows], self.item, self.within)

    def encode(self, column: Column, limit: int) -> Encoded | None:
        """The buffers of the column. None when strings or lists are longer together than `limit`."""
        return encode(self.rows, self.item, self.within, column.type, column.nullable, limit)


@dataclass(frozen=True, slots=True)
class Masked:
    """A column whose cells are numbers already. Where it is not `present`, a cell is null."""

    data: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.data)

    def part(self, rows: slice) -> Masked:
        return Masked(self.data[rows], self.present[rows])

    def encode(self, column: Column, limit: int) -> Encoded:  # noqa: ARG002 - it has no strings
        """The buffers of the column."""
        nulls = len(self.present) - int(np.count_nonzero(self.present))
        data = np.ascontiguousarray(self.data, column.type)
        return nulls, (_bitmap(self.present) if nulls else b"", data.view(np.uint8).data)


def values(rows: Sequence[Any], item: int, within: int = ITSELF) -> list[Any]:
    """The cells themselves."""
    if within != ITSELF:
        rows = list(map(itemgetter(within), rows))
    try:
        return list(map(itemgetter(item), rows))
    except TypeError:  # there is None among them, or a ticket
        return [row[item] if isinstance(row, tuple) else None for row in rows]


def python_encode(
    rows: list[Any], item: int, within: int, type: str, nullable: bool, limit: int
) -> tuple[int, tuple[bytes, ...]] | None:
    """What `encode` does, in Python."""
    cells = values(rows, item, within)
    nulls = cells.count(None)
    if nulls and not nullable:
        raise TypeError(f"Item {item} of row {cells.index(None)} is None, in a column without nulls.")
    bitmap = b""
    if nulls:
        filler = {"string": "", "float64": np.nan}.get(type, 0)
        if nulls == len(cells):  # most columns are all there or not there at all
            present, cells = np.zeros(nulls, np.bool_), [filler] * nulls
        else:
            present = np.fromiter((cell is not None for cell in cells), np.bool_, len(cells))
            cells = [filler if cell is None else cell for cell in cells]
        bitmap = _bitmap(present)
    buffers = _ENCODERS.get(type, _numbers)(cells, type, limit)
    return None if buffers is None else (nulls, (bitmap, *buffers))


def python_tickets(rows: list[Any], item: int) -> tuple[bytes, bytes]:
    """What `tickets` does, in Python."""
    cells = values(rows, item)
    places = [place for place, cell in enumerate(cells) if type(cell) is int]
    return np.array(places, np.int64).tobytes(), np.array([cells[place] for place in places], np.int64).tobytes()


encode: Callable[[list[Any], int, int, str, bool, int], tuple[int, tuple[bytes, ...]] | None]
"""`encode(rows, item, within, type, nullable, limit)`: the buffers of a column, as `Cells` has them."""

tickets: Callable[[list[Any], int], tuple[bytes, bytes]]
"""`tickets(rows, item)`: the places of the rows whose item is an integer, and those integers, as bytes of int64."""

try:
    from astray.store.native._columns import encode, tickets
except ImportError:  # installed where there was no compiler
    encode, tickets = python_encode, python_tickets


def _numbers(cells: list[Any], type: str, limit: int) -> tuple[bytes]:  # noqa: ARG001 - as all encoders
    return (np.fromiter(cells, type, len(cells)).tobytes(),)


def _flags(cells: list[Any], type: str, limit: int) -> tuple[bytes]:  # noqa: ARG001
    return (_bitmap(np.array(cells, np.bool_)),)


def _strings(cells: list[str], type: str, limit: int) -> tuple[bytes, bytes] | None:  # noqa: ARG001
    text = "".join(cells)
    data = _encoded(text)
    parts: list[Any] = cells if len(data) == len(text) else [_encoded(cell) for cell in cells]  # ASCII or not
    offsets = _offsets(parts, limit)
    return None if offsets is None else (offsets, data)


def _lists(cells: list[Any], type: str, limit: int) -> tuple[bytes, bytes, bytes] | None:  # noqa: ARG001
    offsets = _offsets(cells, limit)
    if offsets is None:
        return None
    return offsets, b"", np.fromiter(chain.from_iterable(cells), np.int64).tobytes()


Encoder = Callable[[list[Any], str, int], tuple[bytes, ...] | None]
_ENCODERS: dict[str, Encoder] = {"bool": _flags, "string": _strings, "list<int64>": _lists}


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # file names may hold what UTF-8 cannot


def _bitmap(flags: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(flags, bitorder="little").tobytes()


def _offsets(cells: Sequence[Any], limit: int) -> bytes | None:
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, cells), np.int64, len(cells)), out=offsets[1:])
    return None if offsets[-1] > limit else offsets.astype(np.int32).tobytes()
