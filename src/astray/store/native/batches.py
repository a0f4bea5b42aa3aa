"""Rows to Arrow: turns the rows of one table into record batches and appends them to its file.

The file is an Arrow IPC stream from its first byte on: the schema is written when it is made, every batch is one more
message, and each goes to the kernel before `append` returns. A killed process leaves whole batches and at most one
torn one. Runs in the writer's thread, in competition with the user's program for the interpreter, so everything is
done a column at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nanoarrow as na
import numpy as np
import numpy.typing as npt
from nanoarrow.ipc import StreamWriter

from astray.record import Blob, Call, Statistics, Tensor
from astray.store.late import Late
from astray.store.native import cells
from astray.store.native.cells import Cells, Encoded, Masked, Row
from astray.store.native.disk import write_all
from astray.store.native.message import END, record_batch
from astray.store.native.schema import Column

OFFSET_LIMIT = 2**31 - 1
"""Arrow's string and list columns count their bytes and elements in 32 bits."""

STATISTICS, FINGERPRINT, PLACEMENT, NOTE = map(Tensor._fields.index, ("statistics", "fingerprint", "placement", "note"))
_MOMENTS = Statistics._fields.index("zeros")  # the six before it are floats


def call_columns(rows: list[Row]) -> list[Cells]:
    """The columns of `CALLS`, which are the fields of a `Call`."""
    return [Cells(rows, item) for item in range(len(Call._fields))]


def tensor_columns(rows: list[Row], blobs: list[Blob | None], late: Late | None = None) -> list[Cells | Masked]:
    """The columns of `TENSORS`: the fields of a `Tensor` with its statistics and `blobs` spread out.

    Statistics that come by ticket are waited for.
    """
    spread: list[Cells | Masked] = [Cells(rows, item, STATISTICS) for item in range(len(Statistics._fields))]
    fingerprint: Cells | Masked = Cells(rows, FINGERPRINT)
    note = Cells(rows, NOTE)
    if late is not None:
        places, tickets = (np.frombuffer(found, np.int64) for found in cells.tickets(rows, STATISTICS))
        if len(tickets):
            spread, fingerprint, note = _redeemed(late, rows, places, tickets)
    plain = [Cells(rows, item) for item in range(STATISTICS)]
    where = [Cells(blobs, item) for item in range(len(Blob._fields))]
    return [*plain, *spread, fingerprint, *where, Cells(rows, PLACEMENT), note]


def _redeemed(
    late: Late, rows: list[Row], places: npt.NDArray[np.int64], tickets: npt.NDArray[np.int64]
) -> tuple[list[Cells | Masked], Masked, Cells]:
    """The columns of the statistics, the fingerprints and the notes of rows of which those at `places` hold tickets."""
    (moments, counts, prints), counted, here, lost = late.redeem(tickets)
    note = Cells(rows, NOTE)
    if lost:
        notes = cells.values(rows, NOTE)
        for place in places[~here].tolist():
            notes[place] = f"{notes[place]}; {lost}" if notes[place] else lost
        note = Cells([(text,) for text in notes], 0)
    if len(places) < len(rows):  # others were measured at once, or not at all
        at = np.full(len(rows), len(places))
        at[places] = np.arange(len(places))
        moments, counts, prints, counted, here = (
            np.concatenate([column, np.zeros_like(column, shape=(*column.shape[:-1], 1))], axis=-1)[..., at]
            for column in (moments, counts, prints, counted, here)
        )
        for place in np.flatnonzero(at == len(places)).tolist():
            measured, fingerprint = rows[place][STATISTICS], rows[place][FINGERPRINT]
            if fingerprint is not None:
                here[place], prints[place] = True, fingerprint
            if measured is not None:
                counted[place], moments[:, place], counts[:, place] = True, measured[:_MOMENTS], measured[_MOMENTS:]
    known = ~np.isnan(moments) & counted
    spread: list[Cells | Masked] = [Masked(*column) for column in zip(moments, known, strict=True)]
    return [*spread, *(Masked(column, counted) for column in counts)], Masked(prints, here), note


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

    def append(self, cells: Sequence[Cells | Masked]) -> None:
        """Write rows, given as columns, as one batch, or as several when they do not fit in one."""
        count = len(cells[0])
        encoded = self._encode(cells)
        if encoded is not None:
            self._write(record_batch(count, encoded))
            self.rows += count
        elif count == 1:
            raise ValueError(f"A row has more than {OFFSET_LIMIT:,} bytes of text, which an Arrow column cannot hold.")
        else:
            for part in (slice(0, count // 2), slice(count // 2, count)):
                self.append([column.part(part) for column in cells])

    def _encode(self, cells: Sequence[Cells | Masked]) -> list[Encoded] | None:
        """The buffers of every column; None when one of them holds too much for a batch."""
        columns: list[Encoded] = []
        for column, found in zip(self._columns, cells, strict=True):
            encoded = found.encode(column, OFFSET_LIMIT)
            if encoded is None:
                return None
            columns.append(encoded)
        return columns

    def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            write_all(self._file.fileno(), [memoryview(piece) for piece in pieces], self._end)
        except OSError:  # leave whole batches, so that rows which fit may still follow
            self._file.truncate(self._end)
            raise
        self._end += sum(map(len, pieces))

    def close(self) -> None:
        """Write the mark that the stream ends here."""
        try:
            self._write([END])
        finally:
            self._file.close()


def _schema_message(columns: tuple[Column, ...]) -> bytes:
    """What a file begins with."""
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
