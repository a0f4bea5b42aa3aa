"""The folders of a dump, and what its JSON files say, whole or cut in the middle.

msprobe writes NaN and Infinity as bare words, which are not JSON and which Python reads. A file that was being written
when its program was killed is read as far as its entries are whole.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray import checkpoints
from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.records import Frame
from astray.store.safe_paths import entries, inside, text
from astray.wording import counted

DATA = "dump_tensor_data"
FILES = ("dump.json", "construct.json", "stack.json", "debug.json")

_STEP = re.compile(r"step(\d{1,9})")
_RANK = re.compile(r"rank(\d{0,9})|proc(\d{1,12})")
_LINE = re.compile(r"File (?P<file>.+), line (?P<line>\d{1,9}), in (?P<function>.+?), ?\n ?(?P<code>.*)", re.DOTALL)
_FRAMEWORK = ("/torch/nn/modules/", "/torch/nn/functional.py", "/torch/_tensor.py", "/torch/utils/", "/torch/autograd/")


class StepFolder(NamedTuple):
    """The folder of one step of one rank."""

    step: int
    rank: int
    folder: Path


def places(path: Path) -> tuple[list[StepFolder], list[str]]:
    """Every step of every rank in a dump, in one of its steps, or the folder itself; and what is odd about them."""
    if _is_rank(path):
        step, rank = _STEP.fullmatch(path.resolve().parent.name), _RANK.fullmatch(path.resolve().name)
        number = int(rank[1]) if rank and rank[1] else 0
        return [StepFolder(int(step[1]) if step else 0, number, path)], []
    step = _STEP.fullmatch(path.resolve().name)
    found, odd = _ranks(path, int(step[1]) if step else 0)
    if found:
        return found, odd
    steps = [(int(match[1]), one) for one in entries(path) if (match := _STEP.fullmatch(one.name)) and one.is_dir()]
    for number, folder in sorted(steps):
        of_step, also_odd = _ranks(folder, number)
        found += of_step
        odd += also_odd
    return found, odd


def _is_rank(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES) or (folder / DATA).is_dir()


def _ranks(folder: Path, step: int) -> tuple[list[StepFolder], list[str]]:
    ranks, processes = [], []
    for one in entries(folder):
        match = _RANK.fullmatch(one.name)
        if match is None or not one.is_dir() or not _is_rank(one):
            continue
        if match[2]:
            processes.append((int(match[2]), one))
        else:
            ranks.append(StepFolder(step, int(match[1] or 0), one))
    taken = {place.rank for place in ranks}
    free = (number for number in range(len(ranks) + len(processes)) if number not in taken)
    ranks += [StepFolder(step, rank, one) for rank, (_, one) in zip(free, sorted(processes), strict=False)]
    odd = [] if len(processes) < 2 else [
        f"{folder} has {len(processes)} folders of processes that do not say their rank; they are numbered by their "
        "process ids. Rename them to rank0, rank1, … if that is not right."
    ]  # fmt: skip
    return sorted(ranks), odd


class Document(NamedTuple):
    """The content of a JSON file, and whether it is all there."""

    content: dict[str, Any]
    whole: bool


def read_document(folder: Path, name: str) -> Document | None:
    """A JSON file of a dump; None when there is none. Raises RunError when nothing of it can be read."""
    path = inside(folder, name)
    if not path.exists():
        return None
    raw = text(path)
    said = raw.decode("utf-8", "replace")
    try:
        found = json.loads(said)
    except RecursionError:
        raise RunError(f"{path} is nested too deep, and is not read.") from None
    except ValueError as error:
        if said.lstrip()[:1] not in ("", "{"):
            raise RunError(f"{path} is no JSON: {error}.") from None
        return Document(read_whole_pairs(said, "data"), False)
    if not isinstance(found, dict):
        raise RunError(f"{path} holds a {type(found).__name__}, where msprobe writes an object. It is not read.")
    return Document(found, True)


def read_construct(content: dict[str, Any]) -> tuple[dict[str, str | None], dict[str, int]]:
    """The parent of each entry, and the micro step of those whose micro step is given."""
    parents: dict[str, str | None] = {}
    micros: dict[str, int] = {}
    for name, value in content.items():
        parent = value
        if isinstance(value, list) and len(value) == 2:
            parent, micro = value
            if isinstance(micro, int) and not isinstance(micro, bool) and 0 <= micro < 1 << 31:
                micros[name] = micro
        if parent is None or isinstance(parent, str):
            parents[name] = parent
    return parents, micros


def read_stacks(content: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of the stack of each entry, innermost first, from either of the two forms of the file."""
    found: dict[str, list[str]] = {}
    for name, value in content.items():
        if not isinstance(value, list):
            continue
        if len(value) == 2 and all(isinstance(one, list) for one in value):
            lines = [line for line in value[1] if isinstance(line, str)]
            found |= {entry: lines for entry in value[0] if isinstance(entry, str)}
        else:
            found[name] = [line for line in value if isinstance(line, str)]
    return found


