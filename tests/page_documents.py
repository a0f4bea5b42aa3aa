"""What the tests of the page read and build: tables as the page unpacks them, and runs that mean no good."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from astray import Comparison, compare
from record_builders import Builder, linear_program

_TYPES = {"i32": "<i4", "f64": "<f8", "u8": "u1"}

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a\u2028b\u2029c",
    "\x00\x01\x1b[31m\x7f",
    "'\"`;--${7*7}{{7*7}}",
    "<!--",
    "]]>",
    "../../etc/passwd",
    "x" * 5000,
    "\N{RIGHT-TO-LEFT OVERRIDE}gnp.exe",
    "=cmd()",
]
"""Names that a module may have, and that some page somewhere would have fallen for."""


def unpack(document: bytes) -> dict[str, list[Any]]:
    """The columns of a table as lists, words in place of codes."""
    length = int.from_bytes(document[:4], "little")
    assert (4 + length) % 8 == 0
    header = json.loads(document[4 : 4 + length])
    found = {}
    for column in header["columns"]:
        assert column["offset"] % 8 == 0
        begin = 4 + length + column["offset"]
        numbers = np.frombuffer(document, _TYPES[column["type"]], header["rows"], begin).tolist()
        words = column["words"]
        found[column["name"]] = numbers if words is None else [words[code] if code >= 0 else None for code in numbers]
    return found


def program_comparison(keep: str = "stats,fingerprint,tensors", **fault: Any) -> Comparison:
    """A small training compared with itself, from its second step on with a fault."""
    return compare(linear_program(Builder("runs/good", keep)), linear_program(Builder("runs/bad", keep), **fault))


def pair_of(left: Any, right: Any, keep: str = "stats,fingerprint,tensors", **rest: Any) -> Comparison:
    """Two runs of one call with one output each."""
    runs = []
    for path, array in (("runs/good", left), ("runs/bad", right)):
        builder = Builder(path, keep)
        builder.tensor(builder.call("layer"), "output", "out", array, **rest)
        runs.append(builder.run)
    return compare(*runs)


def hostile_run(path: str, factor: float = 1.0) -> Builder:
    """Modules with names that mean no good, with NaN and infinity in what they give."""
    builder = Builder(path, "stats,fingerprint,tensors")
    values = np.array([[1.0, -2.0, np.nan], [np.inf, -np.inf, 3.0]], np.float32)
    for name in HOSTILE:
        args = json.dumps({"args": [name]})
        seq = builder.call(name, name, args=args)
        builder.tensor(seq, "output", name, values * np.float32(factor), note=name)
    return builder
