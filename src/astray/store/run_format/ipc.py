"""Finds the record batches of an Arrow IPC stream in a file, and gathers their buffers.

A stream is a sequence of messages: four bytes 0xFF, the length of the description, the description (a FlatBuffer), and
the body with the buffers of every column one after the other. The few numbers needed are read here, not by a library:
every buffer is read straight to its place in a column of the whole file, a batch costs microseconds (a recording has
thousands of small ones), and the byte where a truncated file ends is known.

The layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CONTINUES = 0xFFFFFFFF
SCHEMA, RECORD_BATCH = 1, 3  # of the union MessageHeader
LARGEST_DESCRIPTION = 64 << 20  # bytes; beyond this it is not a description

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


class BatchLocation(NamedTuple):
    """One record batch: its number of rows, where its body begins, and its buffers in that as (offset, size)."""

    rows: int
    body: int
    extents: Counts


class JoinedBuffers(NamedTuple):
    """The buffers of several batches, each joined over all of them. `sizes` has a row for each batch."""

    rows: Counts
    sizes: Counts
    buffers: list[Bytes]


class CompressedError(ValueError):
    """A batch whose buffers are compressed, which astray never writes."""


class IpcStream:
    """The messages of an open file. `end` is where the last whole one ends."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.size = os.fstat(file).st_size
        self.end = 0
        self.schema: bytes | None = None  # the message that describes the columns
        self.problem: str | None = None  # why whole batches are not read

    def batches(self) -> Iterator[BatchLocation]:
        """Yield the whole batches up to the end mark, or up to what is truncated or not a message."""
        try:
            while (message := self._message()) is not None:
                kind, header, body, end = message
                if kind == SCHEMA:
                    self.schema = os.pread(self._file, end - self.end, self.end)
                elif kind == RECORD_BATCH:
                    yield _batch(header, body, end)
                self.end = end
        except CompressedError as error:
            self.problem = str(error)
        except (struct.error, ValueError):  # a description that is cut off, or not one
            return

    def _message(self) -> tuple[int, _FlatbufferTable, int, int] | None:
        """The message at `end`: its kind, its description, where its body begins and ends. None at the end mark."""
        mark, length = struct.unpack("<II", os.pread(self._file, 8, self.end))
        if mark != CONTINUES or length > LARGEST_DESCRIPTION:
            raise ValueError("not a message")
        if length == 0:
            self.end += 8
            return None
        description = _FlatbufferTable.root(os.pread(self._file, length, self.end + 8), 0)
        body = self.end + 8 + length
        end = body + description.int64(3)
        if not body <= end <= self.size:
            raise ValueError("the body is cut off")
        return description.uint8(1), description.table(2), body, end


def _batch(header: _FlatbufferTable, body: int, end: int) -> BatchLocation:
    rows, extents = header.int64(0), header.pairs(2)
    if not ((extents >= 0) & (extents <= end - body)).all():  # so that their sum fits into 64 bits, too
        raise ValueError("the buffers do not lie in the body")
    starts, ends = extents[:, 0], extents.sum(axis=1)
    disjoint = (starts[1:] >= ends[:-1]).all() and (ends <= end - body).all()
    if not disjoint or not 0 <= rows <= end - body:
        raise ValueError("the buffers do not lie in the body")
    if header.has(3):
        raise CompressedError("its batches are compressed")
    return BatchLocation(rows, body, extents)


def read_joined(file: int, batches: Sequence[BatchLocation], count: int) -> JoinedBuffers:
    """Read `count` buffers of each batch, joining those of the same number."""
    extents = np.array([batch.extents for batch in batches], np.int64).reshape(len(batches), count, 2)
    sizes = extents[:, :, 1]
    buffers = [np.empty(total, np.uint8) for total in sizes.sum(axis=0).tolist()]
    targets = [buffer.data for buffer in buffers]
    filled = [0] * count
    for batch, rows in zip(batches, extents.tolist(), strict=True):
        pieces: list[memoryview] = []
        at = 0
        for number, (offset, size) in enumerate(rows):
            if size:
                if offset > at:  # bytes that align this buffer
                    pieces.append(memoryview(bytearray(offset - at)))
                pieces.append(targets[number][filled[number] : filled[number] + size])
                filled[number] += size
                at = offset + size
        _read_into(file, pieces, batch.body)
    return JoinedBuffers(np.array([batch.rows for batch in batches], np.int64), sizes, buffers)


def _read_into(file: int, pieces: list[memoryview], offset: int) -> None:
    """Fill the pieces one after the other, however little the system reads at a time."""
    while pieces:
        got = os.preadv(file, pieces, offset)
        if not got:
            raise ValueError("the file ends early")
        offset += got
        while pieces and got >= len(pieces[0]):
            got -= len(pieces.pop(0))
        if got:
            pieces[0] = pieces[0][got:]


class _FlatbufferTable:
    """A FlatBuffers table: fields by number, each found through the table of offsets in front of it."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    @classmethod
    def root(cls, data: bytes, at: int) -> _FlatbufferTable:
        return cls(data, at + struct.unpack_from("<I", data, at)[0])

    def _field(self, number: int) -> int | None:
        size = struct.unpack_from("<H", self._data, self._fields)[0]
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", self._data, self._fields + slot)[0] if slot < size else 0
        return self._at + offset if offset else None

    def has(self, number: int) -> bool:
        """Whether a field is set."""
        return self._field(number) is not None

    def uint8(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from("<B", self._data, at)[0])

    def int64(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from("<q", self._data, at)[0])

    def table(self, number: int) -> _FlatbufferTable:
        at = self._field(number)
        if at is None:
            raise ValueError("a message without a header")
        return _FlatbufferTable.root(self._data, at)

    def pairs(self, number: int) -> Counts:
        """A vector of structures of two 64-bit numbers."""
        at = self._field(number)
        if at is None:
            return np.zeros((0, 2), np.int64)
        at += struct.unpack_from("<I", self._data, at)[0]
        count = struct.unpack_from("<I", self._data, at)[0]
        return np.frombuffer(self._data, np.int64, 2 * count, at + 4).reshape(count, 2)
