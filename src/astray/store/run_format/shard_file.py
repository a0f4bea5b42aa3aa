"""One safetensors file of values: valid at every moment while it is being filled, and read back by offset.

A shard is created at its full size without taking space on the disk (a sparse file), with a header padded by spaces.
The last entry of the header, `__free`, stands for the bytes not used yet. Tensors are written in two steps: their bytes
into the free part, then, in one write, their entries over the `__free` entry, followed by a smaller one. A reader that
opens the file before, between or after these, or after the program was killed, sees a valid safetensors file.
Dropping `__free` and truncating the file where its data ends takes two steps that cannot be made atomic, so a full
shard stays as it is until the recording is over.

The header is for other tools. `TensorBytesReader` goes by offset and length from the tensor's row.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Blob
from astray.stats.dtypes import DTYPES
from astray.store.deferred import PAGE
from astray.store.run_format.disk_io import DiskFile, write_all
from astray.store.safe_paths import open_file
from astray.wording import counted

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

ALIGNMENT = 64  # a cache line, and enough for every vector instruction
LARGE = 64 << 10
"""Tensors from this size on begin on a page, so that they can be written directly. That wastes at most 3 % of their
bytes, on average."""

NAME_LENGTH = 256
FREE = "__free"
FREE_LENGTH = 128  # the longest entry of that name or of a pad; its three numbers change

KNOWN_DTYPES = {
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
"""Dtypes that every safetensors reader of recent years knows. One entry with another makes it reject the file."""


def shard_name(number: int) -> str:
    """The name of a values file."""
    return f"values-{number:05}.safetensors"


class ShardSlot(NamedTuple):
    """The space of a tensor in the file, and its entry in the header, after that of the pad before it."""

    offset: int
    nbytes: int
    pad: bytes
    entry: bytes


class ShardFile:
    """`allocate` assigns slots; once their bytes are written, `publish` enters them into the header, in their order."""

    def __init__(self, path: Path, number: int, header_bytes: int, size: int) -> None:
        self.number = number
        self._path = path
        self._data_start = header_bytes
        self._size = size
        self._used = 0  # bytes of data that the header lists
        self._allocated = 0  # bytes of data that are assigned
        self._names = {FREE}
        opening = (header_bytes - 8).to_bytes(8, "little") + b"{"
        self._header = len(opening)  # where the next entry goes
        self._room = header_bytes - self._header - FREE_LENGTH
        self._entries = 0
        self.file = self._create((opening + self._free()).ljust(header_bytes))
        self._open = True

    def _create(self, header: bytes) -> DiskFile:
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
        return DiskFile(file, self._path)

    def allocate(
        self, name: str, dtype: str, shape: Sequence[int], nbytes: int, certain: bool = True
    ) -> ShardSlot | None:
        """A slot for a tensor; None when it needs the next shard. certain: False if its bytes may never arrive."""
        used = self._allocated
        padding = -used % (PAGE if nbytes >= LARGE else ALIGNMENT) if nbytes else 0
        start = used + padding
        if start + nbytes > self._size - self._data_start:
            return None
        kind, sizes = safetensors_type(dtype, shape, nbytes)
        entry = _entry(self._unique(name), kind, sizes, start, nbytes) + b","
        pad = self._pad(used, padding)
        room = self._room - len(pad) - (len(entry) if certain else max(len(entry), FREE_LENGTH))
        if room < 0:
            return None
        self._room, self._allocated = room, start + nbytes
        return ShardSlot(self._data_start + start, nbytes, pad, entry)

    def publish(self, slots: Collection[ShardSlot], without: Collection[ShardSlot] = ()) -> None:
        """Enter the next slots into the header, in their order. Those `without` bytes are entered as a pad."""
        text = b""
        for slot in slots:
            self._used = slot.offset + slot.nbytes - self._data_start
            lost = slot in without
            text += slot.pad + (self._pad(slot.offset - self._data_start, slot.nbytes) if lost else slot.entry)
        _write_text(self.file.buffered, text + self._free(), self._header)
        self._header += len(text)
        self._entries += len(slots)

    def _pad(self, start: int, size: int) -> bytes:
        return _entry(f"__pad.{start}", "U8", [size], start, size) + b"," if size else b""

    def close(self) -> None:
        """Close the file: nothing more is written before `trim`."""
        if self._open:
            self._open = False
            self._names.clear()
            self.file.close()

    def trim(self) -> None:
        """Cut the file where its data ends."""
        self.close()
        if not self._entries:  # the disk was full before the first tensor was written
            self._path.unlink()
            return
        file = os.open(self._path, os.O_RDWR)
        try:  # the comma after the last entry becomes the closing brace
            _write_text(file, b"}".ljust(1 + len(self._free())), self._header - 1)
            os.ftruncate(file, self._data_start + self._used)
        finally:
            os.close(file)

    def _unique(self, name: str) -> str:
        """The name, made one that is not used in this shard yet, in characters that JSON can hold."""
        plain = name = name[:NAME_LENGTH].encode(errors="backslashreplace").decode()
        count = 1
        while name in self._names:
            count += 1
            name = f"{plain}#{count}"
        self._names.add(name)
        return name

    def _free(self) -> bytes:
        free = self._size - self._data_start - self._used
        return _entry(FREE, "U8", [free], self._used, free) + b"}"


def safetensors_type(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[str, list[int]]:
    """The dtype and shape to give in the header: plain bytes when safetensors cannot say what they are."""
    known, sizes = DTYPES.get(dtype), list(shape)
    if known is not None and known.kind == "complex":  # as pairs of real and imaginary part
        known, sizes = DTYPES[known.part], [*sizes, 2]
    if known is None or prod(sizes) * known.itemsize != nbytes:
        return "U8", [nbytes]
    if known.safetensors not in KNOWN_DTYPES:
        return "U8", [*sizes, known.itemsize] if known.itemsize > 1 else sizes
    return known.safetensors, sizes


def _entry(name: str, dtype: str, shape: Sequence[int], start: int, size: int) -> bytes:
    fields = f'"dtype":"{dtype}","shape":{[int(n) for n in shape]},"data_offsets":[{start},{start + size}]'
    return f"{_quoted(name)}:{{{fields}}}".encode()


def _quoted(name: str) -> str:
    plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name  # nearly all are
    return f'"{name}"' if plain else json.dumps(name)


def _write_text(file: int, text: bytes, offset: int) -> None:
    write_all(file, [memoryview(text)], offset)


# -- read back ---------------------------------------------------------------------------------------------------------

_LENGTH_BYTES = 8  # at the start of a safetensors file: the length of its header
_MAX_OFFSET = np.iinfo(np.int64).max


class TensorBytesReader:
    """Reads the bytes of blobs, mapped from the files of one rank's folder."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self._folder = folder
        self._home = home or folder  # no file may lead out of it
        self._maps: dict[int, Bytes] = {}

    def read(self, blob: Blob) -> Bytes:
        """The bytes of a tensor, without copying them. Raises RunError when the file does not hold them."""
        if blob.offset < 0 or blob.nbytes < 0:
            raise RunError(f"A row says that its values are {blob.nbytes:,} bytes at {blob.offset:,}: it is damaged.")
        data = self._map(blob.file)
        if blob.offset + blob.nbytes > len(data):
            raise RunError(
                f"{self._path(blob.file)} ends after {len(data):,} bytes, before this tensor's values at "
                f"{blob.offset:,}–{blob.offset + blob.nbytes:,}: the file was cut. Copy the run again."
            )
        return data[blob.offset : blob.offset + blob.nbytes]

    def problems(self, files: Ints, offsets: Ints, sizes: Ints) -> list[str]:
        """What is wrong with the files that rows refer to, without reading their values: a sentence for each.

        Damage to single values is noticed when they are read.
        """
        rows = np.flatnonzero((files >= 0) & (sizes > 0) & (offsets >= 0) & (offsets < _MAX_OFFSET - sizes))
        problems = []
        numbers, which = np.unique(files[rows], return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, which, offsets[rows] + sizes[rows])
        for number, end, count in zip(numbers.tolist(), ends.tolist(), np.bincount(which).tolist(), strict=True):
            why = self._defect(number, end)
            if why is not None:
                problems.append(f"{self._path(number)} {why}. It has the values of {counted(count, 'tensor')}.")
        return problems

    def _defect(self, number: int, end: int) -> str | None:
        """What is wrong with a file whose values reach up to `end`."""
        try:
            with open_file(self._path(number), self._home) as file:
                size = os.fstat(file.fileno()).st_size
                header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        except FileNotFoundError:
            return "is missing"
        except RunError as error:
            return f"is not read ({error})"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if size < end:
            return f"is cut: it has {size:,} bytes, and values lie in it up to {end:,}"
        if not 0 < header <= size - _LENGTH_BYTES:
            return "does not begin as a safetensors file does: it was overwritten"
        return None

    def _path(self, number: int) -> Path:
        return self._folder / shard_name(number)

    def _map(self, number: int) -> Bytes:
        if number not in self._maps:
            try:
                with open_file(self._path(number), self._home) as file:
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
