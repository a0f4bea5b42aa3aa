"""The rows of a comparison that were asked for: filtered, sorted, and cut to the first few.

Made by `Comparison.select` and `Comparison.table`; shown by `row_table`. Only row numbers are kept, so that a view of
millions of rows costs little until it is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from astray.comparison.select.columns import ColumnCells, Columns
from astray.comparison.select.filter import Filter
from astray.errors import UsageError
from astray.store import DictionaryColumn
from astray.store.arrow import PIECE_ROWS, batch_of, schema_of, stream_of
from astray.wording import counted, did_you_mean, numeral

if TYPE_CHECKING:
    import pandas


Order = str | Sequence[str]


class Pairs:
    """Some rows of a comparison, in some order.

    >>> diff.select(filter="wrong and role == output", sort="-error", top=10)
    <Pairs: 10 of 54 rows where wrong and role == output, sorted by -error>
    >>> print(diff.select(sort="-error"))           # as the command line shows them
    >>> pyarrow.table(diff.select("wrong")), polars.DataFrame(diff.table()), diff.table().to_pandas()

    rows: their numbers in `comparison.pairs`.
    found: how many there were before `top` cut them.
    asked: the filter and the order, in words.
    named: the columns that the filter and the order name.
    """

    def __init__(
        self, columns: Columns, rows: npt.NDArray[np.int64], found: int, asked: str = "", named: Sequence[str] = ()
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.found = found
        self.asked = asked
        self.named = named

    @classmethod
    def select(cls, columns: Columns, filter: str | Filter | None, sort: Order | None, top: int | None) -> Pairs:
        """The rows that fit the filter, in the order asked for, and of these the first `top`."""
        chosen = Filter.parse(filter) if isinstance(filter, str) else filter
        keys = sort_keys(sort)
        rows = np.arange(len(columns)) if chosen is None else np.flatnonzero(chosen.mask(columns))
        if keys:
            rows = rows[_order(columns, rows, keys)]
        shown = rows if top is None else rows[: check_top(top)]
        words = [*(name for name, _ in keys), *(chosen.words if chosen else ())]
        asked = [f"where {chosen.text}"] if chosen else []
        asked += [f"sorted by {','.join('-' * descending + name for name, descending in keys)}"] if keys else []
        named = [word for word in dict.fromkeys(words) if word in columns]
        return cls(columns, shown, len(rows), ", ".join(asked), named)

    @property
    def names(self) -> list[str]:
        """The columns, in order: those of pairs.csv, which `astray help reports` explains."""
        return self.columns.names

    def first(self, most: int | None) -> Pairs:
        """The first so many of these; all for None."""
        return Pairs(self.columns, self.rows[:most], self.found, self.asked, self.named)

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame: texts as categories, what is not known as NaN or NA."""

        return frame(self)

    def __getitem__(self, name: str) -> ColumnCells:
        return self.columns.at(name, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        schema = schema_of({name: self.columns.at(name, slice(0, 0)).column for name in self.names})
        pieces = []
        for begin in range(0, len(self.rows), PIECE_ROWS):
            rows = self.rows[begin : begin + PIECE_ROWS]
            pieces.append(batch_of(schema, len(rows), [self.columns.at(name, rows) for name in self.names]))
        return stream_of(schema, pieces, requested_schema)

    def __str__(self) -> str:
        from astray.comparison.select.row_table import render

        return render(self)

    def _repr_html_(self) -> str:
        from astray.comparison.select.row_table import rows_as_html

        return rows_as_html(self)

    def __repr__(self) -> str:
        return f"<Pairs: {self.described}>"

    @property
    def described(self) -> str:
        """How many rows these are, and of which: "10 of 54 rows where wrong, sorted by -error"."""
        rows = (
            f"{len(self):,} of {counted(self.found, 'row')}" if len(self) < self.found else counted(self.found, "row")
        )
        return f"{rows} {self.asked}".rstrip()


def sort_keys(sort: Order | None) -> list[tuple[str, bool]]:
    """The columns to sort by, and whether the largest comes first.

    >>> sort_keys("-error, site")
    [('error', True), ('site', False)]
    """
    words = sort.split(",") if isinstance(sort, str) else list(sort or ())
    keys = [word.strip() for word in words]
    if not all(key.lstrip("-") for key in keys):
        raise UsageError(f"{sort!r} is not an order. Name columns with commas between them, such as -error,site.")
    return [(key.removeprefix("-"), key.startswith("-")) for key in keys]


def _order(columns: Columns, rows: npt.NDArray[np.int64], keys: list[tuple[str, bool]]) -> npt.NDArray[np.int64]:
    """The order of some rows. What is not known comes last either way; ties keep the order of observation."""
    arrays: list[npt.NDArray[Any]] = []
    for name, descending in keys:
        if name not in columns:
            raise UsageError(
                f"There is no column {name!r} to sort by.{did_you_mean(name, columns.names)} "
                f"There are {', '.join(columns.names)}."
            )
        cells = columns.at(name, rows)
        ranked = _ranked(name, cells)
        arrays += [~cells.known, -ranked if descending else ranked]
    return np.lexsort(arrays[::-1])  # the last is the first to count


def _ranked(name: str, cells: ColumnCells) -> npt.NDArray[Any]:
    """A column as numbers that sort like it: verdicts by gravity, texts so that h.2 comes before h.10."""
    if not isinstance(cells.column, DictionaryColumn):
        if cells.column.dtype == np.uint64:
            return np.unique(cells.column, return_inverse=True)[1]
        return np.where(cells.known, cells.column, 0).astype(np.float64)
    values = cells.column.values
    if name == "verdict" or not values:
        return cells.column.codes
    places = np.zeros(len(values) + 1, np.int64)
    places[sorted(range(len(values)), key=lambda code: natural(values[code]))] = np.arange(len(values))
    return places[cells.column.codes]


def natural(value: Any) -> list[tuple[int, int, str]]:
    """A text so that numbers in it compare as numbers; a shape by its sizes."""
    if isinstance(value, tuple):
        return [(1, size, "") for size in value]
    parts = ((part, numeral(part)) for part in re.split(r"(\d+)", value))
    return [(0, 0, part) if number is None else (1, number, "") for part, number in parts]


def check_top(top: int) -> int:
    """How many rows to show. Raises UsageError for a negative number."""
    if top < 0:
        raise UsageError(f"{top} rows cannot be shown. Give a number from 0 on.")
    return top


def frame(pairs: Pairs) -> pandas.DataFrame:
    """The rows with every column, made straight from the columns: pyarrow is not needed."""
    try:
        import pandas
    except ImportError:
        raise UsageError(
            "to_pandas needs pandas, which is not installed: pip install pandas. "
            "Without it, pyarrow.table(...) and polars.DataFrame(...) take the same rows."
        ) from None
    columns = {name: _series(pandas, pairs[name]) for name in pairs.names}
    return pandas.DataFrame(columns, copy=False)


def _series(pandas: Any, cells: ColumnCells) -> Any:
    column = cells.column
    if isinstance(column, DictionaryColumn):
        words = pandas.Index(column.values, dtype=object, tupleize_cols=False)
        return pandas.Categorical.from_codes(column.codes, words)
    if column.dtype.kind in "iu" and not cells.known.all():
        return pandas.arrays.IntegerArray(column, ~cells.known)
    return column
