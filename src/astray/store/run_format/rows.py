"""Rows of the two tables while they wait to be written: columns in native memory, tuples where `_columns` is not built.

A row is the plain tuple of a record's fields. A tensor's statistics are a tuple, or a ticket for measurements that come
later, or None; in place of its blob it has its `TensorBytes`. Spread out, a tensor's row has more columns than fields:
the ticket, and each of the statistics.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from astray.records import Call, Statistics, Tensor
from astray.store.run_format import cells
from astray.store.run_format.schema import CALLS, TENSORS

Row = tuple[Any, ...]
Encoded = tuple[int, tuple[bytes | memoryview, ...]]

Pair = tuple[str, bool]
"""A column: its type, and whether it may be None."""


_ROW_BYTES = 1000
"""What a tensor's row takes: a tuple with three others in it, and about twenty numbers. A call's takes less."""


class PythonRows:
    """The native `Rows`, in Python.

    `cells` says what the items of a row are: one column each, or a list of the columns of a tuple. That item may be a
    ticket instead, which has a column before those. When it is not `open`, rows are dropped.
    """

    def __init__(self, cells: tuple[Pair | list[Pair], ...]) -> None:
        self.open = True
        self._cells = cells
        self._columns: list[tuple[int, int | None, Pair]] = []  # which item of a row, and which of the tuple in it
        for item, cell in enumerate(cells):
            if isinstance(cell, list):
                self._columns += [(item, -1, ("int64", True)), *((item, i, pair) for i, pair in enumerate(cell))]
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

    def take(self, count: int | None = None) -> PythonRows:
        """Move the first rows out, or all. Other threads may append meanwhile: each line is one interpreter step."""
        taken = PythonRows(self._cells)
        count = len(self._rows) if count is None else count
        taken._rows = self._rows[:count]
        del self._rows[:count]
        return taken

    def extend(self, other: PythonRows) -> None:
        """Append other rows of this kind."""
        self._rows += other._rows

    def encode(self, column: int, start: int, stop: int, limit: int) -> Encoded | None:
        """How many nulls these rows of a column have, and their buffers in Arrow's order.

        None when strings or lists are longer together than `limit`.
        """
        item, _, (type, nullable) = self._columns[column]
        found = self._values(column)[start:stop]
        if not nullable and None in found:
            raise TypeError(f"Item {item} of a row is None, in a column without nulls.")
        return cells.encode(found, type, limit)

    def tickets(self, column: int) -> tuple[bytes, bytes]:
        """The rows that have a ticket, and these tickets, as bytes of int64."""
        found = self._values(column)
        places = [place for place, ticket in enumerate(found) if ticket is not None]
        return np.array(places, np.int64).tobytes(), np.array([found[place] for place in places], np.int64).tobytes()

    def cells(self, column: int) -> list[Any]:
        """The cells of a column of texts or objects."""
        return self._values(column)

    def _values(self, column: int) -> list[Any]:
        item, within, _ = self._columns[column]
        found: list[Any] = list(map(itemgetter(item), self._rows))
        if within is None:
            return found
        if within < 0:
            return [cell if type(cell) is int else None for cell in found]
        return [cell[within] if isinstance(cell, tuple) else None for cell in found]


if TYPE_CHECKING:
    Rows = PythonRows
else:
    try:
        from astray.store.run_format._columns import Rows
    except ImportError:  # installed where there was no compiler
        Rows = PythonRows

_TYPES: dict[str, Pair] = {column.name: (column.type, column.nullable) for column in TENSORS}
_MEASURED: list[Pair] = [_TYPES[name] for name in Statistics._fields]
_CALL = tuple((column.type, column.nullable) for column in CALLS)
_FIELDS: dict[str, Pair | list[Pair]] = {**_TYPES, "statistics": _MEASURED, "blob": ("object", True)}
_TENSOR = tuple(_FIELDS[name] for name in Tensor._fields)

STEP = Call._fields.index("step")
TICKET = Tensor._fields.index("statistics")
MEASURED = TICKET + 1
FINGERPRINT, VALUES, PLACEMENT, NOTE, VALUE_NUMBER = range(MEASURED + len(_MEASURED), MEASURED + len(_MEASURED) + 5)
"""Indices into a tensor's row, spread out: the ticket, the first of the statistics, and so on."""


def call_rows() -> Rows:
    """An empty container for rows of calls."""
    return Rows(_CALL)


def tensor_rows() -> Rows:
    """An empty container for rows of tensors."""
    return Rows(_TENSOR)
