"""Rows to Arrow: turns the rows of one table into record batches and appends them to its file. `decoder.py` reads it.

The file is an Arrow IPC stream from its first byte on: the schema is written when the file is created, every batch is
one more message, and each goes to the kernel before `append` returns. A killed process leaves whole batches and at most
one truncated one. Runs in the writer's thread, which competes with the user's program for the interpreter, so
everything is done a column at a time.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nanoarrow as na
import numpy as np
import numpy.typing as npt
from nanoarrow.ipc import StreamWriter

from astray.records import Blob, Call, Statistics
from astray.store.deferred import DeferredMeasurements
from astray.store.run_format.disk_io import write_all
from astray.store.run_format.ipc import CONTINUES, RECORD_BATCH
from astray.store.run_format.rows import (
    FINGERPRINT,
    MEASURED,
    NOTE,
    PLACEMENT,
    TICKET,
    VALUE_NUMBER,
    AnyCells,
    ArrowBuffer,
    Encoded,
    EncodedCells,
    ListCells,
    NullCells,
    RowBuffer,
    numbers,
)
from astray.store.run_format.schema import TENSORS, Column

OFFSET_LIMIT = 2**31 - 1
"""Arrow's string and list columns count their bytes and elements in 32 bits."""

MOST_ROWS = 1 << 16
"""Rows in a batch at most."""

_MOMENTS = Statistics._fields.index("zeros")  # the six before it are floats
_FIRST_BAD = Statistics._fields.index("first_bad")  # the four before it are counts
_MEASURED = TENSORS[TICKET : TICKET + len(Statistics._fields) + 1]  # in the file there are no tickets


def call_columns(rows: RowBuffer) -> list[EncodedCells]:
    """The columns of `CALLS`, which are the fields of a `Call`."""
    return [EncodedCells(rows, column, 0, len(rows)) for column in range(len(Call._fields))]


def tensor_columns(
    rows: RowBuffer, blobs: list[Blob | None] | None = None, deferred: DeferredMeasurements | None = None
) -> list[AnyCells]:
    """The columns of `TENSORS`: the fields of a `Tensor` with its statistics and `blobs` flattened.

    Waits for statistics that come by ticket. `blobs` is None when no row has values.
    """
    count = len(rows)
    plain, (placement, note, value) = (
        [EncodedCells(rows, column, 0, count) for column in columns]
        for columns in (range(TICKET), (PLACEMENT, NOTE, VALUE_NUMBER))
    )
    measured: list[AnyCells] = [EncodedCells(rows, column, 0, count) for column in range(MEASURED, FINGERPRINT + 1)]
    notes: AnyCells = note
    if deferred is not None:
        at, tickets = (np.frombuffer(raw, np.int64) for raw in rows.tickets(TICKET))
        if len(tickets):
            measured, notes = _redeemed(deferred, rows, at, tickets)
    blob_columns: list[AnyCells] = (
        [NullCells(count) for _ in Blob._fields]
        if blobs is None
        else [
            ListCells([None if blob is None else blob[field] for blob in blobs]) for field in range(len(Blob._fields))
        ]
    )
    return [*plain, *measured, *blob_columns, placement, notes, value]


def _redeemed(
    deferred: DeferredMeasurements, rows: RowBuffer, at: npt.NDArray[np.int64], tickets: npt.NDArray[np.int64]
) -> tuple[list[AnyCells], AnyCells]:
    """The columns of statistics and fingerprints, and the notes, where the rows `at` these indices hold tickets."""
    measurements, with_statistics, available, lost = deferred.redeem(tickets)
    moments, counts, prints, first_bad, first_bad_value = measurements
    columns = [numbers(EncodedCells(rows, MEASURED + i, 0, len(rows)), column) for i, column in enumerate(_MEASURED)]
    for column, data in zip(columns, (*moments, *counts, first_bad, first_bad_value, prints), strict=True):
        column.data[at] = data
    for column, data in zip(columns[:_MOMENTS], moments, strict=True):
        column.present[at] = with_statistics & ~np.isnan(data)
    for column in columns[_MOMENTS:_FIRST_BAD]:
        column.present[at] = with_statistics
    for column in columns[_FIRST_BAD:-1]:
        column.present[at] = with_statistics & (first_bad >= 0)
    columns[-1].present[at] = available
    if not lost:
        return [*columns], EncodedCells(rows, NOTE, 0, len(rows))
    notes = rows.cells(NOTE)
    for row in at[~available].tolist():
        notes[row] = f"{notes[row]}; {lost}" if notes[row] else lost
    return [*columns], ListCells(notes)


def in_batches(columns: Sequence[Column], cells: Sequence[AnyCells]) -> Iterator[tuple[int, list[Encoded]]]:
    """Rows, given as columns, as one batch, or several when they do not fit in one: row counts and buffers."""
    count = len(cells[0])
    encoded = _encode(columns, cells) if count <= MOST_ROWS else None
    if encoded is not None:
        yield count, encoded
    elif count == 1:
        raise ValueError(f"A row has more than {OFFSET_LIMIT:,} bytes of text, which an Arrow column cannot hold.")
    else:
        size = MOST_ROWS if count > MOST_ROWS else count // 2
        for start in range(0, count, size):
            yield from in_batches(columns, [column.part(slice(start, start + size)) for column in cells])


