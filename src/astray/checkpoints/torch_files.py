"""Files that `torch.save` wrote: a zip with a pickle and the storages beside it, or before 2020 one after another.

Neither is unpickled: the pickle is read as data, and tells which bytes of the file are which tensor. A zip holds its
storages as they are, so that a tensor is read from its place without unpacking anything.
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
"""What the first of the pickles in an old file says."""

MOST_PICKLE_BYTES = 1 << 30
"""A million tensors take a third of it."""

_LIKELY_PICKLE_BYTES = 1 << 22

MOST_EXPANDED = 1 << 30
"""A tensor may repeat what is stored of it; up to so many bytes that is no trap."""

_BROKEN = (
    zipfile.BadZipFile, NotImplementedError, OSError, ValueError, KeyError, EOFError, struct.error, OverflowError,
)  # fmt: skip
"""What `zipfile` raises for files that are none, or were made to harm."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # its mark, and how long the name and what follows it are


class ByteRange(NamedTuple):
    """Some bytes of a file."""

    start: int
    nbytes: int


Unwrap = Callable[[Any], Any]
"""Takes what lies in a pickle, as `pickles` has it, and gives the part of it in which tensors are looked for."""


def _as_it_is(content: Any) -> Any:
    return content


def open_zip(path: Path, files: Files, unwrap: Unwrap = _as_it_is) -> CheckpointContents:
    """A file that `torch.save` wrote since 2020."""
    return CheckpointContents("torch", (path,), *_tensors(path, files, ByteRange(0, files.size(path)), unwrap))


def open_any(path: Path, files: Files, unwrap: Unwrap = _as_it_is) -> CheckpointContents:
    """A file that `torch.save` wrote, ever."""
    is_zip = files.read(path, 0, min(files.size(path), 4)) == b"PK\3\4"
    return open_zip(path, files, unwrap) if is_zip else open_legacy(path, files, unwrap)


def open_embedded(path: Path, files: Files, where: ByteRange) -> CheckpointContents:
    """Such a file that is a part of another."""
    return CheckpointContents("torch", (path,), *_tensors(path, files, where))


def _tensors(
    path: Path, files: Files, where: ByteRange, unwrap: Unwrap = _as_it_is
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
    return _place(path, found.tensors, found.others, lambda storage: records.get(f"{root}data/{storage.key}"))


def _records(path: Path, files: Files, where: ByteRange) -> Mapping[str, ByteRange]:
    """Where in the file the records of a zip lie."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(path, files, where))) as archive:
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
    mark, name, extra = _LOCAL_HEADER.unpack(header)
    start = entry.header_offset + _LOCAL_HEADER.size + name + extra
    if mark != b"PK\3\4" or start + entry.file_size > where.nbytes:
        raise ValueError(f"{entry.filename!r} is not where it should be")
    return ByteRange(where.start + start, entry.file_size)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: Path, files: Files, where: ByteRange) -> None:
        self._path, self._files, self._where = path, files, where
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._where.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a place before its beginning")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, into: Any) -> int:
        count = max(min(len(into), self._where.nbytes - self._place), 0)
        into[:count] = self._files.read(self._path, self._where.start + self._place, count)
        self._place += count
        return count


def open_legacy(path: Path, files: Files, unwrap: Unwrap = _as_it_is) -> CheckpointContents:
    """A file that `torch.save` wrote before 2020: five pickles, and the storages one after another."""
    said, place = _pickles(path, files)
    found = find_tensors(unwrap(said[3]), str(path))
    keys = said[4] if isinstance(said[4], list) else []
    storages = {view.storage.key: view.storage for view in found.tensors.values()}
    extents = _extents(path, files, place, [str(key) for key in keys if isinstance(key, str) or is_size(key)], storages)
    return CheckpointContents(
        "torch (before 1.6)",
        (path,),
        *_place(path, found.tensors, found.others, lambda storage: extents.get(storage.key)),
    )


def _pickles(path: Path, files: Files) -> tuple[list[Any], int]:
    """The pickles at the beginning of an old file, and where they end. Nothing says how long they are."""
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
    said: list[Any] = []
    place = 0
    for _ in range(5):  # a mark, the version, the machine, the content, the keys of the storages
        value, place = read_pickle(data, str(path), place)
        if not said and value != MAGIC:
            raise CheckpointError(
                f"{path} is a pickle, but none that torch.save wrote. Pickles run code when they are loaded, so astray "
                "loads none: save the tensors with torch.save or as safetensors."
            )
        said.append(value)
    return said, place


def _extents(
    path: Path, files: Files, place: int, keys: list[str], storages: dict[str, Storage]
) -> dict[str, ByteRange]:
    """Where the storages lie. Each has its number of elements before it, of a size that only its tensors tell."""
    size, found = files.size(path), dict[str, ByteRange]()
    for key in keys:
        if key not in storages:
            break  # nobody knows how long it is: what comes after it cannot be found
        nbytes = storages[key].nbytes
        if place + 8 + nbytes > size:
            break
        found[key] = ByteRange(place + 8, nbytes)
        place += 8 + nbytes
    return found


def _place(
    path: Path, views: dict[str, StorageView], others: dict[str, object], find: Callable[[Storage], ByteRange | None]
) -> tuple[dict[str, Stored], dict[str, object]]:
    """Tensors at their places in the file. One that cannot be there is an error: the file was cut."""
    found: dict[str, Stored] = {}
    for name, view in views.items():
        spec, storage = TensorSpec(view.dtype, view.shape), find(view.storage)
        if storage is None or view.end > storage.nbytes:
            there = "is not there" if storage is None else f"has {storage.nbytes:,} bytes"
            raise CheckpointError(
                f"{path} says that {name!r} needs {view.end:,} bytes of storage {view.storage.key!r}, which {there}: "
                "the file was cut or damaged. Copy it again from where it was made."
            )
        if spec.nbytes > max(storage.nbytes, MOST_EXPANDED):
            others[name] = Unread(
                f"a tensor of shape {list(view.shape)}", f"it repeats {storage.nbytes:,} bytes to {spec.nbytes:,}", 1
            )
            continue
        start = storage.start + view.offset * (spec.nbytes // spec.size if spec.size else 0)
        found[name] = Stored.of(spec, StoredBox(path, start, (0,) * len(view.shape), view.shape, view.stride))
    return found, others
