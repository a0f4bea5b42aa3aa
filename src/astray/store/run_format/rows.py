"""Rows of the two tables while they wait to be written, and the Arrow buffers that their columns become.

The program appends rows, `encoder.py` takes columns. `RowBuffer` keeps columns in native memory, or tuples where
`_columns` is not built; both give the same bytes. A row is the plain tuple of a record's fields. A tensor's statistics
are a tuple, a ticket for measurements that come later, or None; in place of its blob it has its `TensorBytes`.
Flattened, a tensor's row has more columns than fields: the ticket, and each of the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from astray.records import Call, Statistics, Tensor
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.wording import as_utf8

Row = tuple[Any, ...]

ArrowBuffer = bytes | memoryview
"""Bytes; `len` is how many."""

Encoded = tuple[int, tuple[ArrowBuffer, ...]]
"""How many nulls a column has, and its buffers in Arrow's order. One that is not needed is empty."""

CellType = tuple[str, bool]
"""A column: its type, and whether it may be None."""

_ROW_BYTES = 1000
"""What a tensor's row takes: a tuple with three others in it, and about twenty numbers. A call's takes less."""


class PythonRowBuffer:
    """The native `RowBuffer`, in Python.

    `cells` describes the items of a row: one column each, or a list of the columns of a tuple. In place of that tuple
    there may be a ticket, which has a column before those. When it is not `open`, rows are dropped.
    """

    def __init__(self, cells: tuple[CellType | list[CellType], ...]) -> None:
        self.open = True
        self._cells = cells
        self._columns: list[tuple[int, int | None, CellType]] = []  # index of the item in a row, and in the tuple there
        for item, cell in enumerate(cells):
            if isinstance(cell, list):
                self._columns += [(item, -1, ("int64", True)), *((item, i, type) for i, type in enumerate(cell))]
            else:
                self._columns.append((item, None, cell))
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """About how many bytes of memory the rows take."""
        return _ROW_BYTES * len(self._rows)

    def append(self, row: Row) -> None:
        """Append a row."""
        if len(row) != len(self._cells):
            raise IndexError(f"A row has {len(self._cells)} items, not {len(row)}.")
        if self.open:
            self._rows.append(row)

    def take(self, count: int | None = None) -> PythonRowBuffer:
        """Move the first rows out, or all. Other threads may append meanwhile: each line is one interpreter step."""
        taken = PythonRowBuffer(self._cells)
        count = len(self._rows) if count is None else count
        taken._rows = self._rows[:count]
        del self._rows[:count]
        return taken

    def extend(self, other: PythonRowBuffer) -> None:
        """Append other rows of this kind."""
        self._rows += other._rows

    def encode(self, column: int, start: int, stop: int, limit: int) -> Encoded | None:
        """How many nulls these rows of a column have, and their buffers in Arrow's order.

        None when strings or lists are longer together than `limit`.
        """
        item, _, (type, nullable) = self._columns[column]
        cells = self._values(column)[start:stop]
        if not nullable and None in cells:
            raise TypeError(f"Item {item} of a row is None, in a column without nulls.")
        return encode(cells, type, limit)

    def tickets(self, column: int) -> tuple[bytes, bytes]:
        """The rows that have a ticket, and these tickets, as bytes of int64."""
        cells = self._values(column)
        rows = [row for row, ticket in enumerate(cells) if ticket is not None]
        return np.array(rows, np.int64).tobytes(), np.array([cells[row] for row in rows], np.int64).tobytes()

    def cells(self, column: int) -> list[Any]:
        """The cells of a column of texts or objects."""
        return self._values(column)

    def _values(self, column: int) -> list[Any]:
        item, within, _ = self._columns[column]
        items: list[Any] = list(map(itemgetter(item), self._rows))
        if within is None:
            return items
        if within < 0:
            return [item if type(item) is int else None for item in items]
        return [item[within] if isinstance(item, tuple) else None for item in items]


if TYPE_CHECKING:
    RowBuffer = PythonRowBuffer
else:
    try:
        from astray.store.run_format._columns import Rows as RowBuffer
    except ImportError:  # installed where there was no compiler
        RowBuffer = PythonRowBuffer

_TYPES: dict[str, CellType] = {column.name: (column.type, column.nullable) for column in TENSORS}
_MEASURED: list[CellType] = [_TYPES[name] for name in Statistics._fields]
_CALL = tuple((column.type, column.nullable) for column in CALLS)
_FIELDS: dict[str, CellType | list[CellType]] = {**_TYPES, "statistics": _MEASURED, "blob": ("object", True)}
_TENSOR = tuple(_FIELDS[name] for name in Tensor._fields)

STEP = Call._fields.index("step")
TICKET = Tensor._fields.index("statistics")
MEASURED = TICKET + 1
FINGERPRINT, VALUES, PLACEMENT, NOTE, VALUE_NUMBER = range(MEASURED + len(_MEASURED), MEASURED + len(_MEASURED) + 5)
"""Indices into a tensor's flattened row: the ticket, the first of the statistics, and so on."""


def call_rows() -> RowBuffer:
    """An empty container for rows of calls."""
    return RowBuffer(_CALL)


def tensor_rows() -> RowBuffer:
    """An empty container for rows of tensors."""
    return RowBuffer(_TENSOR)


# -- columns before they are written -----------------------------------------------------------------------------------


class EncodableRows(Protocol):
    """Rows whose columns can be encoded, such as `RowBuffer`."""

    def encode(self, column: int, start: int, stop: int, limit: int) -> Encoded | None:
        """The buffers of some rows of a column. None when strings or lists are longer together than `limit`."""


@dataclass(frozen=True, slots=True)
class EncodedCells:
    """A column of some rows, from `start` to `stop`."""

    rows: EncodableRows
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
