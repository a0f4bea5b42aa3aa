"""The ".pkl" of torch_npu.hooks, which is not a pickle: each line is `[name, values, dtype, shape]` in JSON.

A file is scanned once without parsing its values; they are parsed when they are read. With `sample=True` a line has the
first ten values, then maximum, minimum and mean. The number of values tells whether a line is sampled; for a tensor of
13 elements it does not, and then the rest of the file decides.

Python's JSON writes NaN and Infinity as bare words, and so do these dumps. The original tool converts every tensor to
float32 first; astray writes each number as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.foreign.dump_rows import ValueLocation, shape_of
from astray.foreign.torch_npu.names import SAMPLE, SUMMARY, Array, DumpedTensor, Floats, TensorName, TorchNpuDump, parse
from astray.part import Part
from astray.records import Statistics
from astray.stats import DTYPES, Strided, decode, measure

_HEAD = re.compile(rb'\s*\[\s*("(?:[^"\\]|\\.){1,2000}")\s*,\s*\[')
_TAIL = re.compile(rb'\]\s*,\s*"([^"\\]{1,200})"\s*,\s*(\[[\d\s,]*\])\s*\]\s*$')
_LONGEST_TAIL = 4096
_PROBED_BYTES = 1 << 16
"""How many bytes of a file are read to recognise it."""

_MOST_REPORTED = 5
"""How many unreadable lines are reported one by one; the rest is counted."""

_PICKLES = (b"\x80", b"PK\x03\x04")


class Line(NamedTuple):
    """A line that could be read. Its values lie from byte `start` to `end` of the file; `values` is their number."""

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
        """How many numbers the whole tensor has: two for each complex element."""
        per_element = 2 if self.dtype in DTYPES and DTYPES[self.dtype].kind == "complex" else 1
        return math.prod(self.shape) * per_element

    @property
    def may_be(self) -> tuple[bool, bool]:
        """Whether the line may hold the whole tensor, and whether it may be sampled, by its number of values."""
        return self.values == self.size, self.values == min(self.size, SAMPLE) + SUMMARY


def recognises(path: Path) -> bool:
    """Whether a file looks like such a dump: any line near its beginning does."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_PROBED_BYTES)
    except OSError:
        return False
    return any(_name(head) is not None for head in map(_HEAD.match, beginning.split(b"\n")) if head)


def read(path: Path) -> TorchNpuDump:
    """The tensors of a file. Raises RunError where it is something else."""
    lines, problems, is_cut = _lines(path)
    if not lines:
        raise RunError(_why_no_lines(path, problems))
    certain = {line.may_be for line in lines} - {(True, True), (False, False)}
    file_is_sampled = certain == {(False, True)}
    tensors = []
    for line in lines:
        may_be_whole, may_be_sampled = line.may_be
        if not may_be_whole and not may_be_sampled:
            problems.append(
                f"Line {line.number} of {path.name} has {line.values} values for a tensor of {line.size} elements, "
                "which are neither all nor a sample. They are left out."
            )
        tensors.append(_dumped(path, line, may_be_sampled and (file_is_sampled or not may_be_whole)))
    more = len(problems) - _MOST_REPORTED
    if more > 1:
        problems = [*problems[:_MOST_REPORTED], f"{more} more lines of {path.name} are damaged."]
    return TorchNpuDump(tensors, problems, is_cut)


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
                    problems.append(f"Line {number} of {path.name} is left out: {_damage_of(raw)}.")
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
    if any(line.may_be) and known:
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
    numbers = parse_numbers(text, place)
    if len(numbers) != line.values:
        raise RunError(f"{path} has changed since it was opened. Open it again.")
    return numbers


def _floats(load: partial[Array]) -> Floats:
    return load().astype(np.float64)


def _elements(load: partial[Array], line: Line, shape: tuple[int, ...], place: str) -> Array:
    per_element = line.size // max(math.prod(line.shape), 1) or 1
    numbers = load()[: math.prod(shape) * per_element]
    return as_elements(numbers, line.dtype, place).reshape(shape)


def _summary(path: Path, line: Line) -> Statistics | None:
    """The maximum, minimum and mean at the end of a sampled line; one that is not finite is left out."""
    try:
        top, low, mean = (float(number) for number in _numbers(path, line, "")[-SUMMARY:])
    except RunError:
        return None  # reading the values raises the same error
    lowest, highest, middle = (number if math.isfinite(number) else None for number in (low, top, mean))
    absmax = None if lowest is None or highest is None else max(abs(lowest), abs(highest))
    return Statistics(lowest, highest, middle, None, None, absmax, -1, -1, -1, math.prod(line.shape))


