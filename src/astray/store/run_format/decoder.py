"""Arrow to tables: reads a table's file into columns, as far as it is whole.

Strings and shapes become codes: the bytes of a column are factorised as they are in the file, and only the few
distinct values become Python objects. A column that an older format version did not have is null in every row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nanoarrow as na
import numpy as np
import numpy.typing as npt
from nanoarrow.ipc import InputStream

from astray.errors import RunError
from astray.stats.kernels import factorize
from astray.store.columns import Column, DictionaryColumn, Table
from astray.store.run_format import schema
from astray.store.run_format.encoder import arrow_schema, in_batches
from astray.store.run_format.ipc import BatchLocation, Bytes, Counts, IpcStream, JoinedBuffers, read_joined
from astray.store.run_format.rows import AnyCells
from astray.store.safe_paths import open_file

Mask = npt.NDArray[np.bool_] | None
AbsentColumns = frozenset[schema.Column]

BUFFERS = {"string": 3, "list<int64>": 4}
"""How many Arrow buffers a column has: a bitmap of validity and the data (2), offsets, and a list's own bitmap."""


class TableFile(NamedTuple):
    """What could be read of a table's file, and what not."""

    table: Table
    size: int
    unread: int  # bytes after the last whole batch
    problem: str | None  # why not all whole batches were read, when the file is damaged or not ours


def read_table(path: Path, columns: tuple[schema.Column, ...], home: Path | None = None) -> TableFile:
    """Read every whole batch of a table's file, which lies in `home`. Raises OSError when it cannot be opened.

    Raises RunError when it is not a plain file in `home`, or larger than the machine's memory.
    """
    with open_file(path, home) as source:
        file = source.fileno()
        stream = IpcStream(file)
        if stream.size > _memory():
            raise RunError(f"{path} has {stream.size:,} bytes, more than this machine has memory.")
        batches = [batch for batch in stream.batches() if batch.rows]
        absent, problem = _check(stream.schema, columns)
        if problem is not None:
            batches = []
        problem = problem or stream.problem
        try:
            table = decode(file, batches, columns, absent)
        except (ValueError, IndexError):  # offsets that lead nowhere, bytes that are not text
            sound = _count_sound(file, batches, columns, absent)
            table = decode(file, batches[:sound], columns, absent)
            problem = f"batch {sound} of {len(batches)} is damaged; the {len(table):,} rows before it were read"
        return TableFile(table, stream.size, stream.size - stream.end, problem)


def _memory() -> int:
    """The bytes of memory of this machine; a number above any where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _count_sound(
    file: int, batches: list[BatchLocation], columns: tuple[schema.Column, ...], absent: AbsentColumns
) -> int:
    """How many batches can be decoded before the first that cannot."""
    for number, batch in enumerate(batches):
        try:
            decode(file, [batch], columns, absent)
        except (ValueError, IndexError):  # noqa: PERF203 - a damaged file may take its time
            return number
    return len(batches)


def empty_table(columns: tuple[schema.Column, ...]) -> Table:
    """A table without rows."""
    return decode(-1, [], columns)


def decode(
    file: int,
    batches: list[BatchLocation],
    columns: tuple[schema.Column, ...],
    absent: AbsentColumns = frozenset(),
) -> Table:
    """Read batches and join them, column by column. Columns that are `absent` from the file become nulls."""
    joined = read_joined(file, batches, sum(_widths(columns, absent)))
    return _joined(_without_padding(joined, columns, absent), columns, absent)


def in_memory(parts: Sequence[Sequence[AnyCells]], columns: tuple[schema.Column, ...]) -> Table:
    """The table of rows that are not in a file: several parts, each as columns."""
    batches = [batch for part in parts if len(part[0]) for batch in in_batches(columns, part)]
    rows = np.array([count for count, _ in batches], np.int64)
    each = [[np.frombuffer(buffer, np.uint8) for _, column in encoded for buffer in column] for _, encoded in batches]
    if not each:
        return empty_table(columns)
    sizes = np.array([[len(buffer) for buffer in buffers] for buffers in each], np.int64)
    return _joined(JoinedBuffers(rows, sizes, [np.concatenate(same) for same in zip(*each, strict=True)]), columns)


def _widths(columns: tuple[schema.Column, ...], absent: AbsentColumns) -> list[int]:
    return [0 if column in absent else BUFFERS.get(column.type, 2) for column in columns]


def _without_padding(joined: JoinedBuffers, columns: tuple[schema.Column, ...], absent: AbsentColumns) -> JoinedBuffers:
    """Buffers that hold nothing but their rows, so that those of one batch follow those of another.

    astray writes only such. Arrow allows bytes behind the last row, and strings that begin and end within their data,
    as in a slice of a table. Raises ValueError where a buffer is too short for its rows.
    """
    sizes, buffers = joined.sizes.copy(), list(joined.buffers)

    def trim(number: int, begin: Counts, end: Counts) -> None:
        """Keep of one buffer the bytes of each batch from `begin` to `end`."""
        if ((begin < 0) | (end < begin) | (end > sizes[:, number])).any():
            raise ValueError("a buffer is too short for its rows")
        if begin.any() or (end != sizes[:, number]).any():
            at = np.cumsum(sizes[:, number]) - sizes[:, number]
            pieces = zip((at + begin).tolist(), (at + end).tolist(), strict=True)
            buffers[number] = np.concatenate([buffers[number][slice(*piece)] for piece in pieces])
            sizes[:, number] = end - begin

    nothing, bitmap = np.zeros_like(joined.rows), (joined.rows + 7) // 8
    first = 0
    for column, width in zip(columns, _widths(columns, absent), strict=True):
        if width and len(joined.rows):
            trim(first, nothing, np.where(sizes[:, first] > 0, bitmap, 0))
            if column.type in BUFFERS:
                trim(first + 1, nothing, 4 * (joined.rows + 1))
                offsets, last = buffers[first + 1].view(np.int32), np.cumsum(joined.rows + 1) - 1
                begin, end = (offsets[at].astype(np.int64) for at in (last - joined.rows, last))
                unit = 8 if column.type == "list<int64>" else 1
                trim(first + width - 1, begin * unit, end * unit)
            else:
                size = bitmap if column.type == "bool" else joined.rows * np.dtype(column.type).itemsize
                trim(first + 1, nothing, size)
        first += width
    return JoinedBuffers(joined.rows, sizes, buffers)


def _joined(joined: JoinedBuffers, columns: tuple[schema.Column, ...], absent: AbsentColumns = frozenset()) -> Table:
    """The table of the buffers of all columns that are not `absent`."""
    decoded: dict[str, Column] = {}
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    first = 0
    for column, width in zip(columns, _widths(columns, absent), strict=True):
        mask = np.zeros(joined.rows.sum(), np.bool_) if column in absent else _validity(joined, first)
        if mask is None or mask.any():
            decoded[column.name] = _decode_column(column, joined, first + 1, mask)
        else:
            decoded[column.name] = _nulls(column, len(mask))
        if mask is not None:
            masks[column.name] = mask
        first += width
    return Table(decoded, masks)


def _validity(joined: JoinedBuffers, number: int) -> Mask:
    """Which rows have a value, by a column's bitmap; None when all have one, or there are no rows."""
    return _bits(joined, number) if len(joined.buffers[number]) else None


