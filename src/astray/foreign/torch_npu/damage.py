"""What is wrong with a file, or a line of it, that should be of torch_npu.hooks: in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from astray.foreign.dump_rows import shape_of
from astray.foreign.torch_npu.names import parse

_MOST_TOLD = 5
"""So many lines that cannot be read are told one by one."""
_PICKLES = (b"\x80", b"PK\x03\x04")


def few(problems: list[str], name: str) -> list[str]:
    """The problems of a file, but no endless list of them."""
    more = len(problems) - _MOST_TOLD
    return [*problems[:_MOST_TOLD], f"{more} more lines of {name} are damaged."] if more > 1 else problems


def what_is_wrong(raw: bytes) -> str:
    """A few words on a line that is none."""
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
    """Why a file is no dump, and what it may be instead."""
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
