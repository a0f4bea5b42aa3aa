"""Rows to Arrow: turns the rows of one table into record batches and appends them to its file.

The file is an Arrow IPC stream from its first byte on: the schema is written when it is made, every batch is one more
message, and each goes to the kernel before `append` returns. A killed process leaves whole batches and at most one
torn one. Runs in the writer's thread, in competition with the user's program for the interpreter, so everything is
done a column at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import nanoarrow as na
import numpy as np
import numpy.typing as npt
from nanoarrow.ipc import StreamWriter

from astray.record import Blob, Call, Tensor
from astray.store.native.schema import Column

Cells = Sequence[Any]
Mask = npt.NDArray[np.bool_] | None

OFFSET_LIMIT = 2**31 - 1
"""Arrow's string and list columns count their bytes and elements in 32 bits."""

NO_STATISTICS = (None,) * 10
NO_BLOB = (None,) * 5


def call_columns(rows: Sequence[tuple[Any, ...]]) -> list[Cells]:
    """The columns of `CALLS`, which are the fields of a `Call`."""
    return _columns(rows, len(Call._fields))


def tensor_columns(rows: Sequence[tuple[Any, ...]], blobs: Sequence[Blob | None]) -> list[Cells]:
    """The columns of `TENSORS`: the fields of a `Tensor` with its statistics and `blobs` spread out."""
    *plain, statistics, fingerprint, _, placement, note = _columns(rows, len(Tensor._fields))
    spread = _columns([NO_STATISTICS if s is None else s for s in statistics], len(NO_STATISTICS))
    places = _columns([NO_BLOB if b is None else b for b in blobs], len(NO_BLOB))
    return [*plain, *spread, fingerprint, *places, placement, note]


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[Cells]:
    # zip(*rows) reads better, but makes an iterator for each row, and with so many new objects the garbage collector
    # sets in: twice as slow, and more in a program that holds many objects itself.
    return [list(map(itemgetter(i), rows)) for i in range(width)]


class BatchFile:
    """One table's file, open for appending."""

    def __init__(self, path: Path, columns: tuple[Column, ...]) -> None:
        self._columns = columns
        self._schema = arrow_schema(columns)
        self._file = path.open("xb", buffering=0)
        self._output = _WholeWrites(self._file)
        self._stream = StreamWriter.from_writable(self._output)
        try:
            self._stream.write_stream(na.c_array_stream(na.Array([], self._schema)))
        except (OSError, RuntimeError) as error:
            self._file.close()
            raise self._output.error or error from None
        self._end = self._file.tell()
        self.rows = 0

    def append(self, cells: Sequence[Cells]) -> None:
        """Write rows, given as columns, as one batch, or as several when they do not fit in one."""
        count = len(cells[0])
        try:
            batch = record_batch(self._schema, self._columns, cells)
        except _TooLargeError:
            if count == 1:
                raise
            for part in (slice(0, count // 2), slice(count // 2, count)):
                self.append([column[part] for column in cells])
            return
        try:
            self._stream.write_array(batch)
        except (OSError, RuntimeError) as error:  # leave whole batches, so that rows which fit may still follow
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise self._output.error or error from None
        self._end = self._file.tell()
        self.rows += count

    def close(self) -> None:
        """Write the mark that the stream ends here."""
        try:
            self._stream.close()
        finally:
            self._file.close()


class _WholeWrites:
    """A file whose `write` writes everything: an unbuffered one may stop half way, on a signal or a full disk.

    It keeps the error it met, which nanoarrow passes on as text only.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        return len(data)


class _TooLargeError(ValueError):
    """A batch whose strings do not fit in Arrow's 32-bit offsets."""


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


def record_batch(schema: Any, columns: tuple[Column, ...], cells: Sequence[Cells]) -> Any:
    """Build one Arrow record batch from a table's columns of Python objects."""
    children = [
        _array(schema.child(i), column, values) for i, (column, values) in enumerate(zip(columns, cells, strict=True))
    ]
    return na.c_array_from_buffers(schema, len(cells[0]), [None], children=children)


def _array(schema: Any, column: Column, values: Cells) -> Any:
    if column.type == "float64":
        return _floats(schema, values)
    if column.type == "bool":
        return na.c_array_from_buffers(schema, len(values), [None, _bitmap(np.array(values, np.bool_))])
    if column.type == "list<int64>":
        return _lists(schema, values)
    present = None
    if column.nullable:
        nulls = values.count(None)
        if nulls == len(values):  # most columns are all there or not there at all
            return _nulls(schema, column, nulls)
        if nulls:
            present, filler = _present(values), "" if column.type == "string" else 0
            values = [filler if value is None else value for value in values]
    if column.type == "string":
        return _strings(schema, values, present)
    data = np.fromiter(values, column.type, len(values))
    return na.c_array_from_buffers(schema, len(values), [_bitmap(present), data])


def _floats(schema: Any, values: Cells) -> Any:
    data = np.array(values, np.float64)  # None becomes NaN
    present = _present(values) if np.isnan(data).any() else None
    return na.c_array_from_buffers(schema, len(values), [_bitmap(present), data])


def _strings(schema: Any, values: Cells, present: Mask) -> Any:
    text = "".join(values)
    data = _encoded(text)
    if len(data) != len(text):  # not ASCII: bytes and characters differ
        values = [_encoded(value) for value in values]
    return na.c_array_from_buffers(schema, len(values), [_bitmap(present), _offsets(values), data])


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # file names may hold what UTF-8 cannot


def _lists(schema: Any, values: Cells) -> Any:
    offsets = _offsets(values)
    count = int(offsets[-1])
    items = np.fromiter(chain.from_iterable(values), np.int64, count)
    child = na.c_array_from_buffers(schema.child(0), count, [None, items])
    return na.c_array_from_buffers(schema, len(values), [None, offsets], children=[child])


def _nulls(schema: Any, column: Column, count: int) -> Any:
    """An array without any value."""
    nowhere = _bitmap(np.zeros(count, np.bool_))
    if column.type == "string":
        return na.c_array_from_buffers(schema, count, [nowhere, np.zeros(count + 1, np.int32), b""])
    return na.c_array_from_buffers(schema, count, [nowhere, np.zeros(count, column.type)])


def _present(values: Cells) -> npt.NDArray[np.bool_]:
    return np.fromiter((value is not None for value in values), np.bool_, len(values))


def _bitmap(flags: Mask) -> npt.NDArray[np.uint8] | None:
    return None if flags is None else np.packbits(flags, bitorder="little")


def _offsets(values: Cells) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    if offsets[-1] > OFFSET_LIMIT:
        raise _TooLargeError
    return offsets.astype(np.int32)
