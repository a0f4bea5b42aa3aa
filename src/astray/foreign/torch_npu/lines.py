"""Reads a ".pkl" of torch_npu.hooks, which is no pickle: each line is `[name, values, dtype, shape]` in JSON.

A file is gone through once without looking at its values; they are parsed when they are read. With `sample=True` a line
has the first ten values, then maximum, minimum and mean. Which of the two a line is, its length says; for a tensor with
13 elements it does not, and then the rest of the file decides.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astray.errors import RunError
from astray.foreign.dump_rows import ValueLocation, shape_of
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.names import SAMPLE, SUMMARY, Array, DumpedTensor, Floats, TensorName, TorchNpuDump, parse
from astray.part import Part
from astray.records import Statistics
from astray.stats import DTYPES

_HEAD = re.compile(rb'\s*\[\s*("(?:[^"\\]|\\.){1,2000}")\s*,\s*\[')
_TAIL = re.compile(rb'\]\s*,\s*"([^"\\]{1,200})"\s*,\s*(\[[\d\s,]*\])\s*\]\s*$')
_LONGEST_TAIL = 4096
_LOOKED_AT = 1 << 16
"""How much of a file is looked at to tell what it is."""

_MOST_TOLD = 5
"""How many lines that cannot be read become a problem each; the rest is counted."""

_PICKLES = (b"\x80", b"PK\x03\x04")


class Line(NamedTuple):
    """A line that could be read; its values lie from `start` to `end` in the file, and there are `values` of them."""

    number: int
    text: str
    name: TensorName
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    values: int

    @property
    def size(self) -> int:
        """How many numbers the whole tensor has."""
        pairs = 2 if self.dtype in DTYPES and DTYPES[self.dtype].kind == "complex" else 1
        return math.prod(self.shape) * pairs

    @property
    def could_be(self) -> tuple[bool, bool]:
        """Whether it could hold every value, and whether it could be sampled."""
        return self.values == self.size, self.values == min(self.size, SAMPLE) + SUMMARY


def recognises(path: Path) -> bool:
    """Whether a file looks like such a dump: any line near its beginning does."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_LOOKED_AT)
    except OSError:
        return False
    return any(_name(found) is not None for found in map(_HEAD.match, beginning.split(b"\n")) if found)


def read(path: Path) -> TorchNpuDump:
    """The tensors of a file. Raises RunError where it is something else."""
    found, problems, is_cut = _lines(path)
    if not found:
        raise RunError(nothing_there(path, problems))
    certain = {line.could_be for line in found} - {(True, True), (False, False)}
    sampled = certain == {(False, True)}
    tensors = []
    for line in found:
        all_of_it, some_of_it = line.could_be
        if not all_of_it and not some_of_it:
            problems.append(
                f"Line {line.number} of {path.name} has {line.values} values for a tensor of {line.size} elements, "
                "which are neither all nor a sample. They are left out."
            )
        tensors.append(_dumped(path, line, some_of_it and (sampled or not all_of_it)))
    return TorchNpuDump(tensors, few(problems, path.name), is_cut)


def _lines(path: Path) -> tuple[list[Line], list[str], bool]:
    lines, problems = [], []
    is_cut, start, raw = False, 0, b""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _line(raw, number, start)
                start += len(raw)
                if line is not None:
                    lines.append(line)
                elif not raw.endswith(b"\n"):
                    is_cut = True
                    problems.append(f"Line {number}, the last of {path.name}, was cut after {len(raw):,} bytes.")
                elif raw.strip():
                    problems.append(f"Line {number} of {path.name} is left out: {what_is_wrong(raw)}.")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    return lines, problems, is_cut


def _line(raw: bytes, number: int, start: int) -> Line | None:
    head, tail = _HEAD.match(raw), _TAIL.search(raw, max(0, len(raw) - _LONGEST_TAIL))
    if head is None or tail is None or tail.start() < head.end():
        return None
    name, shape = _name(head), _shape(tail[2])
    begin, end = head.end(), tail.start()
    if name is None or shape is None or raw.find(b"[", begin, end) >= 0:
        return None
    values = raw.count(b",", begin, end) + 1 if raw[begin:end].strip() else 0
    dtype = tail[1].decode(errors="replace").removeprefix("torch.")
    return Line(number, json.loads(head[1]), name, dtype, shape, start + begin, start + end, values)


def _name(head: re.Match[bytes]) -> TensorName | None:
    try:
        return parse(json.loads(head[1]))
    except ValueError:
        return None


def _shape(text: bytes) -> tuple[int, ...] | None:
    try:
        return shape_of(json.loads(text))
    except ValueError:
        return None


