"""Files that `torch.save` wrote: a zip of a pickle and the storages, or before 2020 a sequence of pickles and storages.

Neither is unpickled: the pickle is read as data, which locates each tensor in the file. A zip holds its storages
uncompressed, so that a tensor is read in place.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from astray.checkpoints.pickles import read_pickle
from astray.checkpoints.stored_tensor import CheckpointContents, Files, Stored, StoredBox, TensorSpec, Unread
from astray.checkpoints.torch_objects import Storage, StorageView, find_tensors, is_size
from astray.errors import CheckpointError

MAGIC = 0x1950A86A20F9469CFC6C
"""The content of the first pickle in a legacy file."""

MOST_PICKLE_BYTES = 1 << 30
"""The pickle of a million tensors takes a third of this."""

_LIKELY_PICKLE_BYTES = 1 << 22

MOST_EXPANDED = 1 << 30
"""The most bytes of an expanded tensor, which repeats the bytes of its storage: a small file could fill the memory."""

_BROKEN = (
    zipfile.BadZipFile, NotImplementedError, OSError, ValueError, KeyError, EOFError, struct.error, OverflowError,
)  # fmt: skip
"""What `zipfile` raises for damaged and malicious files."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, length of the name, length of the extra field


class ByteRange(NamedTuple):
    """A range of bytes in a file."""

    start: int
    nbytes: int


Unwrap = Callable[[Any], Any]
"""Takes the content of a pickle, as `pickles` reads it, and returns the part in which to search for tensors."""


def _unchanged(content: Any) -> Any:
    return content


def open_zip(path: Path, files: Files, unwrap: Unwrap = _unchanged) -> CheckpointContents:
    """A file that `torch.save` wrote since 2020."""
    return CheckpointContents("torch", (path,), *_tensors(path, files, ByteRange(0, files.size(path)), unwrap))


def open_any(path: Path, files: Files, unwrap: Unwrap = _unchanged) -> CheckpointContents:
    """A file of `torch.save`, of any version."""
    is_zip = files.read(path, 0, min(files.size(path), 4)) == b"PK\3\4"
    return open_zip(path, files, unwrap) if is_zip else open_legacy(path, files, unwrap)


def open_embedded(path: Path, files: Files, where: ByteRange) -> CheckpointContents:
    """A file of `torch.save` embedded in another."""
    return CheckpointContents("torch", (path,), *_tensors(path, files, where))


def _tensors(
    path: Path, files: Files, where: ByteRange, unwrap: Unwrap = _unchanged
) -> tuple[dict[str, Stored], dict[str, object]]:
    records = _records(path, files, where)
    root = next((name[: -len("data.pkl")] for name in records if name.endswith("data.pkl")), None)
    if root is None:
        raise CheckpointError(f"{path} is a zip file, but none that torch.save wrote: it has no data.pkl.")
    order = records.get(f"{root}byteorder")
    if order is not None and files.read(path, *order._replace(nbytes=min(order.nbytes, 16))) != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine, whose files astray does not read.")
    pickled = records[f"{root}data.pkl"]
    if pickled.nbytes > MOST_PICKLE_BYTES:
        raise CheckpointError(f"{path} has a data.pkl of {pickled.nbytes:,} bytes, so it is not read.")
    content, _ = read_pickle(files.read(path, *pickled), f"data.pkl in {path}")
    found = find_tensors(unwrap(content), str(path))
    return _locate(path, found.tensors, found.others, lambda storage: records.get(f"{root}data/{storage.key}"))


