"""The files of a dump: its folders by step and rank, its JSON files, whole or cut, and the files of single tensors.

msprobe writes NaN and Infinity as bare words, which are not JSON but which Python's parser reads. A JSON file that was
being written when its program was killed is read as far as its entries are whole.
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
from astray.store.safe_paths import entries, inside, read_text_file
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


def step_folders(path: Path) -> tuple[list[StepFolder], list[str]]:
    """Every step of every rank in a dump, in one of its steps, or the folder itself; and problems with them."""
    if _is_rank(path):
        step, rank = _STEP.fullmatch(path.resolve().parent.name), _RANK.fullmatch(path.resolve().name)
        number = int(rank[1]) if rank and rank[1] else 0
        return [StepFolder(int(step[1]) if step else 0, number, path)], []
    step = _STEP.fullmatch(path.resolve().name)
    folders, problems = _ranks(path, int(step[1]) if step else 0)
    if folders:
        return folders, problems
    steps = [
        (int(match[1]), entry) for entry in entries(path) if (match := _STEP.fullmatch(entry.name)) and entry.is_dir()
    ]
    for number, folder in sorted(steps):
        of_step, problems_of_step = _ranks(folder, number)
        folders += of_step
        problems += problems_of_step
    return folders, problems


def _is_rank(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES) or (folder / DATA).is_dir()


def _ranks(folder: Path, step: int) -> tuple[list[StepFolder], list[str]]:
    ranks, processes = [], []
    for entry in entries(folder):
        match = _RANK.fullmatch(entry.name)
        if match is None or not entry.is_dir() or not _is_rank(entry):
            continue
        if match[2]:
            processes.append((int(match[2]), entry))
        else:
            ranks.append(StepFolder(step, int(match[1] or 0), entry))
    taken = {place.rank for place in ranks}
    free = (number for number in range(len(ranks) + len(processes)) if number not in taken)
    ranks += [StepFolder(step, rank, path) for rank, (_, path) in zip(free, sorted(processes), strict=False)]
    problems = [] if len(processes) < 2 else [
        f"{folder} has {len(processes)} folders of processes that do not say their rank; they are numbered by their "
        "process ids. Rename them to rank0, rank1, … if that is not right."
    ]  # fmt: skip
    return sorted(ranks), problems


class Document(NamedTuple):
    """The content of a JSON file. `is_whole`: it was not cut."""

    content: dict[str, Any]
    is_whole: bool


def read_document(folder: Path, name: str) -> Document | None:
    """A JSON file of a dump; None when there is none. Raises RunError when nothing of it can be read."""
    path = inside(folder, name)
    if not path.exists():
        return None
    document = read_text_file(path).decode("utf-8", "replace")
    try:
        content = json.loads(document)
    except RecursionError:
        raise RunError(f"{path} is nested too deep, and is not read.") from None
    except ValueError as error:
        if document.lstrip()[:1] not in ("", "{"):
            raise RunError(f"{path} is not JSON: {error}.") from None
        return Document(read_whole_pairs(document, "data"), False)
    if not isinstance(content, dict):
        raise RunError(f"{path} holds a {type(content).__name__}, where msprobe writes an object. It is not read.")
    return Document(content, True)


def read_construct(content: dict[str, Any]) -> tuple[dict[str, str | None], dict[str, int]]:
    """The parent of each entry, and the micro step of each for which the file has one."""
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
    stacks: dict[str, list[str]] = {}
    for name, value in content.items():
        if not isinstance(value, list):
            continue
        if len(value) == 2 and all(isinstance(part, list) for part in value):
            lines = [line for line in value[1] if isinstance(line, str)]
            stacks |= {entry: lines for entry in value[0] if isinstance(entry, str)}
        else:
            stacks[name] = [line for line in value if isinstance(line, str)]
    return stacks


def frames(lines: list[str]) -> list[Frame]:
    """The frames of a stack; torch's own are left out where there are others."""
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    parsed = [Frame(match["file"], int(match["line"]), match["function"], match["code"].strip()) for match in matches]
    return [frame for frame in parsed if not any(part in frame.file for part in _FRAMEWORK)] or parsed


