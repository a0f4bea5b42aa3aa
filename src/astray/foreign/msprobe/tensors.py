"""The leaves of a dump's entries, as rows: their form, what msprobe measured of them, and where their values lie.

Statistics are taken as far as they say what ours do. A maximum or minimum that is not finite says that elements were
not; a mean or norm that is not, beside finite extremes, overflowed in the tensor's own precision, and says nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray import checkpoints
from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.foreign.dump_rows import DumpRows, ValueLocation, shape_of
from astray.foreign.msprobe.files import DATA
from astray.records import Role, Statistics
from astray.stats import DTYPES
from astray.store.safe_paths import inside, other_names, plain_files
from astray.wording import counted

Leaf = dict[str, Any]
DEEPEST = 32
"""Structures nested deeper than this are no arguments."""

_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")


class DumpTensor(NamedTuple):
    """A tensor within an argument or a result: its path, and what is said of it."""

    path: str
    leaf: Leaf


def walk(value: Any, path: str, depth: int = 0) -> Iterator[DumpTensor]:
    """The tensors in a value of dump.json, with their paths."""
    if is_tensor(value):
        yield DumpTensor(path, value)
    elif isinstance(value, (dict, list)) and depth < DEEPEST and not _is_scalar(value):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(one, f"{path}.{name}" if path else str(name), depth + 1)


def skeleton(value: Any, depth: int = 0) -> Any:
    """The same value as `Call.args` has it: tensors as a mark, plain values as they are."""
    if is_tensor(value):
        return "<tensor>"
    if isinstance(value, dict):
        if _is_scalar(value):
            said = skeleton(value.get("value"), depth + 1) if depth < DEEPEST else "…"
            if value["type"] == "torch.Size":
                return f"torch.Size({said})"
            return str(said) if isinstance(said, float) and not math.isfinite(said) else said
        return {name: skeleton(one, depth + 1) for name, one in value.items()} if depth < DEEPEST else "…"
    if isinstance(value, list):
        return [skeleton(one, depth + 1) for one in value] if depth < DEEPEST else "…"
    return value


def is_tensor(value: Any) -> bool:
    """Whether a value stands for a tensor."""
    return isinstance(value, dict) and "dtype" in value and "shape" in value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str) and not is_tensor(value)


class Tensors:
    """Adds the tensors of one step of one rank to its rows, and finds their values."""

    def __init__(self, rows: DumpRows, folder: Path) -> None:
        self.checksums: set[str] = set()
        """Which kinds of checksums there are."""
        self._rows, self._folder = rows, folder
        self._data = folder / DATA
        self._plain = plain_files(self._data)  # nothing has to be followed to them
        self._files = self._plain | other_names(self._data, self._plain) if self._data.is_dir() else set()
        self._home = f"{self._data}{os.sep}"
        self._told: set[str] = set()
        self._missing: list[str] = []
        self._odd: Counter[str] = Counter()

    def add(self, seq: int, role: Role, path: str, leaf: Leaf) -> None:
        """Add a tensor of a call."""
        shape = shape_of(leaf["shape"])
        dtype = leaf["dtype"]
        if shape is None or not isinstance(dtype, str):
            self._odd[f"the form of a tensor: {str(skeleton([dtype, leaf['shape']]))[:60]}"] += 1
            return
        name = dtype.removeprefix("torch.").removeprefix("mindspore.").lower()
        statistics, note = _statistics(leaf, name, shape)
        values, missing = self._values(leaf.get("data_name"), name, shape)
        self._rows.tensor(
            seq, role, path, name, shape,
            values=values,
            statistics=statistics,
            fingerprint=self._checksum(leaf.get("md5")) if values is None else None,
            requires_grad=leaf.get("requires_grad") is True,
            placement=_placement(leaf),
            note=missing or note,
        )  # fmt: skip

    def pass_over(self, leaf: Leaf) -> None:
        """Leave out a tensor that has been added before."""
        if isinstance(leaf.get("data_name"), str):
            self._told.add(leaf["data_name"])

    def _values(self, file: object, dtype: str, shape: tuple[int, ...]) -> tuple[ValueLocation | None, str | None]:
        if not isinstance(file, str) or file in ("", "-1"):
            return None, None
        try:
            path = f"{self._home}{file}" if file in self._plain else str(inside(self._data, file))
        except RunError as error:
            self._rows.problem(str(error))
            return None, str(error)
        self._told.add(file)
        if file not in self._files:
            self._missing.append(file)
            return None, f"Its values are not there: {file} is missing in {DATA}."
        if dtype not in DTYPES:
            return None, None
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        return ValueLocation(path, partial(load, path), nbytes), None

    def _checksum(self, said: object) -> int | None:
        if not isinstance(said, str):
            return None
        digits = said.removeprefix("0x")
        if not _HEXADECIMAL.fullmatch(
            digits[:16]
        ):  # which Python's own reading is not strict about: it takes signs and blanks
            return None
        self.checksums.add("xor" if said.startswith("0x") else "crc32" if len(digits) == 8 else "md5")
        return int(digits[:16], 16)

    def left(self) -> list[str]:
        """The files of tensors that no entry has told of, the oldest first."""
        found = [self._folder / DATA / name for name in self._files - self._told if name.endswith((".pt", ".npy"))]
        return [path.name for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))]

    def close(self) -> None:
        """Say what was wrong."""
        if self._missing:
            self._rows.problem(
                f"{self._folder / DATA} lacks {counted(len(self._missing), 'file')} that dump.json tells of, the first "
                f"is {self._missing[0]}: those tensors have their statistics alone."
            )
        for what, count in self._odd.items():
            self._rows.problem(
                f"{self._folder / 'dump.json'} has {counted(count, 'entry')} that cannot be read: {what}."
            )


def load(path: str) -> npt.NDArray[Any]:
    """The values in a file of one tensor."""
    return npy.read(Path(path)) if path.endswith(".npy") else read_tensor(path)


def form(path: Path) -> Leaf:
    """What a file tells of its tensor, as a leaf."""
    if path.name.endswith(".npy"):
        spec = npy.describe(path)
    else:
        with checkpoints.open(path) as found:
            if len(found.names) != 1:
                raise RunError(f"{path} holds {counted(len(found.names), 'tensor')}, where msprobe saves one alone.")
            spec = found.spec(found.names[0])
    return {"dtype": spec.dtype, "shape": list(spec.shape), "data_name": path.name}


def _statistics(leaf: Leaf, dtype: str, shape: tuple[int, ...]) -> tuple[Statistics | None, str | None]:
    most, least, mean, norm = (_number(leaf.get(name)) for name in ("Max", "Min", "Mean", "Norm"))
    known = DTYPES.get(dtype)
    if known is not None and known.kind == "complex":  # of magnitudes, where ours are of parts
        return None, None
    if most is None or least is None:  # an extreme that is missing would read as one that is not finite
        return None, None
    size = math.prod(shape)
    if not (math.isfinite(most) and math.isfinite(least)):
        note = f"Some of its elements are not finite: msprobe says that its maximum is {most} and its minimum {least}."
        return Statistics(_finite(least), _finite(most), None, None, None, None, -1, -1, -1, size), note
    norm = abs(norm) if norm is not None and not shape else norm  # of a single number msprobe gives that number
    largest = max(abs(most), abs(least))
    return Statistics(least, most, _finite(mean), None, _finite(norm), largest, -1, -1, -1, size), None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _number(said: object) -> float | None:
    if isinstance(said, (bool, int, float)):
        try:
            return float(said)
        except OverflowError:
            return None
    return None


def _placement(leaf: Leaf) -> str | None:
    if "placements" not in leaf and "device_mesh" not in leaf:
        return None
    placements = leaf.get("placements")
    words = []
    for one in placements if isinstance(placements, list) else ():
        for kind, told in one.items() if isinstance(one, dict) else ():
            inner = "".join(str(skeleton(value)) for value in told.values()) if isinstance(told, dict) else ""
            words.append(f"{kind}({inner})")
    told = {"ranks": skeleton(leaf.get("device_mesh")), "placements": words, "shape": None, "offset": None}
    return json.dumps(told, separators=(",", ":"))


# -- small files -------------------------------------------------------------------------------------------------------
# Reads the file of one small tensor at once. Dumps of other tools have ten thousands of them.
#
# Their pickles are a few bytes that differ by dtype and shape alone. Each distinct one is read with care, by
# `astray.checkpoints`, and known again in the next file: then only the table of the zip has to be gone through, which
# is a twentieth of the work. Whatever is not as it was then is read with care, too, and answered for by that.


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