def _encode(columns: Sequence[Column], cells: Sequence[AnyCells]) -> list[Encoded] | None:
    """The buffers of every column; None when one of them holds too much for a batch."""
    result: list[Encoded] = []
    for column, column_cells in zip(columns, cells, strict=True):
        encoded = column_cells.encode(column, OFFSET_LIMIT)
        if encoded is None:
            return None
        result.append(encoded)
    return result


class BatchFile:
    """One table's file, open for appending."""

    def __init__(self, path: Path, columns: tuple[Column, ...]) -> None:
        self._columns = columns
        self._file = path.open("xb", buffering=0)
        self._end = 0
        self.rows = 0
        try:
            self._write([_schema_message(columns)])
        except OSError:
            self._file.close()
            raise

    def append(self, cells: Sequence[AnyCells]) -> None:
        """Write rows, given as columns."""
        for count, encoded in in_batches(self._columns, cells):
            self._write(record_batch(count, encoded))
            self.rows += count

    def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            write_all(self._file.fileno(), [memoryview(piece) for piece in pieces], self._end)
        except OSError:  # cut back to whole batches, so that rows which fit may still follow
            self._file.truncate(self._end)
            raise
        self._end += sum(map(len, pieces))

    def close(self) -> None:
        """Write the end mark of the stream."""
        try:
            self._write([END])
        finally:
            self._file.close()


def _schema_message(columns: tuple[Column, ...]) -> bytes:
    """The message that a file begins with."""
    written = io.BytesIO()
    StreamWriter.from_writable(written).write_stream(na.c_array_stream(na.Array([], arrow_schema(columns))))
    return written.getvalue()


def arrow_schema(columns: tuple[Column, ...]) -> Any:
    """The Arrow schema of a table."""
    types: dict[str, Callable[..., Any]] = {
        "int32": na.int32,
        "int64": na.int64,
        "uint64": na.uint64,
        "float64": na.float64,
        "bool": na.bool_,
        "string": na.string,
        "list<int64>": lambda nullable: na.list_(na.int64(nullable=False), nullable=nullable),
    }
    return na.c_schema(na.struct({c.name: types[c.type](nullable=c.nullable) for c in columns}, nullable=False))


# -- a record batch as a message of the stream -------------------------------------------------------------------------
# Its description, and the buffers behind it; `ipc.py` reads both. The description is a FlatBuffer whose tables can
# always be at the same offsets, so one `struct` writes it: a batch takes microseconds, and its buffers are not copied.
# The layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc

END = struct.pack("<II", CONTINUES, 0)
"""The mark that a stream ends."""

_VERSION = 4  # how Arrow counts the fifth version of its metadata
_LIST_BUFFERS = 4  # of a list column: its items are a column inside of it
_PADDING = bytes(8)  # buffers begin at multiples of eight bytes

# Offsets count from the start of the description. A table begins with the offset back to its list of fields: the size
# of the list, that of the table, and where in the table each field is. References count from their own position.
_HEAD = struct.Struct(
    "<II"  # before it: the mark of a message, and how long the description is
    "I"  # 0: a reference to the message
    "6H"  # 4: the fields of the message: version, kind of header, header, bytes of the body
    "i I q h B x"  # 16: the message: offset back, header, bytes of the body, version, kind of header
    "5H 2x"  # 36: the fields of the batch: rows, columns, buffers
    "i I q I"  # 48: the batch: offset back, columns, rows, buffers
    "I"  # 68: how many columns; they follow at 72, each as (rows, nulls)
)
_MESSAGE_FIELDS = (12, 20, 16, 18, 4, 8)
_BATCH_FIELDS = (10, 20, 8, 4, 16)


def record_batch(rows: int, columns: Sequence[Encoded]) -> list[ArrowBuffer]:
    """The bytes of a batch, as pieces that follow one another in the file."""
    counts: list[int] = []
    extents: list[int] = []
    pieces: list[ArrowBuffer] = []
    end = 0
    for nulls, buffers in columns:
        counts += (rows, nulls)
        if len(buffers) == _LIST_BUFFERS:
            counts += (len(buffers[-1]) // 8, 0)
        for buffer in buffers:
            size = len(buffer)
            extents += (end, size)
            if size:
                pieces += (buffer, _PADDING[: -size % 8])
                end += size + -size % 8
    return [_description(rows, counts, extents, end), *pieces]


def _description(rows: int, counts: list[int], extents: list[int], body: int) -> bytes:
    columns = struct.pack(f"<{len(counts)}q", *counts)
    buffers = struct.pack(f"<4xI{len(extents)}q", len(extents) // 2, *extents)
    head = _HEAD.pack(
        *(CONTINUES, _HEAD.size - 8 + len(columns) + len(buffers)),
        *(16, *_MESSAGE_FIELDS),
        *(16 - 4, 48 - 20, body, _VERSION, RECORD_BATCH),
        *_BATCH_FIELDS,
        *(48 - 36, 68 - 52, rows, 72 + len(columns) + 4 - 64),
        len(counts) // 2,
    )  # fmt: skip
    return head + columns + buffers