def _dumped(path: Path, line: Line, is_sampled: bool) -> DumpedTensor:
    place = f"line {line.number} of {path.name}"
    known = line.dtype in DTYPES
    load = partial(_numbers, path, line, place)
    whole = line.values == line.size if not is_sampled else line.size <= SAMPLE
    values = statistics = None
    if any(line.could_be) and known:
        nbytes = math.prod(line.shape) * DTYPES[line.dtype].itemsize
        if whole:
            values = ValueLocation((path, line.start), partial(_elements, load, line, line.shape, place), nbytes)
        elif DTYPES[line.dtype].kind != "complex":
            part = leading_block(line.shape)
            block = part.shape_of(line.shape)
            nbytes = math.prod(block) * DTYPES[line.dtype].itemsize
            values = ValueLocation(
                (path, line.start), partial(_elements, load, line, block, place), nbytes, part=str(part)
            )
    if is_sampled and not whole:
        statistics = _summary(path, line)
    note = None if known else f"Its dtype is not known, so its values in {place} are not read."
    return DumpedTensor(
        line.name,
        line.text,
        place,
        line.dtype,
        line.shape,
        numbers=partial(_floats, load),
        values=values,
        statistics=statistics,
        note=note,
        is_sampled=is_sampled,
    )


def leading_block(shape: tuple[int, ...]) -> Part:
    """The largest slice of a tensor with more than ten elements that its first ten fill.

    >>> str(leading_block((8, 64))), str(leading_block((100, 2, 3)))
    ('0:1, :10', '0:1, :, :')
    """
    spans: list[slice] = []
    size = 1
    for length in reversed(shape):
        taken = length if size * length <= SAMPLE else max(SAMPLE // size, 1)
        spans.append(slice(None) if taken == length else slice(0, taken))
        size *= taken
        if taken < length:
            break
    return Part.parse([*(slice(0, 1) for _ in range(len(shape) - len(spans))), *reversed(spans)])


def _numbers(path: Path, line: Line, place: str) -> Array:
    try:
        with path.open("rb") as file:
            file.seek(line.start)
            text = file.read(line.end - line.start)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    found = numbers.read(text, place)
    if len(found) != line.values:
        raise RunError(f"{path} has changed since it was opened. Open it again.")
    return found


def _floats(load: partial[Array]) -> Floats:
    return load().astype(np.float64)


def _elements(load: partial[Array], line: Line, shape: tuple[int, ...], place: str) -> Array:
    pairs = line.size // max(math.prod(line.shape), 1) or 1
    wanted = load()[: math.prod(shape) * pairs]
    return numbers.as_elements(wanted, line.dtype, place).reshape(shape)


def _summary(path: Path, line: Line) -> Statistics | None:
    """What the last three numbers say, as another tool summed them up; what is not finite among them is not there."""
    try:
        top, low, mean = (float(one) for one in _numbers(path, line, "")[-SUMMARY:])
    except RunError:
        return None  # whoever asks for the values hears of it
    lowest, highest, middle = (one if math.isfinite(one) else None for one in (low, top, mean))
    absmax = None if lowest is None or highest is None else max(abs(lowest), abs(highest))
    return Statistics(lowest, highest, middle, None, None, absmax, -1, -1, -1, math.prod(line.shape))


def few(problems: list[str], name: str) -> list[str]:
    """The first problems of a file, and how many more there are."""
    more = len(problems) - _MOST_TOLD
    return [*problems[:_MOST_TOLD], f"{more} more lines of {name} are damaged."] if more > 1 else problems


def what_is_wrong(raw: bytes) -> str:
    """What is wrong with a line, in a few words."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(found, list) or len(found) != 4:
        return "it is not [name, values, dtype, shape]"
    return next(_wrong_parts(*found), "its values are no plain list of numbers")


def _wrong_parts(name: object, values: object, dtype: object, shape: object) -> Iterator[str]:
    if not isinstance(name, str) or parse(name) is None:
        yield f"{str(name)[:80]!r} is no name of a tensor"
    if not isinstance(values, list):
        yield f"its values are {str(values)[:40]!r}"
    if not isinstance(dtype, str):
        yield f"its dtype is {str(dtype)[:40]!r}"
    if shape_of(shape) is None:
        yield f"its shape is {str(shape)[:40]!r}"


def nothing_there(path: Path, problems: list[str]) -> str:
    """Why a file is not a dump, and what it may be instead."""
    with path.open("rb") as file:
        beginning = file.read(4)
    if beginning.startswith(_PICKLES):
        return (
            f"{path} is a real pickle; the .pkl of torch_npu.hooks is lines of JSON. If it holds tensors, open it as a "
            f"checkpoint: astray show {path}"
        )
    if not beginning:
        return f"{path} is empty: nothing was dumped, or the program ended before anything was."
    return " ".join([f"{path} has no line of torch_npu.hooks.", *problems[:1]])