def _nulls(column: schema.Column, rows: int) -> Column:
    """A column without any value."""
    if column.type in BUFFERS:
        return DictionaryColumn(np.full(rows, -1, np.int32), [])
    return np.full(rows, {"float64": np.nan, "uint64": 0}.get(column.type, -1), column.type)


def _check(message: bytes | None, columns: tuple[schema.Column, ...]) -> tuple[AbsentColumns, str | None]:
    """Compare the schema in a file with `columns`: which optional columns it lacks, and what is wrong if anything.

    A file that was cut before its schema has no rows either.
    """
    if message is None:
        return frozenset(), None

    def describe(schema: Any) -> list[tuple[str, str]]:
        return [(child.name, child.format) for child in schema.children]

    try:
        with InputStream.from_readable(message) as source, na.c_array_stream(source) as stream:
            found = describe(stream.get_schema())
    except (RuntimeError, ValueError) as error:
        return frozenset(), f"its schema is damaged ({error})"
    named = dict(zip(columns, describe(arrow_schema(columns)), strict=True))
    absent = frozenset(column for column in columns if column.nullable and named[column] not in found)
    if found == [named[column] for column in columns if column not in absent]:
        return absent, None
    odd = sorted({name for name, _ in set(found) ^ set(named.values())}) or [name for name, _ in found]
    return frozenset(), f"its columns are not those of this format version ({', '.join(odd)})"


def _decode_column(column: schema.Column, joined: JoinedBuffers, number: int, mask: Mask) -> Column:
    """A column whose buffers, after the one that marks nulls, begin at `number`."""
    if column.type == "bool":
        return _bits(joined, number)
    if column.type == "string":
        return _coded(joined.buffers[number + 1], _offsets(joined, number), mask, _text)
    if column.type == "list<int64>":
        return _coded(joined.buffers[number + 2], _offsets(joined, number) * 8, mask, _integers)
    data: npt.NDArray[Any] = joined.buffers[number].view(column.type)
    if mask is not None and column.type != "uint64":
        data[~mask] = np.nan if column.type == "float64" else -1
    return data


def _text(raw: Bytes) -> str:
    return raw.tobytes().decode()


def _integers(raw: Bytes) -> tuple[int, ...]:
    return tuple(raw.view(np.int64).tolist())


def _bits(joined: JoinedBuffers, number: int) -> npt.NDArray[np.bool_]:
    """The bits of a buffer as booleans. A batch without nulls has none in its bitmap of nulls: all true."""
    bits = np.ones(joined.rows.sum(), np.bool_)
    row = byte = 0
    for rows, size in zip(joined.rows.tolist(), joined.sizes[:, number].tolist(), strict=True):
        if size:
            part = joined.buffers[number][byte : byte + size]
            bits[row : row + rows] = np.unpackbits(part, count=rows, bitorder="little")
        row, byte = row + rows, byte + size
    return bits


def _offsets(joined: JoinedBuffers, number: int) -> npt.NDArray[np.int64]:
    """Where the rows of a column begin once its batches are joined; in the file every batch counts from zero."""
    each = joined.buffers[number].view(np.int32)
    seams = np.cumsum(joined.rows + 1)[:-1] - 1  # from the end of one batch to the start of the next
    lengths = np.delete(np.diff(each), seams)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _coded(
    data: Bytes, offsets: npt.NDArray[np.int64], mask: Mask, decode: Callable[[Bytes], Any]
) -> DictionaryColumn[Any]:
    if mask is not None:
        lengths = np.diff(offsets)
        if lengths[~mask].any():  # nulls with bytes
            data = data[np.repeat(mask, lengths)]
            lengths = np.where(mask, lengths, 0)
            offsets = np.append(0, np.cumsum(lengths))
        offsets = np.append(offsets[:-1][mask], offsets[-1])  # nulls take no bytes: the others follow without a gap
    codes, first = factorize(data, offsets)
    values = [decode(data[offsets[row] : offsets[row + 1]]) for row in first.tolist()]
    if mask is not None:
        spread = np.full(len(mask), -1, np.int32)
        spread[mask] = codes
        codes = spread
    return DictionaryColumn(codes, values)
