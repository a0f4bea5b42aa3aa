"""The bytes of tensors: written as they come, into safetensors files that are whole at every moment.

A shard is made at its full size without taking space on the disk (a sparse file), with a header padded by spaces.
The last entry of the header, `__free`, stands for the bytes not used yet. A group of tensors is written in two steps:
their bytes into the free part, then, in one write, their entries over the `__free` entry, followed by a smaller one.
Whoever opens the file before, between or after sees a valid safetensors file; so does whoever opens it after the
program was killed. Dropping `__free` and cutting the file where its data ends takes two steps that cannot be made one,
so a full shard stays as it is until the recording is over.

The header is for other tools. The reader here goes by offset and length from the tensor's row.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.record import Blob
from astray.stats.dtypes import DTYPES

Bytes = npt.NDArray[np.uint8]

SHARD_BYTES = 1 << 30
HEADER_BYTES = 128 << 10, 4 << 20
"""The room for a shard's header: of the first, and at most. It doubles, so that short runs stay small."""

ALIGNMENT = 64  # a cache line, and enough for every vector instruction
WRITEV_BUFFERS = 1024  # IOV_MAX on Linux
NAME_LENGTH = 256
FREE = "__free"
FREE_LENGTH = 128  # the longest entry of that name, whose three numbers change

KNOWN = {
    "BOOL",
    "U8",
    "I8",
    "U16",
    "I16",
    "U32",
    "I32",
    "U64",
    "I64",
    "F16",
    "BF16",
    "F32",
    "F64",
    "F8_E4M3",
    "F8_E5M2",
}
"""What every safetensors reader of the last years understands. One entry it does not know makes it refuse the file."""


