"""Tables in memory, as the stages after `store` read them.

Strings and shapes repeat endlessly in a recording, so they are dictionary-encoded, as integer codes into the few
distinct values: comparing a million sites is then comparing a million integers. Nulls need no objects: −1 in a code or
an integer column, NaN in a float column, and a mask where the column can hold every bit pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]


class DictionaryColumn(Generic[T]):
    """A column of repeating values: `codes` are indices into `values`, −1 means null.

    >>> column = DictionaryColumn.of(["relu", "linear", None, "relu"])
    >>> column.values, column.codes.tolist(), column[0], column[2]
    (['relu', 'linear'], [0, 1, -1, 0], 'relu', None)
    """

    __slots__ = ("codes", "values")

    def __init__(self, codes: npt.NDArray[np.int32], values: list[T]) -> None:
        self.codes = codes
        self.values = values

    @classmethod
    def of(cls, items: Sequence[T | None]) -> DictionaryColumn[T]:
        """Code a sequence of hashable objects, distinct values in order of first appearance."""
        known: dict[T, int] = {}
        codes = [-1 if item is None else known.setdefault(item, len(known)) for item in items]
        return cls(np.array(codes, np.int32), list(known))

    def code(self, value: T) -> int:
        """The code of `value`; −2, which no row has, when it is not among the values."""
        try:
            return self.values.index(value)
        except ValueError:
            return -2

    def take(self, rows: IntArray | BoolArray | slice) -> DictionaryColumn[T]:
        """The same column at some rows; the distinct values stay as they are."""
        return DictionaryColumn(self.codes[rows], self.values)

    def tolist(self) -> list[T | None]:
        """Every row as an object."""
        values: list[T | None] = [*self.values, None]
        return [values[code] for code in self.codes.tolist()]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> T | None:
        code = int(self.codes[row])
        return self.values[code] if code >= 0 else None

    def __iter__(self) -> Iterator[T | None]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        return f"<Coded {len(self):,} rows, {len(self.values):,} distinct>"


Column = npt.NDArray[Any] | DictionaryColumn[Any]


class Table:
    """Named columns of one length.

    `masks` holds a boolean array, true where the row has a value, for each column whose values cannot show its nulls.
    """

    __slots__ = ("_masks", "columns")

    def __init__(self, columns: Mapping[str, Column], masks: Mapping[str, BoolArray] | None = None) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns of a table have different lengths: {lengths}.")
        self.columns = dict(columns)
        self._masks = dict(masks or {})

    @property
    def names(self) -> list[str]:
        """The columns, in order."""
        return list(self.columns)

    def coded(self, name: str) -> DictionaryColumn[Any]:
        """The column `name`, which must be one of strings or shapes."""
        column = self.columns[name]
        assert isinstance(column, DictionaryColumn), f"{name} is a column of numbers"
        return column

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """The column `name`, which must be one of numbers."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray), f"{name} is a column of codes"
        return column

    def valid(self, name: str) -> BoolArray:
        """Where the column has a value, as booleans."""
        column = self.columns[name]
        if isinstance(column, DictionaryColumn):
            return column.codes >= 0
        mask = self._masks.get(name)
        return np.ones(len(column), np.bool_) if mask is None else mask

    def take(self, rows: IntArray | BoolArray | slice) -> Table:
        """The table at some rows: their numbers, a mask or a slice."""
        return Table(
            {name: _take(column, rows) for name, column in self.columns.items()},
            {name: mask[rows] for name, mask in self._masks.items()},
        )

    def row(self, index: int) -> dict[str, Any]:
        """One row as plain Python objects, nulls as None."""
        return {name: self._cell(name, index) for name in self.columns}

    def _cell(self, name: str, index: int) -> Any:
        column = self.columns[name]
        if isinstance(column, DictionaryColumn):
            return column[index]
        mask = self._masks.get(name)
        return column[index].item() if mask is None or mask[index] else None

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: list[str]) -> Table: ...
    def __getitem__(self, name: str | list[str]) -> Any:
        if isinstance(name, str):
            return self.columns[name]
        return Table({n: self.columns[n] for n in name}, {n: m for n, m in self._masks.items() if n in name})

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"<Table {len(self):,} rows: {', '.join(self.columns)}>"


def _take(column: Column, rows: IntArray | BoolArray | slice) -> Column:
    return column.take(rows) if isinstance(column, DictionaryColumn) else column[rows]
