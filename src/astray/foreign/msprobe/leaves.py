"""The leaves of dump.json, which describe one tensor each: read into the rows of a run, and written from them.

msprobe takes its statistics over all elements, so that a NaN anywhere makes them NaN; astray's are over the finite
elements, with the others counted beside them. On reading, a maximum or minimum that is not finite means that some
elements are not; a mean or norm that is not finite beside finite extremes has overflowed in the tensor's own precision,
and is left out. On writing, the statistics are converted the other way.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRows, ValueLocation, shape_of
from astray.foreign.msprobe.files import DATA, load
from astray.records import Role, Statistics
from astray.safe_text import parse_json
from astray.stats import DTYPES
from astray.store.safe_paths import inside, other_names, plain_files
from astray.wording import counted, numeral

Leaf = dict[str, Any]
TENSOR_MARK = "<tensor>"
"""Stands for a tensor among the arguments of a call, as in `Call.args`."""

DEEPEST = 32
"""Nesting deeper than this is not read: no arguments are so deep."""

MOST_ITEMS = 1 << 16
"""No call has so many arguments: a larger index in a path of a damaged run must not make a list that long."""

_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")


class DumpTensor(NamedTuple):
    """A tensor within an argument or a result: its path, and its leaf."""

    path: str
    leaf: Leaf


def walk(value: Any, path: str, depth: int = 0) -> Iterator[DumpTensor]:
    """The tensors in a value of dump.json, with their paths."""
    if is_tensor(value):
        yield DumpTensor(path, value)
    elif isinstance(value, (dict, list)) and depth < DEEPEST and not _is_scalar(value):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(inner, f"{path}.{name}" if path else str(name), depth + 1)


def skeleton(value: Any, depth: int = 0) -> Any:
    """A value of dump.json in the form of `Call.args`: tensors as a mark, plain values as they are."""
    if is_tensor(value):
        return TENSOR_MARK
    if isinstance(value, dict):
        if _is_scalar(value):
            plain = skeleton(value.get("value"), depth + 1) if depth < DEEPEST else "…"
            if value["type"] == "torch.Size":
                return f"torch.Size({plain})"
            return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain
        return {name: skeleton(inner, depth + 1) for name, inner in value.items()} if depth < DEEPEST else "…"
    if isinstance(value, list):
        return [skeleton(inner, depth + 1) for inner in value] if depth < DEEPEST else "…"
    return value


def is_tensor(value: Any) -> bool:
    """Whether a value of dump.json is the leaf of a tensor."""
    return isinstance(value, dict) and "dtype" in value and "shape" in value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str) and not is_tensor(value)


def is_invalid_path(parts: Sequence[str]) -> bool:
    """Whether a path is too deep, or has an index that is too large."""
    indices = [(part, numeral(part)) for part in parts]
    too_large = (part.isdecimal() if index is None else index >= MOST_ITEMS for part, index in indices)
    return len(parts) > DEEPEST or any(too_large)


def put(into: Any, parts: Sequence[str], leaf: Leaf) -> None:
    """Put a leaf at a path, making the lists and dicts in between."""
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(into, list):
            index: Any = numeral(part)
            if index is None:
                return  # the arguments have a list where the path has a key
            into.extend([None] * (index + 1 - len(into)))
            held = into[index]
        else:
            index, held = part, into.get(part)
        if last:
            into[index] = leaf
            return
        if not isinstance(held, (list, dict)) or "dtype" in held:
            held = into[index] = [] if numeral(parts[depth + 1]) is not None else {}
        into = held


class LeafReader:
    """Adds the tensors of one step of one rank to its rows, and finds the files of their values."""

    def __init__(self, rows: DumpRows, folder: Path) -> None:
        self.checksums: set[str] = set()
        """The kinds of checksums in the dump."""
        self._rows, self._folder = rows, folder
        self._data = folder / DATA
        self._plain = plain_files(self._data)  # not links, so that nothing has to be resolved
        self._files = self._plain | other_names(self._data, self._plain) if self._data.is_dir() else set()
        self._home = f"{self._data}{os.sep}"
        self._mentioned: set[str] = set()  # files that an entry has mentioned
        self._missing: list[str] = []
        self._unreadable: Counter[str] = Counter()

    def add(self, seq: int, role: Role, path: str, leaf: Leaf) -> None:
        """Add a tensor of a call."""
        shape = shape_of(leaf["shape"])
        dtype = leaf["dtype"]
        if shape is None or not isinstance(dtype, str):
            self._unreadable[f"the form of a tensor: {str(skeleton([dtype, leaf['shape']]))[:60]}"] += 1
            return
        name = dtype.removeprefix("torch.").removeprefix("mindspore.").lower()
        statistics, note = _read_statistics(leaf, name, shape)
        values, missing = self._values(leaf.get("data_name"), name, shape)
        self._rows.tensor(
            seq, role, path, name, shape,
            values=values,
            statistics=statistics,
            fingerprint=self._checksum(leaf.get("md5")) if values is None else None,
            requires_grad=leaf.get("requires_grad") is True,
            placement=_read_placement(leaf),
            note=missing or note,
        )  # fmt: skip

    def skip(self, leaf: Leaf) -> None:
        """Count the file of a tensor that was added before as mentioned."""
        if isinstance(leaf.get("data_name"), str):
            self._mentioned.add(leaf["data_name"])

    def _values(self, file: object, dtype: str, shape: tuple[int, ...]) -> tuple[ValueLocation | None, str | None]:
        if not isinstance(file, str) or file in ("", "-1"):
            return None, None
        try:
            path = f"{self._home}{file}" if file in self._plain else str(inside(self._data, file))
        except RunError as error:
            self._rows.problem(str(error))
            return None, str(error)
        self._mentioned.add(file)
        if file not in self._files:
            self._missing.append(file)
            return None, f"Its values are not there: {file} is missing in {DATA}."
        if dtype not in DTYPES:
            return None, None
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        return ValueLocation(path, partial(load, path), nbytes), None

    def _checksum(self, text: object) -> int | None:
        if not isinstance(text, str):
            return None
        digits = text.removeprefix("0x")
        if not _HEXADECIMAL.fullmatch(
            digits[:16]
        ):  # which Python's own reading is not strict about: it takes signs and blanks
            return None
        self.checksums.add("xor" if text.startswith("0x") else "crc32" if len(digits) == 8 else "md5")
        return int(digits[:16], 16)

    def unmentioned(self) -> list[str]:
        """The files of tensors that no entry mentions, the oldest first."""
        paths = [self._folder / DATA / name for name in self._files - self._mentioned if name.endswith((".pt", ".npy"))]
        return [path.name for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))]

    def close(self) -> None:
        """Report missing files and unreadable entries."""
        if self._missing:
            self._rows.problem(
                f"{self._folder / DATA} lacks {counted(len(self._missing), 'file')} that dump.json mentions, the first "
                f"is {self._missing[0]}: those tensors have their statistics alone."
            )
        for what, count in self._unreadable.items():
            self._rows.problem(
                f"{self._folder / 'dump.json'} has {counted(count, 'entry')} that cannot be read: {what}."
            )


def _read_statistics(leaf: Leaf, dtype: str, shape: tuple[int, ...]) -> tuple[Statistics | None, str | None]:
    most, least, mean, norm = (_number(leaf.get(name)) for name in ("Max", "Min", "Mean", "Norm"))
    known = DTYPES.get(dtype)
    if known is not None and known.kind == "complex":  # msprobe measures magnitudes, astray real and imaginary parts
        return None, None
    if most is None or least is None:  # a missing extreme would mean one that is not finite
        return None, None
    size = math.prod(shape)
    if not (math.isfinite(most) and math.isfinite(least)):
        note = f"Some of its elements are not finite: msprobe says that its maximum is {most} and its minimum {least}."
        return Statistics(_finite(least), _finite(most), None, None, None, None, -1, -1, -1, size), note
    norm = abs(norm) if norm is not None and not shape else norm  # msprobe's norm of a single number is that number
    largest = max(abs(most), abs(least))
    return Statistics(least, most, _finite(mean), None, _finite(norm), largest, -1, -1, -1, size), None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _number(value: object) -> float | None:
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _read_placement(leaf: Leaf) -> str | None:
    if "placements" not in leaf and "device_mesh" not in leaf:
        return None
    placements = leaf.get("placements")
    words = []
    for placement in placements if isinstance(placements, list) else ():
        for kind, options in placement.items() if isinstance(placement, dict) else ():
            inner = "".join(str(skeleton(value)) for value in options.values()) if isinstance(options, dict) else ""
            words.append(f"{kind}({inner})")
    content = {"ranks": skeleton(leaf.get("device_mesh")), "placements": words, "shape": None, "offset": None}
    return json.dumps(content, separators=(",", ":"))


# -- a row of `tensors` → a leaf ---------------------------------------------------------------------------------------

TENSOR_TYPE = "torch.Tensor"
DISTRIBUTED_TYPE = "torch.distributed.tensor.DTensor"

WIDE = ("float64", "complex128")
_SIZE = re.compile(r"torch\.Size\(\[((?:\d{1,18}(?:, ?|(?=\])))*)\]\)", re.ASCII)
_OF_TORCH = re.compile(r"<torch\.(dtype|device|layout|memory_format) (.+)>")
_SLICE = re.compile(r"slice\((None|-?\d{1,18}), (None|-?\d{1,18}), (None|-?\d{1,18})\)")
_PLACEMENT = re.compile(r"(\w+)\((.*)\)")


def leaf_of(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str], rounded: bool = False) -> Leaf:
    """The leaf of a row of `tensors`. `values`, where they were kept, show the signs of infinities.

    rounded: Mean and Norm are rounded to 32-bit floats, as msprobe has them for dtypes that are no wider. More digits
    would look like an error to its comparison, which follows the growth of errors however small.
    """
    leaf: Leaf = {"type": TENSOR_TYPE, "dtype": f"torch.{row['dtype']}", "shape": list(row["shape"])}
    leaf |= _written_statistics(row, values, lost)
    if rounded and row["dtype"] not in WIDE:
        leaf |= {name: _rounded(leaf[name]) for name in ("Mean", "Norm") if leaf[name] is not None}
    leaf["requires_grad"] = bool(row["requires_grad"])
    if row["placement"] is not None:
        leaf |= _written_placement(row["placement"], lost)
    return leaf


def scalar(value: object, lost: Counter[str], word: str = "") -> Leaf | None:
    """The leaf of a plain argument, passed by the keyword `word` or by position.

    Text that a spreadsheet would read as a formula is rejected by msprobe's tools, and is left out. msprobe writes an
    empty leaf for a dtype or a device that was passed by position.
    """
    if value is None:
        return None
    if isinstance(value, str) and value[:1] in ("+", "-", "=", "%", "@"):
        lost["an argument that is a text beginning with + - = % or @"] += 1
        return {"type": "str", "value": None}
    if isinstance(value, str) and (kind := _OF_TORCH.fullmatch(value)):
        if kind[1] == "memory_format":
            return {"type": "torch.memory_format", "format": kind[2].removeprefix("torch.")}
        return {"type": f"torch.{kind[1]}", "value": kind[2]} if word in ("dtype", "device") else {}
    if isinstance(value, str) and (size := _SIZE.fullmatch(value)):
        return {"type": "torch.Size", "value": [int(number) for number in size[1].split(",") if number.strip()]}
    if isinstance(value, str) and (part := _SLICE.fullmatch(value)):
        return {"type": "slice", "value": [None if bound == "None" else int(bound) for bound in part.groups()]}
    return {"type": type(value).__name__, "value": value}


def _rounded(value: float) -> float:
    """Rounded to a 32-bit float; a number too large for one stays as it is."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    return rounded if math.isfinite(rounded) else value