class Values:
    """The bytes of one tensor on their way to the disk. Rows that share a tensor share this object, and so its blob."""

    __slots__ = ("blob", "data", "dtype", "name", "part", "sampled", "shape", "size")

    def __init__(
        self,
        data: memoryview,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> None:
        self.data: memoryview | None = data  # dropped once written
        self.size = data.nbytes
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.sampled = sampled
        self.part = part
        self.blob: Blob | None = None  # set once written


class ValuesWriter:
    """Writes tensors into the shards of one rank's folder."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._header_bytes = HEADER_BYTES[0]
        self._shards: list[_Shard] = []
        self.count = 0
        self.nbytes = 0

    def write(self, group: Sequence[Values]) -> None:
        """Write a group of tensors, set their blobs and drop their bytes."""
        waiting = list(group)
        while waiting:
            if not self._shards or self._shards[-1].full:
                self._add_shard(waiting[0].size)
            taken = self._shards[-1].write(waiting)
            self.count += taken
            self.nbytes += sum(values.size for values in waiting[:taken])
            del waiting[:taken]

    def close(self) -> None:
        """Cut every shard where its data ends."""
        for shard in self._shards:
            shard.trim()

    def _add_shard(self, size: int) -> None:
        """Begin a file that has room for a tensor of this size at least."""
        number = len(self._shards)
        room = self._header_bytes + max(self._shard_bytes, size)
        self._shards.append(_Shard(self._folder / shard_name(number), number, self._header_bytes, room))
        self._header_bytes = min(2 * self._header_bytes, HEADER_BYTES[1])


class _Shard:
    """One safetensors file being filled."""

    def __init__(self, path: Path, number: int, header_bytes: int, size: int) -> None:
        self.full = False
        self._path = path
        self._number = number
        self._start = header_bytes  # of the data
        self._size = size
        self._used = 0  # bytes of data
        self._names = {FREE}
        opening = (header_bytes - 8).to_bytes(8, "little") + b"{"
        self._header = len(opening)  # where the next entry goes
        self._entries = 0
        self._file = self._create((opening + self._free()).ljust(header_bytes))

    def _create(self, header: bytes) -> int:
        """Make the file under another name first, so that it is valid from the moment it has its own."""
        draft = self._path.with_name(f".{self._path.name}")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.ftruncate(file, self._size)
            _write_text(file, header, 0)
            draft.rename(self._path)
        except OSError:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        return file

    def write(self, waiting: Sequence[Values]) -> int:
        """Write as many of the tensors as there is room for; tell how many."""
        buffers: list[memoryview] = []
        entries: list[bytes] = []
        blobs: list[Blob] = []
        used, room = self._used, self._start - self._header - FREE_LENGTH
        for values in waiting:
            padding = -used % ALIGNMENT if values.size else 0
            entry = self._describe(values, used, padding)
            room -= len(entry)
            if used + padding + values.size > self._size - self._start or room < 0:
                break
            if padding:
                buffers.append(memoryview(bytes(padding)))
            assert values.data is not None
            buffers.append(values.data)
            entries.append(entry)
            blobs.append(Blob(self._number, self._start + used + padding, values.size, values.sampled, values.part))
            used += padding + values.size
        if entries:
            write_all(self._file, buffers, self._start + self._used)
            self._used = used
            self._publish(entries)
        for values, blob in zip(waiting, blobs, strict=False):
            values.blob, values.data = blob, None
        if len(blobs) < len(waiting):
            self.full = True
            self._names.clear()
            os.close(self._file)
        return len(blobs)

    def trim(self) -> None:
        """Let the file end where its data does."""
        file = os.open(self._path, os.O_RDWR) if self.full else self._file
        try:
            if self._entries:  # the comma after the last one becomes the closing brace
                _write_text(file, b"}".ljust(1 + len(self._free())), self._header - 1)
                os.ftruncate(file, self._start + self._used)
            else:  # the disk was full before the first tensor
                self._path.unlink()
        finally:
            os.close(file)

    def _publish(self, entries: list[bytes]) -> None:
        text = b"".join(entries)
        _write_text(self._file, text + self._free(), self._header)
        self._header += len(text)
        self._entries += len(entries)

    def _describe(self, values: Values, used: int, padding: int) -> bytes:
        """The header's text for a tensor, and for the bytes that align it."""
        text = b""
        if padding:
            text = _entry(f"__pad.{used}", "U8", [padding], used, padding) + b","
        kind, shape = _described(values)
        return text + _entry(self._unique(values.name), kind, shape, used + padding, values.size) + b","

    def _unique(self, name: str) -> str:
        """A name not used in this shard yet, in characters that JSON can hold."""
        plain = name = name[:NAME_LENGTH].encode(errors="backslashreplace").decode()
        count = 1
        while name in self._names:
            count += 1
            name = f"{plain}#{count}"
        self._names.add(name)
        return name

    def _free(self) -> bytes:
        free = self._size - self._start - self._used
        return _entry(FREE, "U8", [free], self._used, free) + b"}"


def _entry(name: str, dtype: str, shape: Sequence[int], start: int, size: int) -> bytes:
    place = f'"dtype":"{dtype}","shape":{[int(n) for n in shape]},"data_offsets":[{start},{start + size}]'
    return f"{json.dumps(name)}:{{{place}}}".encode()


def _described(values: Values) -> tuple[str, list[int]]:
    """The dtype and shape to give in the header: plain bytes when safetensors cannot say what they are."""
    dtype, shape = DTYPES.get(values.dtype), list(values.shape)
    if dtype is not None and dtype.kind == "complex":  # as pairs of its parts
        dtype, shape = DTYPES[dtype.part], [*shape, 2]
    if dtype is None or prod(shape) * dtype.itemsize != values.size:
        return "U8", [values.size]
    if dtype.safetensors not in KNOWN:
        return "U8", [*shape, dtype.itemsize] if dtype.itemsize > 1 else shape
    return dtype.safetensors, shape


def shard_name(number: int) -> str:
    """The name of a values file."""
    return f"values-{number:05}.safetensors"


def write_all(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other, however little the system takes at a time."""
    waiting = [buffer for buffer in buffers if buffer.nbytes]
    while waiting:
        written = os.pwritev(file, waiting[:WRITEV_BUFFERS], offset)
        offset += written
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if written:
            waiting[0] = waiting[0][written:]


def _write_text(file: int, text: bytes, offset: int) -> None:
    write_all(file, [memoryview(text)], offset)


class ValuesReader:
    """Gives the bytes of blobs, mapped from the files of one rank's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, Bytes] = {}

    def read(self, blob: Blob) -> Bytes:
        """The bytes of a tensor, without copying them. Raises RunError when the file does not hold them."""
        data = self._map(blob.file)
        if blob.offset + blob.nbytes > len(data):
            raise RunError(
                f"{self._path(blob.file)} ends after {len(data):,} bytes, before this tensor's values at "
                f"{blob.offset:,}–{blob.offset + blob.nbytes:,}: the file was cut. Copy the run again."
            )
        return data[blob.offset : blob.offset + blob.nbytes]

    def _path(self, number: int) -> Path:
        return self._folder / shard_name(number)

    def _map(self, number: int) -> Bytes:
        if number not in self._maps:
            try:
                with self._path(number).open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                raise RunError(
                    f"{self._path(number)} is missing, so these values cannot be read. Copy it from where the run was "
                    "recorded; statistics and fingerprints can be read without it."
                ) from None
            except (OSError, ValueError) as error:  # an empty file cannot be mapped
                raise RunError(f"{self._path(number)} cannot be read: {error}.") from None
            self._maps[number] = np.frombuffer(mapped, np.uint8)
        return self._maps[number]
