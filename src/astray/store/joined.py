"""All ranks of a run as one table in Arrow's terms: every tensor beside its call.

Any library that takes the Arrow C stream interface takes this object: pyarrow, pandas, Polars, DuckDB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from astray.store.arrow import PIECE_ROWS, batch_of, stream_of
from astray.store.columns import BoolArray, Coded, Column, Table
from astray.store.run_format.encoder import arrow_schema
from astray.store.run_format.schema import CALLS, TENSORS
from astray.store.run_format.schema import Column as ColumnType

if TYPE_CHECKING:
    from astray.store.run import RankRun

RANK = ColumnType("rank", "int32")
OF_CALL = tuple(column._replace(nullable=True) for column in CALLS[1:])  # null where a killed run lost the call
COLUMNS = (RANK, CALLS[0], *OF_CALL, *TENSORS[1:])


class Joined:
    """One row per tensor: `rank`, the columns of its call, then its own.

    >>> run.table()
    <Joined: 9,120 tensors, 41 columns; pyarrow.table, polars.DataFrame and duckdb take it>
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
        pieces = [
            _piece(schema, rank, slice(start, start + PIECE_ROWS))
            for rank in self._ranks.values()
            for start in range(0, len(rank.tensors), PIECE_ROWS)
        ]
        return stream_of(schema, pieces, requested_schema)

    def __repr__(self) -> str:
        takers = "pyarrow.table, polars.DataFrame and duckdb take it"
        return f"<Joined: {len(self):,} tensors, {len(COLUMNS)} columns; {takers}>"


def _piece(schema: Any, rank: RankRun, part: slice) -> Any:
    """Some rows of one rank as an Arrow record batch."""
    tensors, call_rows = rank.tensors.take(part), rank.call_rows[part]
    calls = (rank.calls if len(rank.calls) else _one_null_row(rank.calls)).take(call_rows)
    count, known = len(tensors), call_rows >= 0
    sources: list[tuple[Column, BoolArray]] = [
        (np.full(count, rank.rank, np.int32), np.ones(count, np.bool_)),
        (tensors["seq"], tensors.valid("seq")),
        *((calls[column.name], calls.valid(column.name) & known) for column in OF_CALL),
        *((tensors[column.name], tensors.valid(column.name)) for column in TENSORS[1:]),
    ]
    return batch_of(schema, count, sources)


def _one_null_row(table: Table) -> Table:
    """Something to look rows up in when there are none."""
    null: dict[str, Column] = {}
    for name, column in table.columns.items():
        coded = isinstance(column, Coded)
        null[name] = Coded(np.array([-1], np.int32), []) if coded else np.zeros(1, table.numbers(name).dtype)
    return Table(null)
