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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRows, ValueLocation, shape_of
from astray.foreign.msprobe.files import DATA, load
from astray.records import Role, Statistics
from astray.safe_text import read_plain
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


def _read_statistics(leaf: Leaf, dtype: str, shape: tuple[int, ...]) -> tuple[Statistics | None, str | None]:
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


def _read_placement(leaf: Leaf) -> str | None:
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


# -- a row of `tensors` → a leaf ---------------------------------------------------------------------------------------

TENSOR = "torch.Tensor"
DISTRIBUTED = "torch.distributed.tensor.DTensor"

WIDE = ("float64", "complex128")
_SIZE = re.compile(r"torch\.Size\(\[((?:\d{1,18}(?:, ?|(?=\])))*)\]\)", re.ASCII)
_OF_TORCH = re.compile(r"<torch\.(dtype|device|layout|memory_format) (.+)>")
_SLICE = re.compile(r"slice\((None|-?\d{1,18}), (None|-?\d{1,18}), (None|-?\d{1,18})\)")
_PLACEMENT = re.compile(r"(\w+)\((.*)\)")


def leaf_of(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str], rounded: bool = False) -> Leaf:
    """The leaf of a row of `tensors`. `values` tell the signs of infinities, where they were kept.

    rounded: Mean and Norm get the digits of a 32-bit float, as msprobe has them of what is no wider. More would seem to
    be an error to its comparison, which looks at how errors grow, however small.
    """
    leaf: Leaf = {"type": TENSOR, "dtype": f"torch.{row['dtype']}", "shape": list(row["shape"])}
    leaf |= _written_statistics(row, values, lost)
    if rounded and row["dtype"] not in WIDE:
        leaf |= {name: _rounded(leaf[name]) for name in ("Mean", "Norm") if leaf[name] is not None}
    leaf["requires_grad"] = bool(row["requires_grad"])
    if row["placement"] is not None:
        leaf |= _written_placement(row["placement"], lost)
    return leaf


def scalar(value: object, lost: Counter[str], word: str = "") -> Leaf | None:
    """A plain argument, given by the name `word` or by position.

    A text that a spreadsheet would take for a formula is refused by msprobe, and is left out. A dtype or a device that
    was given by position is nothing to it.
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
        return {"type": "torch.Size", "value": [int(one) for one in size[1].split(",") if one.strip()]}
    if isinstance(value, str) and (part := _SLICE.fullmatch(value)):
        return {"type": "slice", "value": [None if one == "None" else int(one) for one in part.groups()]}
    return {"type": type(value).__name__, "value": value}


def _rounded(value: float) -> float:
    """To the digits of a 32-bit float; what is too large for one stays."""
    with np.errstate(over="ignore"):
        found = float(np.float32(value))
    return found if math.isfinite(found) else value


def checksum(values: npt.NDArray[Any]) -> str:
    """What msprobe calls md5: the CRC-32 of the bytes, in hexadecimal."""
    return f"{zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data):08x}"


def is_finite(leaf: Leaf) -> bool:
    """Whether the statistics of a leaf tell of finite elements alone."""
    return all(math.isfinite(leaf[name]) for name in ("Max", "Min", "Mean", "Norm") if leaf.get(name) is not None)


def _written_statistics(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str]) -> Leaf:
    told = {"Max": row["max"], "Min": row["min"], "Mean": row["mean"], "Norm": row["l2"]}
    found: Leaf = {name: one if one is not None and math.isfinite(one) else None for name, one in told.items()}
    if row["nan"] and row["nan"] > 0:
        return dict.fromkeys(found, math.nan)
    if row["inf"] and row["inf"] > 0:
        return _with_infinities(found, _signs(row, values, lost))
    kind = DTYPES[row["dtype"]].kind if row["dtype"] in DTYPES else "float"
    if kind in ("int", "bool"):
        whole = bool if kind == "bool" else int
        found |= {name: whole(found[name]) for name in ("Max", "Min") if found[name] is not None}
    return found


def _signs(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str]) -> set[float]:
    if values is not None and values.dtype.kind == "f":
        found = {math.copysign(math.inf, sign) for sign in np.sign(values[np.isinf(values)]).tolist()}
        if found:  # else the values are not those of the row
            return found
    first = row.get("first_bad_value")
    if row["inf"] > 1:
        lost["the signs of all infinities of a tensor but the first"] += 1
    return {-math.inf} if first is not None and first < 0 else {math.inf}


def _with_infinities(found: Leaf, signs: set[float]) -> Leaf:
    """As the maximum, minimum, sum and norm of all elements come out where some are infinite."""
    if math.inf in signs:
        found["Max"] = math.inf
    if -math.inf in signs:
        found["Min"] = -math.inf
    found["Max"] = -math.inf if found["Max"] is None else found["Max"]
    found["Min"] = math.inf if found["Min"] is None else found["Min"]
    return found | {"Mean": math.nan if len(signs) > 1 else next(iter(signs)), "Norm": math.inf}


def _written_placement(text: str, lost: Counter[str]) -> Leaf:
    try:
        told = read_plain(text)
        placements = [_PLACEMENT.fullmatch(one) for one in told["placements"]]
        found = [{"Shard": {"dim": int(one[2])}} if one[1] == "Shard" else
                 {one[1]: {"reduce_op": one[2]} if one[2] else {}} for one in placements if one]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        lost["how a distributed tensor is placed"] += 1
        return {}
    lost["which part of a distributed tensor it is"] += 1  # msprobe names the ranks of the mesh, we its shape
    return {"type": DISTRIBUTED, "placements": found}
