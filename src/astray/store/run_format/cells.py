"""One column of a table, before it is written: where its cells are, and the Arrow buffers they become.

Cells are in `Rows`, or came as arrays of numbers. The Python encoder here, for rows that are not kept as columns, gives
the same bytes as the native one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from astray.store.run_format.schema import Column
from astray.wording import as_utf8

Buffer = bytes | memoryview
"""Bytes; `len` is how many."""

Encoded = tuple[int, tuple[Buffer, ...]]
"""How many nulls a column has, and its buffers in Arrow's order. One that is not needed is empty."""


class Encodes(Protocol):
    """Rows whose columns can be encoded, as `Rows` can."""

    def encode(self, column: int, start: int, stop: int, limit: int) -> Encoded | None:
        """The buffers of some rows of a column. None when strings or lists are longer together than `limit`."""


@dataclass(frozen=True, slots=True)
class EncodedCells:
    """A column of some rows, from `start` to `stop`."""

    rows: Encodes
    column: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, rows: slice) -> EncodedCells:
        start, stop, _ = rows.indices(len(self))
        return EncodedCells(self.rows, self.column, self.start + start, self.start + stop)

    def encode(self, column: Column, limit: int) -> Encoded | None:  # noqa: ARG002 - the rows know what they hold
        """The buffers of the column. None when strings or lists are longer together than `limit`."""
        return self.rows.encode(self.column, self.start, self.stop, limit)


@dataclass(frozen=True, slots=True)
class ListCells:
    """A column whose cells come as a list."""

    cells: list[Any]

    def __len__(self) -> int:
        return len(self.cells)

    def part(self, rows: slice) -> ListCells:
        return ListCells(self.cells[rows])

    def encode(self, column: Column, limit: int) -> Encoded | None:
        """The buffers of the column. None when strings or lists are longer together than `limit`."""
        return encode(self.cells, column.type, limit)


@dataclass(frozen=True, slots=True)
class NullCells:
    """A column with only nulls."""

    count: int

    def __len__(self) -> int:
        return self.count

    def part(self, rows: slice) -> NullCells:
        return NullCells(len(range(*rows.indices(self.count))))

    def encode(self, column: Column, limit: int) -> Encoded | None:  # noqa: ARG002
        """The buffers of the column."""
        bitmap = bytes((self.count + 7) // 8)
        if column.type == "string":
            return self.count, (bitmap, bytes(4 * (self.count + 1)), b"")
        return self.count, (bitmap, np.zeros(self.count, column.type).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class MaskedCells:
    """A column whose cells are numbers already. A cell that is not `present` is null."""

    data: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.data)

    def part(self, rows: slice) -> MaskedCells:
        return MaskedCells(self.data[rows], self.present[rows])

    def encode(self, column: Column, limit: int) -> Encoded:  # noqa: ARG002 - it has no strings
        """The buffers of the column."""
        nulls = len(self.present) - int(np.count_nonzero(self.present))
        data = np.ascontiguousarray(self.data, column.type)
        return nulls, (_bitmap(self.present) if nulls else b"", data.view(np.uint8).data)


AnyCells = EncodedCells | ListCells | NullCells | MaskedCells


def numbers(cells: EncodedCells, column: Column) -> MaskedCells:
    """The numbers of a column, as arrays that may be changed."""
    encoded = cells.encode(column, 0)
    assert encoded is not None  # only strings and lists have a limit
    nulls, (bitmap, data) = encoded
    present = np.ones(len(cells), np.bool_)
    if nulls:
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(cells), bitorder="little")
        present = bits.view(np.bool_)
    return MaskedCells(np.frombuffer(data, column.type).copy(), present)


def encode(cells: list[Any], type: str, limit: int) -> tuple[int, tuple[bytes, ...]] | None:
    """How many nulls there are, and the buffers. None when strings or lists are longer together than `limit`."""
    nulls = cells.count(None)
    bitmap = b""
    if nulls:
        filler = {"string": "", "float64": np.nan}.get(type, 0)
        if nulls == len(cells):  # most columns have no nulls or nothing else
            present, cells = np.zeros(nulls, np.bool_), [filler] * nulls
        else:
            present = np.fromiter((cell is not None for cell in cells), np.bool_, len(cells))
            cells = [filler if cell is None else cell for cell in cells]
        bitmap = _bitmap(present)
    buffers = _ENCODERS.get(type, _numbers)(cells, type, limit)
    return None if buffers is None else (nulls, (bitmap, *buffers))


def _numbers(cells: list[Any], type: str, limit: int) -> tuple[bytes]:  # noqa: ARG001 - as all encoders
    return (np.fromiter(cells, type, len(cells)).tobytes(),)


def _flags(cells: list[Any], type: str, limit: int) -> tuple[bytes]:  # noqa: ARG001
    return (_bitmap(np.array(cells, np.bool_)),)


def _strings(cells: list[str], type: str, limit: int) -> tuple[bytes, bytes] | None:  # noqa: ARG001
    text = "".join(cells)
    data = as_utf8(text)
    parts: list[Any] = cells if len(data) == len(text) else [as_utf8(cell) for cell in cells]  # ASCII or not
    offsets = _offsets(parts, limit)
    return None if offsets is None else (offsets, data)


def _lists(cells: list[Any], type: str, limit: int) -> tuple[bytes, bytes, bytes] | None:  # noqa: ARG001
    offsets = _offsets(cells, limit)
    if offsets is None:
        return None
    return offsets, b"", np.fromiter(chain.from_iterable(cells), np.int64).tobytes()


Encoder = Callable[[list[Any], str, int], tuple[bytes, ...] | None]
_ENCODERS: dict[str, Encoder] = {"bool": _flags, "string": _strings, "list<int64>": _lists}


def _bitmap(flags: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(flags, bitorder="little").tobytes()


def _offsets(cells: Sequence[Any], limit: int) -> bytes | None:
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, cells), np.int64, len(cells)), out=offsets[1:])
    return None if offsets[-1] > limit else offsets.astype(np.int32).tobytes()
