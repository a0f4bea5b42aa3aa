"""Columns in memory as Arrow arrays, for every library that takes the Arrow C stream interface.

Rows are handed over in pieces, so that the offsets of a string column always fit into Arrow's 32 bits.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import nanoarrow as na
import numpy as np
from nanoarrow.c_array_stream import CArrayStream

from astray.store.columns import BoolArray, Coded, Column
from astray.wording import as_utf8

PIECE_ROWS = 1 << 16


def schema_of(columns: dict[str, Column]) -> Any:
    """The Arrow schema of some columns, each of which may have nulls."""
    return na.c_schema(na.struct({name: _type(column) for name, column in columns.items()}, nullable=False))


def stream_of(schema: Any, pieces: list[Any], requested_schema: Any = None) -> Any:
    """The capsule of a stream of record batches."""
    stream = CArrayStream.from_c_arrays(pieces, schema, move=True, validate=False)
    return stream.__arrow_c_stream__(requested_schema=requested_schema)


def batch_of(schema: Any, count: int, columns: list[tuple[Column, BoolArray]]) -> Any:
    """Some rows, each column with a mask of where it has a value, as a record batch."""
    arrays = [_array(schema.child(i), column, valid) for i, (column, valid) in enumerate(columns)]
    return na.c_array_from_buffers(schema, count, [None], children=arrays)


def _type(column: Column) -> Any:
    if isinstance(column, Coded):
        lists = bool(column.values) and isinstance(column.values[0], tuple)
        return na.list_(na.int64(nullable=False)) if lists else na.string()
    name = column.dtype.name
    return getattr(na, "bool_" if name == "bool" else name)()


def _array(schema: Any, column: Column, valid: BoolArray) -> Any:
    """A column as an Arrow array; of any type, but always with a bitmap that says which rows are null."""
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