def _damage_of(raw: bytes) -> str:
    """What is wrong with a line, in a few words."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(content, list) or len(content) != 4:
        return "it is not [name, values, dtype, shape]"
    return next(_wrong_parts(*content), "its values are not a plain list of numbers")


def _wrong_parts(name: object, values: object, dtype: object, shape: object) -> Iterator[str]:
    if not isinstance(name, str) or parse(name) is None:
        yield f"{str(name)[:80]!r} is not the name of a tensor"
    if not isinstance(values, list):
        yield f"its values are {str(values)[:40]!r}"
    if not isinstance(dtype, str):
        yield f"its dtype is {str(dtype)[:40]!r}"
    if shape_of(shape) is None:
        yield f"its shape is {str(shape)[:40]!r}"


def _why_no_lines(path: Path, problems: list[str]) -> str:
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


# -- the numbers of a line ---------------------------------------------------------------------------------------------

_DECODER = msgspec.json.Decoder(list[int | float])


def parse_numbers(text: bytes, place: str) -> Array:
    """The numbers between the brackets of a JSON list. Raises RunError where it holds anything else."""
    try:
        values = _decode_list(b"[%s]" % text)
        numbers = np.array(values) if values else np.empty(0)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RunError(f"The values of {place} are not numbers: {error}.") from None
    if numbers.dtype.kind not in "iufb" or numbers.ndim != 1:
        raise RunError(f"The values of {place} are not a plain list of numbers.")
    return numbers


def _decode_list(text: bytes) -> Any:
    """By msgspec; Python's own parser knows NaN and Infinity, but takes ten times as long."""
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError:
        return json.loads(text)


def as_elements(numbers: Array, dtype: str, place: str) -> Array:
    """Numbers as flat elements of a dtype, in its storage type; a complex element is two numbers."""
    kind = DTYPES[dtype]
    if kind.kind == "bool":
        return np.not_equal(numbers, 0)
    if kind.kind == "int":
        with np.errstate(invalid="ignore"):
            whole = numbers.astype(kind.storage)
        if not np.array_equal(whole, numbers):
            first_other = numbers[np.flatnonzero(whole != numbers)[0]].item()
            raise RunError(f"{place} says that it is {dtype}, and holds {first_other}.")
        return whole
    part = DTYPES[kind.part]
    with np.errstate(over="ignore"):
        if part.storage.kind == "f":
            elements = numbers.astype(part.storage)
        elif kind.part == "bfloat16":
            elements = _bfloat16(numbers.astype(np.float32))
        else:
            elements = _nearest(numbers.astype(np.float32), kind.part)
    return elements.view(kind.storage)


def as_numbers(elements: Array, dtype: str) -> Array:
    """Stored elements as numbers that JSON can write: flat, a complex element as two."""
    if DTYPES[dtype].kind == "bool":
        return elements.reshape(-1).astype(np.int8)
    plain = elements if elements.dtype.kind in "iuf" and DTYPES[dtype].kind == "int" else decode(elements, dtype)
    return plain.reshape(-1)


def format_numbers(numbers: Array, more: tuple[float, ...] = ()) -> str:
    """Numbers, followed by `more`, as a JSON list."""
    plain = [*numbers.tolist(), *more]
    if np.isfinite(numbers).all() and all(map(math.isfinite, more)):
        return msgspec.json.encode(plain).decode()
    return json.dumps(plain)  # slower, but it can write NaN and Infinity


def summarise(numbers: Array, known: Statistics | None = None) -> tuple[float, float, float]:
    """Maximum, minimum and mean of all numbers as torch computes them: a NaN or infinity among them propagates.

    known: statistics of the whole tensor, measured before, where `numbers` may be only its first elements. Of
    infinities of both signs they have only the sign of the first.
    """
    statistics = known or measure(Strided.from_numpy(numbers), fingerprint=False).statistics
    if statistics is None or statistics.nan or (statistics.max is None and not statistics.inf):
        return math.nan, math.nan, math.nan
    top, low, mean = (
        math.nan if value is None else value for value in (statistics.max, statistics.min, statistics.mean)
    )
    if statistics.inf:
        first = statistics.first_bad_value
        above = bool(np.isposinf(numbers).any()) or first == math.inf
        below = bool(np.isneginf(numbers).any()) or first == -math.inf
        top, low = math.inf if above else top, -math.inf if below else low
        mean = math.nan if above and below else math.inf if above else -math.inf
        # where there are no finite elements, the infinity is the other extreme too
        top, low = (low if math.isnan(top) else top), (top if math.isnan(low) else low)
    return top, low, mean


def _bfloat16(numbers: npt.NDArray[np.float32]) -> Array:
    """The upper half of the bits, rounded to even; the lower half is 0 for numbers dumped from bfloat16."""
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _nearest(numbers: npt.NDArray[np.float32], dtype: str) -> Array:
    """The codes of an 8-bit float whose values are nearest to these numbers."""
    codes = np.arange(256, dtype=np.uint8)
    decoded = decode(codes, dtype)
    is_nan = np.isnan(decoded)
    order = np.argsort(decoded[~is_nan], kind="stable")
    codes, values = codes[~is_nan][order], decoded[~is_nan][order]
    above = np.clip(np.searchsorted(values, numbers), 1, len(values) - 1)
    with np.errstate(invalid="ignore"):
        nearer_below = np.abs(numbers - values[above - 1]) < np.abs(values[above] - numbers)
    nearest = codes[np.where(nearer_below | (numbers == values[above - 1]), above - 1, above)]
    return np.where(np.isnan(numbers), np.argmax(is_nan).astype(np.uint8) if is_nan.any() else 0, nearest)
