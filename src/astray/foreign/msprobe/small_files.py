"""Reads the file of one small tensor at once. Dumps of other tools have ten thousands of them.

Their pickles are a few bytes that differ by dtype and shape alone. Each distinct one is read with care, by
`astray.checkpoints`, and known again in the next file: then only the table of the zip has to be gone through, which is
a twentieth of the work. Whatever is not as it was then is read with care, too, and answered for by that.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray import checkpoints
from astray.errors import RunError
from astray.wording import counted

MOST_BYTES = 1 << 20
"""Larger files take their time to read anyhow."""

_MANY = 4096  # pickles that are remembered

_END = struct.Struct("<4sHHHHLLH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s22xHH")
_LARGE = struct.Struct("<4sQHHLLQQQQ4sLQL")
_VERSION = 45  # of the zip format; larger ones have more in them
_MOST_RECORDS = 16
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class _Form(NamedTuple):
    """What a pickle says of its only tensor, which is the whole of the record `data/0`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


_known: dict[bytes, _Form] = {}


def read_tensor(path: str) -> npt.NDArray[Any]:
    """The elements of the one tensor in a file of torch. Raises RunError or CheckpointError where that is not it."""
    content = _content(path)
    records = None if content is None else _records(content)
    if content is None or records is None:
        return _with_care(path)
    pickled, data = records
    form = _known.get(pickled)
    if form is None:
        found = _with_care(path)
        if found.nbytes == len(data) and found.tobytes() == bytes(data):  # no stride, no offset, nothing but the tensor
            if len(_known) >= _MANY:
                _known.clear()
            _known[pickled] = _Form(found.dtype, found.shape, found.nbytes)
        return found
    if form.nbytes != len(data):
        return _with_care(path)
    return np.frombuffer(data, form.dtype).reshape(form.shape)


def _with_care(path: str) -> npt.NDArray[Any]:
    with checkpoints.open(Path(path)) as found:
        if len(found.names) != 1:
            raise RunError(f"{path} holds {counted(len(found.names), 'tensor')}, where msprobe saves one alone.")
        return found.read(found.names[0])[0]


def _content(path: str) -> bytes | None:
    """The bytes of a plain file; None of a large one, and where it cannot be read, which is said by `_with_care`."""
    try:
        file = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            return None
        return os.read(file, MOST_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(file)


def _records(content: bytes) -> tuple[bytes, memoryview] | None:
    """The pickle and the elements, of a zip that holds these in the plainest way; None of any other."""
    end = len(content) - _END.size
    if end < 0:
        return None
    mark, disk, first, here, count, size, start, comment = _END.unpack_from(content, end)
    if mark != b"PK\5\6" or disk or first or comment or here != count or count > _MOST_RECORDS:
        return None
    stop = start + size
    if stop != end and not (
        stop + _LARGE.size == end and _LARGE.unpack_from(content, stop) == _large(count, size, start)
    ):
        return None
    records: dict[bytes, memoryview] = {}
    at = start
    for _ in range(count):
        if at + _ENTRY.size > stop:
            return None
        entry = _ENTRY.unpack_from(content, at)
        flags, nbytes, name_size, place = entry[3], entry[9], entry[10], entry[16]
        name = content[at + _ENTRY.size : at + _ENTRY.size + name_size]
        at += _ENTRY.size + name_size
        extra = content[at : at + entry[11]]
        at += entry[11] + entry[12]
        plain = entry[0] == b"PK\1\2" and not entry[4] and not flags & ~0x808 and entry[2] <= _VERSION
        if not plain or name in records or b"\0" in name or not name.isascii() or not _is_padding(extra):
            return None
        part = _part(content, place, nbytes)
        if part is None:
            return None
        records[name] = part
    pickles = [name for name in records if name.endswith(b"data.pkl")]
    if at != stop or len(pickles) != 1 or any(name.endswith(b"/constants.pkl") for name in records):
        return None
    root = pickles[0][: -len(b"data.pkl")]
    if bytes(records.get(root + b"byteorder", b"little")) != b"little":
        return None
    data = [name for name in records if name.startswith(root + b"data/")]
    return (bytes(records[pickles[0]]), records[data[0]]) if data == [root + b"data/0"] else None


def _large(count: int, size: int, start: int) -> tuple[Any, ...]:
    """What stands before the end of the zip files that torch writes: the same numbers with room for larger ones."""
    return (b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, start, b"PK\6\7", 0, start + size, 1)


def _is_padding(extra: bytes) -> bool:
    """Whether nothing is told but how far the next record is."""
    return not extra or (
        len(extra) >= 4 and extra[:2] == b"FB" and int.from_bytes(extra[2:4], "little") + 4 == len(extra)
    )


def _part(content: bytes, place: int, nbytes: int) -> memoryview | None:
    if place + _LOCAL.size > len(content):
        return None
    mark, name, extra = _LOCAL.unpack_from(content, place)
    start = place + _LOCAL.size + name + extra
    if mark != b"PK\3\4" or start + nbytes > len(content):
        return None
    return memoryview(content)[start : start + nbytes]
