"""One tensor of ours as a leaf of msprobe's dump.json: its form, and the four statistics that msprobe knows.

msprobe takes its statistics over all elements, so that a NaN anywhere makes them NaN; ours are over the finite ones,
with the others counted beside them. Here one is told from the other.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.safe_text import parse_json
from astray.stats import DTYPES

Leaf = dict[str, Any]

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
    leaf |= _statistics(row, values, lost)
    if rounded and row["dtype"] not in WIDE:
        leaf |= {name: _rounded(leaf[name]) for name in ("Mean", "Norm") if leaf[name] is not None}
    leaf["requires_grad"] = bool(row["requires_grad"])
    if row["placement"] is not None:
        leaf |= _placement(row["placement"], lost)
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


def _statistics(row: dict[str, Any], values: npt.NDArray[Any] | None, lost: Counter[str]) -> Leaf:
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


def _placement(text: str, lost: Counter[str]) -> Leaf:
    try:
        told = parse_json(text)
        placements = [_PLACEMENT.fullmatch(one) for one in told["placements"]]
        found = [{"Shard": {"dim": int(one[2])}} if one[1] == "Shard" else
                 {one[1]: {"reduce_op": one[2]} if one[2] else {}} for one in placements if one]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        lost["how a distributed tensor is placed"] += 1
        return {}
    lost["which part of a distributed tensor it is"] += 1  # msprobe names the ranks of the mesh, we its shape
    return {"type": DISTRIBUTED, "placements": found}