def outermost_forward(lines: list[str]) -> tuple[str, ...] | None:
    """The part of a stack that all calls in one call of an outermost module share: its forward and the frames below."""
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
    """A pair of a JSON object. Where its value is cut, `value` is None, and the value begins at `cut_at`."""

    name: str
    value: Any
    cut_at: int | None = None


def read_whole_pairs(text: str, inner: str) -> dict[str, Any]:
    """The whole pairs of a cut document; if the cut is in the value of `inner`, also the whole pairs of that value.

    >>> read_whole_pairs('{"task": "tensor", "data": {"a": [1, 2], "b": [3, ', "data")
    {'task': 'tensor', 'data': {'a': [1, 2]}}
    """
    whole: dict[str, Any] = {}
    for pair in _pairs(text, _skip_space(text, 0)):
        if pair.cut_at is None:
            whole[pair.name] = pair.value
        elif pair.name == inner:
            inside_cut = _pairs(text, pair.cut_at)
            whole[pair.name] = {each.name: each.value for each in inside_cut if each.cut_at is None}
    return whole


def _pairs(text: str, at: int) -> Iterator[JsonPair]:
    """The pairs of the object that begins at this position."""
    separator = "{"
    while text[at : at + 1] == separator:
        name, at = _name(text, _skip_space(text, at + 1))
        if name is None:
            return
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield JsonPair(name, None, at)
            return
        if end == len(text) and text[end - 1] not in '}]"':  # a number at the end may have lost digits
            yield JsonPair(name, None, at)
            return
        yield JsonPair(name, value)
        at, separator = _skip_space(text, end), ","


def _name(text: str, at: int) -> tuple[str | None, int]:
    """The name of a pair, None where there is none, and the position where its value begins."""
    if text[at : at + 1] != '"':
        return None, at
    try:
        name, at = scanstring(text, at + 1)
    except ValueError:
        return None, at
    at = _skip_space(text, at)
    return (name, _skip_space(text, at + 1)) if text[at : at + 1] == ":" else (None, at)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


# -- the files of tensors ----------------------------------------------------------------------------------------------


def load(path: str) -> npt.NDArray[Any]:
    """The values in a file of one tensor."""
    return npy.read(Path(path)) if path.endswith(".npy") else read_tensor(path)


def describe(path: Path) -> dict[str, Any]:
    """The tensor in a file, described as a leaf of dump.json."""
    if path.name.endswith(".npy"):
        spec = npy.describe(path)
    else:
        with checkpoints.open(path) as content:
            spec = content.spec(_only_name(path, content))
    return {"dtype": spec.dtype, "shape": list(spec.shape), "data_name": path.name}


# Dumps have tens of thousands of small .pt files. Their pickles are a few bytes that differ by dtype and shape only.
# Each distinct pickle is read by `astray.checkpoints`, which checks everything, and recognised in the next file: then
# only the directory of the zip has to be parsed, a twentieth of the work. A file that differs in any other way is read
# checked.

MOST_BYTES = 1 << 20
"""Bytes; beyond this, reading takes so long that the shortcut saves nothing."""

_MOST_KNOWN = 4096  # pickles that are remembered