def checksum(values: npt.NDArray[Any]) -> str:
    """What msprobe calls md5: the CRC-32 of the bytes, in hexadecimal."""
    return f"{zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data):08x}"


def is_finite(leaf: Leaf) -> bool:
    """Whether the statistics of a leaf are those of finite elements only."""
    return all(math.isfinite(leaf[name]) for name in ("Max", "Min", "Mean", "Norm") if leaf.get(name) is not None)


def _written_statistics(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str]) -> Leaf:
    of_row = {"Max": row["max"], "Min": row["min"], "Mean": row["mean"], "Norm": row["l2"]}
    leaf: Leaf = {name: _finite(value) for name, value in of_row.items()}
    if row["nan"] and row["nan"] > 0:
        return dict.fromkeys(leaf, math.nan)
    if row["inf"] and row["inf"] > 0:
        return _with_infinities(leaf, _signs(row, values, lost))
    kind = DTYPES[row["dtype"]].kind if row["dtype"] in DTYPES else "float"
    if kind in ("int", "bool"):
        whole = bool if kind == "bool" else int
        leaf |= {name: whole(leaf[name]) for name in ("Max", "Min") if leaf[name] is not None}
    return leaf


def _signs(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str]) -> set[float]:
    if values is not None and values.dtype.kind == "f":
        signs = {math.copysign(math.inf, sign) for sign in np.sign(values[np.isinf(values)]).tolist()}
        if signs:  # otherwise the values are not those of the row
            return signs
    first = row.get("first_bad_value")
    if row["inf"] > 1:
        lost["the signs of all infinities of a tensor but the first"] += 1
    return {-math.inf} if first is not None and first < 0 else {math.inf}


def _with_infinities(leaf: Leaf, signs: set[float]) -> Leaf:
    """The statistics over all elements, including infinite ones of these signs."""
    if math.inf in signs:
        leaf["Max"] = math.inf
    if -math.inf in signs:
        leaf["Min"] = -math.inf
    leaf["Max"] = -math.inf if leaf["Max"] is None else leaf["Max"]
    leaf["Min"] = math.inf if leaf["Min"] is None else leaf["Min"]
    return leaf | {"Mean": math.nan if len(signs) > 1 else next(iter(signs)), "Norm": math.inf}


def _written_placement(text: str, lost: Counter[str]) -> Leaf:
    try:
        content = parse_json(text)
        matches = [_PLACEMENT.fullmatch(word) for word in content["placements"]]
        placements = [
            {"Shard": {"dim": int(match[2])}}
            if match[1] == "Shard"
            else {match[1]: {"reduce_op": match[2]} if match[2] else {}}
            for match in matches
            if match
        ]
    except (ValueError, KeyError, TypeError):
        lost["how a distributed tensor is placed"] += 1
        return {}
    lost["which part of a distributed tensor it is"] += 1  # msprobe records the ranks of the mesh, astray its shape
    return {"type": DISTRIBUTED_TYPE, "placements": placements}
