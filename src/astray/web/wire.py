"""How documents are sent to the page: JSON without a bare NaN, and columns as raw numbers after a small header.

All text is ASCII: names of modules with other characters are sent as JSON escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.report.csv import cell_word
from astray.store import DictionaryColumn

Document = dict[str, Any]
Column = npt.NDArray[Any] | DictionaryColumn[Any]

_ALIGNMENT = 8  # bytes: the page makes typed arrays of the answer without a copy, and those of float64 need it
_TYPES = {"b": "u8", "f": "f64", "i": "i32", "u": "i32"}
_STORED: dict[str, np.dtype[Any]] = {"u8": np.dtype("u1"), "i32": np.dtype("<i4"), "f64": np.dtype("<f8")}


def plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite become the text "nan", "inf" or "-inf".

    >>> plain({"error": float("inf"), "index": (np.int64(2), 3)})
    {'error': 'inf', 'index': [2, 3]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int) else str(value)


def encode(document: Document) -> bytes:
    """A document as JSON in ASCII."""
    return json.dumps(plain(document), allow_nan=False, separators=(",", ":")).encode("ascii")


def pack(columns: Mapping[str, Column]) -> bytes:
    """Columns of one length: the length of the header, the header, padding, then the arrays, each aligned to 8 bytes.

    Codes of words are int32 with −1 for null; of floats NaN is null. Integers that int32 cannot hold go as float64.
    """
    header: Document = {"rows": len(next(iter(columns.values()), ())), "columns": []}
    arrays: list[npt.NDArray[Any]] = []
    offset = 0
    for name, column in columns.items():
        words = [cell_word(value) for value in column.values] if isinstance(column, DictionaryColumn) else None
        numbers = column.codes if isinstance(column, DictionaryColumn) else column
        kind = _type_of(numbers)
        header["columns"].append({"name": name, "type": kind, "offset": offset, "words": words})
        arrays.append(numbers.astype(_STORED[kind]))
        offset += _padded(arrays[-1].nbytes)
    head = encode(header)
    head += b" " * (-(4 + len(head)) % _ALIGNMENT)
    return b"".join([len(head).to_bytes(4, "little"), head, *map(_bytes, arrays)])


def _type_of(numbers: npt.NDArray[Any]) -> str:
    kind = _TYPES[numbers.dtype.kind]
    if kind != "i32" or not len(numbers):
        return kind
    limits = np.iinfo(np.int32)
    return "i32" if limits.min <= int(numbers.min()) and int(numbers.max()) <= limits.max else "f64"


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _bytes(array: npt.NDArray[Any]) -> bytes:
    return array.tobytes() + bytes(-array.nbytes % _ALIGNMENT)