def frames(lines: list[str]) -> list[Frame]:
    """The frames of a stack, without torch's own where there are others."""
    parsed = [match for line in lines if (match := _LINE.fullmatch(line))]
    found = [Frame(one["file"], int(one["line"]), one["function"], one["code"].strip()) for one in parsed]
    return [one for one in found if not any(part in one.file for part in _FRAMEWORK)] or found


def caller(lines: list[str]) -> tuple[str, ...] | None:
    """What all calls in one call of an outermost module share: its forward, and where that was called from."""
    calls = [number for number, line in enumerate(lines) if "nn/modules/module.py" in line and "_call_impl" in line]
    if not calls:
        return None
    last = inner = calls[-1]
    while inner >= 0 and "nn/modules/module.py" in lines[inner]:
        inner -= 1
    match = _LINE.fullmatch(lines[inner]) if inner >= 0 else None
    return (match["file"], match["function"], *lines[last + 1 :]) if match else None


# -- a JSON document that was cut in the middle, as a killed program leaves it -----------------------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class JsonPair(NamedTuple):
    """A pair of a JSON object. Where its value is cut, `value` is None, and `cut` is where it begins."""

    name: str
    value: Any
    cut: int | None = None


def read_whole_pairs(text: str, inner: str) -> dict[str, Any]:
    """The whole pairs of a document; where the cut is in the value of `inner`, also the whole pairs of that value.

    >>> read_whole_pairs('{"task": "tensor", "data": {"a": [1, 2], "b": [3, ', "data")
    {'task': 'tensor', 'data': {'a': [1, 2]}}
    """
    found: dict[str, Any] = {}
    for pair in _pairs(text, _behind_space(text, 0)):
        if pair.cut is None:
            found[pair.name] = pair.value
        elif pair.name == inner:
            found[pair.name] = {one.name: one.value for one in _pairs(text, pair.cut) if one.cut is None}
    return found


def _pairs(text: str, at: int) -> Iterator[JsonPair]:
    """The pairs of the object that begins here."""
    separator = "{"
    while text[at : at + 1] == separator:
        name, at = _name(text, _behind_space(text, at + 1))
        if name is None:
            return
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield JsonPair(name, None, at)
            return
        if end == len(text) and text[end - 1] not in '}]"':  # a number may go on behind the cut
            yield JsonPair(name, None, at)
            return
        yield JsonPair(name, value)
        at, separator = _behind_space(text, end), ","


def _name(text: str, at: int) -> tuple[str | None, int]:
    """The name of a pair and where its value begins; None where there is none."""
    if text[at : at + 1] != '"':
        return None, at
    try:
        name, at = scanstring(text, at + 1)
    except ValueError:
        return None, at
    at = _behind_space(text, at)
    return (name, _behind_space(text, at + 1)) if text[at : at + 1] == ":" else (None, at)


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


# -- the files of tensors ----------------------------------------------------------------------------------------------


def load(path: str) -> npt.NDArray[Any]:
    """The values in a file of one tensor."""
    return npy.read(Path(path)) if path.endswith(".npy") else read_tensor(path)


def form(path: Path) -> dict[str, Any]:
    """What a file tells of its tensor, as a leaf."""
    if path.name.endswith(".npy"):
        spec = npy.describe(path)
    else:
        with checkpoints.open(path) as found:
            if len(found.names) != 1:
                raise RunError(f"{path} holds {counted(len(found.names), 'tensor')}, where msprobe saves one alone.")
            spec = found.spec(found.names[0])
    return {"dtype": spec.dtype, "shape": list(spec.shape), "data_name": path.name}


# Dumps have tens of thousands of them. Their pickles are a few bytes that differ by dtype and shape alone. Each
# distinct one is read by `astray.checkpoints`, which checks everything, and recognised in the next file: then only the
# table of the zip has to be gone through, a twentieth of the work. Any other difference takes the careful way.

MOST_BYTES = 1 << 20
"""Bytes; beyond this, reading takes so long that the shortcut saves nothing."""

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