def _records(path: Path, files: Files, where: ByteRange) -> Mapping[str, ByteRange]:
    """The byte ranges of the records of a zip."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_FilePart(path, files, where))) as archive:
            entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise CheckpointError(
                f"{path} is a TorchScript program, not a checkpoint. Save its weights: torch.save(torch.jit.load(…)"
                ".state_dict(), 'weights.pt')."
            )
        return {entry.filename: _record(path, files, where, entry) for entry in entries}
    except _BROKEN as error:
        raise CheckpointError(
            f"{path} cannot be read as a zip file ({error}): it was cut or damaged. Copy it again from where it was "
            "made."
        ) from None


def _record(path: Path, files: Files, where: ByteRange, entry: zipfile.ZipInfo) -> ByteRange:
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise CheckpointError(
            f"{path} is compressed, so its tensors cannot be read one by one. Unpack it, or save it anew with "
            "torch.save."
        )
    if not 0 <= entry.header_offset <= where.nbytes - _LOCAL_HEADER.size:
        raise ValueError(f"{entry.filename!r} lies outside of it")
    header = files.read(path, where.start + entry.header_offset, _LOCAL_HEADER.size)
    magic, name, extra = _LOCAL_HEADER.unpack(header)
    start = entry.header_offset + _LOCAL_HEADER.size + name + extra
    if magic != b"PK\3\4" or start + entry.file_size > where.nbytes:
        raise ValueError(f"{entry.filename!r} is not where it should be")
    return ByteRange(where.start + start, entry.file_size)


class _FilePart(io.RawIOBase):
    """A part of a file, as a file object."""

    def __init__(self, path: Path, files: Files, where: ByteRange) -> None:
        self._path, self._files, self._where = path, files, where
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._where.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a place before its beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, into: Any) -> int:
        count = max(min(len(into), self._where.nbytes - self._position), 0)
        into[:count] = self._files.read(self._path, self._where.start + self._position, count)
        self._position += count
        return count


def is_legacy(start: bytes) -> bool:
    """Whether a file that begins with these bytes is of `torch.save` before 2020, and not another pickle."""
    return start[2:].startswith(b"\x8a\x0a" + MAGIC.to_bytes(10, "little"))


def open_legacy(path: Path, files: Files, unwrap: Unwrap = _unchanged) -> CheckpointContents:
    """A file that `torch.save` wrote before 2020: five pickles, followed by the storages."""
    contents, end = _pickles(path, files)
    found = find_tensors(unwrap(contents[3]), str(path))
    keys = contents[4] if isinstance(contents[4], list) else []
    storages = {view.storage.key: view.storage for view in found.tensors.values()}
    extents = _extents(path, files, end, [str(key) for key in keys if isinstance(key, str) or is_size(key)], storages)
    return CheckpointContents(
        "torch (before 1.6)",
        (path,),
        *_locate(path, found.tensors, found.others, lambda storage: extents.get(storage.key)),
    )


def _pickles(path: Path, files: Files) -> tuple[list[Any], int]:
    """The pickles at the beginning of a legacy file, and where they end. Their length is not stored anywhere."""
    size = min(files.size(path), MOST_PICKLE_BYTES)
    length = min(size, _LIKELY_PICKLE_BYTES)
    while True:
        try:
            return _read_pickles(path, files.read(path, 0, length))
        except CheckpointError:  # noqa: PERF203 - a few times at most
            if length == size:
                raise
            length = min(size, 16 * length)


def _read_pickles(path: Path, data: bytes) -> tuple[list[Any], int]:
    contents: list[Any] = []
    end = 0
    for _ in range(5):  # magic, version, system, content, keys of the storages
        value, end = read_pickle(data, str(path), end)
        if not contents and value != MAGIC:
            raise CheckpointError(
                f"{path} is a pickle, but none that torch.save wrote. Pickles run code when they are loaded, so astray "
                "loads none: save the tensors with torch.save or as safetensors."
            )
        contents.append(value)
    return contents, end


def _extents(
    path: Path, files: Files, start: int, keys: list[str], storages: dict[str, Storage]
) -> dict[str, ByteRange]:
    """The byte ranges of the storages. Each follows its number of elements, whose size only its tensors have."""
    size, extents = files.size(path), dict[str, ByteRange]()
    for key in keys:
        if key not in storages:
            break  # its length is not known, so what comes after it cannot be located
        nbytes = storages[key].nbytes
        if start + 8 + nbytes > size:
            break
        extents[key] = ByteRange(start + 8, nbytes)
        start += 8 + nbytes
    return extents


def _locate(
    path: Path, views: dict[str, StorageView], others: dict[str, object], find: Callable[[Storage], ByteRange | None]
) -> tuple[dict[str, Stored], dict[str, object]]:
    """The tensors with their locations in the file. A tensor that cannot be there is an error: the file was cut."""
    tensors: dict[str, Stored] = {}
    for name, view in views.items():
        spec, storage = TensorSpec(view.dtype, view.shape), find(view.storage)
        if storage is None or view.end > storage.nbytes:
            actual = "is not there" if storage is None else f"has {storage.nbytes:,} bytes"
            raise CheckpointError(
                f"{path} says that {name!r} needs {view.end:,} bytes of storage {view.storage.key!r}, which {actual}: "
                "the file was cut or damaged. Copy it again from where it was made."
            )
        if spec.nbytes > max(storage.nbytes, MOST_EXPANDED):
            others[name] = Unread(
                f"a tensor of shape {list(view.shape)}", f"it repeats {storage.nbytes:,} bytes to {spec.nbytes:,}", 1
            )
            continue
        start = storage.start + view.offset * (spec.nbytes // spec.size if spec.size else 0)
        tensors[name] = Stored.of(spec, StoredBox(path, start, (0,) * len(view.shape), view.shape, view.stride))
    return tensors, others