_END = struct.Struct("<4sHHHHLLH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s22xHH")
_ZIP64_END = struct.Struct("<4sQHHLLQQQQ4sLQL")
_VERSION = 45  # of the zip format; later ones have more features
_MOST_RECORDS = 16
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class _KnownPickle(NamedTuple):
    """The only tensor of a file, which is the whole record `data/0`, by its pickle."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


_known: dict[bytes, _KnownPickle] = {}


def read_tensor(path: str) -> npt.NDArray[Any]:
    """The elements of the only tensor in a file of torch. Raises RunError or CheckpointError for any other file."""
    content = _content(path)
    records = None if content is None else _records(content)
    if content is None or records is None:
        return _read_checked(path)
    pickled, data = records
    known = _known.get(pickled)
    if known is None:
        array = _read_checked(path)
        if array.nbytes == len(data) and array.tobytes() == bytes(data):  # no strides, no offset, only the tensor
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[pickled] = _KnownPickle(array.dtype, array.shape, array.nbytes)
        return array
    if known.nbytes != len(data):
        return _read_checked(path)
    return np.frombuffer(data, known.dtype).reshape(known.shape)


def _read_checked(path: str) -> npt.NDArray[Any]:
    """By `astray.checkpoints`, which checks everything."""
    with checkpoints.open(Path(path)) as content:
        return content.read(_only_name(Path(path), content))[0]


def _only_name(path: Path, content: checkpoints.Checkpoint) -> str:
    if len(content.names) != 1:
        raise RunError(f"{path} holds {counted(len(content.names), 'tensor')}, where msprobe saves one alone.")
    return content.names[0]


def _content(path: str) -> bytes | None:
    """The bytes of a plain file; None for a large one, and for an unreadable one, which `_read_checked` reports."""
    try:
        file = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        return os.read(file, MOST_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(file)


def _records(content: bytes) -> tuple[bytes, memoryview] | None:
    """The pickle and the elements, of a zip with the plainest layout; None for any other."""
    end = len(content) - _END.size
    if end < 0:
        return None
    magic, disk, first_disk, on_disk, count, size, start, comment = _END.unpack_from(content, end)
    if magic != b"PK\5\6" or disk or first_disk or comment or on_disk != count or count > _MOST_RECORDS:
        return None
    stop = start + size
    if stop != end and not (
        stop + _ZIP64_END.size == end and _ZIP64_END.unpack_from(content, stop) == _zip64_end(count, size, start)
    ):
        return None
    records: dict[bytes, memoryview] = {}
    at = start
    for _ in range(count):
        if at + _ENTRY.size > stop:
            return None
        entry = _ENTRY.unpack_from(content, at)
        flags, nbytes, name_size, offset = entry[3], entry[9], entry[10], entry[16]
        name = content[at + _ENTRY.size : at + _ENTRY.size + name_size]
        at += _ENTRY.size + name_size
        extra = content[at : at + entry[11]]
        at += entry[11] + entry[12]
        plain = entry[0] == b"PK\1\2" and not entry[4] and not flags & ~0x808 and entry[2] <= _VERSION
        if not plain or name in records or b"\0" in name or not name.isascii() or not _is_padding(extra):
            return None
        record = _record(content, offset, nbytes)
        if record is None:
            return None
        records[name] = record
    pickles = [name for name in records if name.endswith(b"data.pkl")]
    if at != stop or len(pickles) != 1 or any(name.endswith(b"/constants.pkl") for name in records):
        return None
    root = pickles[0][: -len(b"data.pkl")]
    if bytes(records.get(root + b"byteorder", b"little")) != b"little":
        return None
    data = [name for name in records if name.startswith(root + b"data/")]
    return (bytes(records[pickles[0]]), records[data[0]]) if data == [root + b"data/0"] else None


def _zip64_end(count: int, size: int, start: int) -> tuple[Any, ...]:
    """The zip64 records that torch writes before the end record, with the same numbers in 64 bits."""
    return (b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, start, b"PK\6\7", 0, start + size, 1)


def _is_padding(extra: bytes) -> bool:
    """Whether an extra field is only torch's padding up to the next record."""
    return not extra or (
        len(extra) >= 4 and extra[:2] == b"FB" and int.from_bytes(extra[2:4], "little") + 4 == len(extra)
    )


def _record(content: bytes, offset: int, nbytes: int) -> memoryview | None:
    if offset + _LOCAL.size > len(content):
        return None
    magic, name, extra = _LOCAL.unpack_from(content, offset)
    start = offset + _LOCAL.size + name + extra
    if magic != b"PK\3\4" or start + nbytes > len(content):
        return None
    return memoryview(content)[start : start + nbytes]
