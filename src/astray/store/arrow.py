"""Tables in memory as Arrow, for libraries that take the Arrow C stream interface: pyarrow, pandas, Polars, DuckDB.

`RunTable` is all ranks of a run as one table, every tensor beside its call. The pairs of a comparison and the rows of a
risk report use `schema_of`, `batch_of` and `stream_of` for theirs. Rows are exported in batches of 65,536, so that the
offsets of a string column always fit into Arrow's 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import nanoarrow as na
import numpy as np
from nanoarrow.c_array_stream import CArrayStream

from astray.store.columns import BoolArray, Column, DictionaryColumn, Table
from astray.store.run_format.encoder import arrow_schema
from astray.store.run_format.schema import CALLS, TENSORS
from astray.store.run_format.schema import Column as ColumnType
from astray.wording import as_utf8

if TYPE_CHECKING:
    from astray.store.run import RankRun


PIECE_ROWS = 1 << 16

RANK = ColumnType("rank", "int32")

CALL_COLUMNS = tuple(column._replace(nullable=True) for column in CALLS[1:])  # null where a killed run lost the call

COLUMNS = (RANK, CALLS[0], *CALL_COLUMNS, *TENSORS[1:])


class RunTable:
    """One row per tensor: `rank`, the columns of its call, then those of the tensor.

    >>> run.table()
    <RunTable: 9,120 tensors, 41 columns; pyarrow.table, polars.DataFrame and duckdb take it>
    """

    def __init__(self, ranks: Mapping[int, RankRun]) -> None:
        self._ranks = ranks

    @property
    def names(self) -> list[str]:
        """The columns, in order."""
        return [column.name for column in COLUMNS]

    def __len__(self) -> int:
        return sum(len(rank.tensors) for rank in self._ranks.values())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        schema = arrow_schema(COLUMNS)
        batches = [
            _batch(schema, rank, slice(start, start + PIECE_ROWS))
            for rank in self._ranks.values()
            for start in range(0, len(rank.tensors), PIECE_ROWS)
        ]
        return stream_of(schema, batches, requested_schema)

    def __repr__(self) -> str:
        consumers = "pyarrow.table, polars.DataFrame and duckdb take it"
        return f"<RunTable: {len(self):,} tensors, {len(COLUMNS)} columns; {consumers}>"


def _batch(schema: Any, rank: RankRun, rows: slice) -> Any:
    """Some rows of one rank as an Arrow record batch."""
    tensors, call_rows = rank.tensors.take(rows), rank.call_rows[rows]
    calls = (rank.calls if len(rank.calls) else _one_null_row(rank.calls)).take(call_rows)
    count, known = len(tensors), call_rows >= 0
    sources: list[tuple[Column, BoolArray]] = [
        (np.full(count, rank.rank, np.int32), np.ones(count, np.bool_)),
        (tensors["seq"], tensors.valid("seq")),
        *((calls[column.name], calls.valid(column.name) & known) for column in CALL_COLUMNS),
        *((tensors[column.name], tensors.valid(column.name)) for column in TENSORS[1:]),
    ]
    return batch_of(schema, count, sources)


def _one_null_row(table: Table) -> Table:
    """A table with one row of nulls, for lookups in an empty table."""
    null: dict[str, Column] = {}
    for name, column in table.columns.items():
        coded = isinstance(column, DictionaryColumn)
        null[name] = DictionaryColumn(np.array([-1], np.int32), []) if coded else np.zeros(1, table.numbers(name).dtype)
    return Table(null)


def schema_of(columns: dict[str, Column]) -> Any:
    """The Arrow schema of columns, each of which may have nulls."""
    return na.c_schema(na.struct({name: _type(column) for name, column in columns.items()}, nullable=False))


def stream_of(schema: Any, batches: list[Any], requested_schema: Any = None) -> Any:
    """The capsule of a stream of record batches."""
    stream = CArrayStream.from_c_arrays(batches, schema, move=True, validate=False)
    return stream.__arrow_c_stream__(requested_schema=requested_schema)


def batch_of(schema: Any, count: int, columns: list[tuple[Column, BoolArray]]) -> Any:
    """Rows as a record batch; each column comes with a mask of where it has a value."""
    arrays = [_array(schema.child(i), column, valid) for i, (column, valid) in enumerate(columns)]
    return na.c_array_from_buffers(schema, count, [None], children=arrays)


def _type(column: Column) -> Any:
    if isinstance(column, DictionaryColumn):
        lists = bool(column.values) and isinstance(column.values[0], tuple)
        return na.list_(na.int64(nullable=False)) if lists else na.string()
    name = column.dtype.name
    return getattr(na, "bool_" if name == "bool" else name)()


def _array(schema: Any, column: Column, valid: BoolArray) -> Any:
    """A column as an Arrow array, always with a bitmap that says which rows are null."""
    bitmap = np.packbits(valid, bitorder="little")
    if isinstance(column, np.ndarray):
        data = np.packbits(column, bitorder="little") if column.dtype == np.bool_ else np.ascontiguousarray(column)
        return na.c_array_from_buffers(schema, len(column), [bitmap, data])
    codes = np.where(valid, column.codes, len(column.values))  # one past the last stands for null
    lists = schema.n_children == 1
    choices: list[Any] = [*column.values, ()] if lists else [*map(as_utf8, column.values), b""]
    cells = [choices[code] for code in codes.tolist()]
    lengths = np.array([len(choice) for choice in choices])[codes]
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    if not lists:
        return na.c_array_from_buffers(schema, len(codes), [bitmap, offsets, b"".join(cells)])
    items = np.fromiter(chain.from_iterable(cells), np.int64, int(offsets[-1]))
    child = na.c_array_from_buffers(schema.child(0), len(items), [None, items])
    return na.c_array_from_buffers(schema, len(codes), [bitmap, offsets], children=[child])
