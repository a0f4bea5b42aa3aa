"""What one file says: which call it was of, and where in the file its tensors lie.

Ours say all of it. Those of hooktools itself have a module's repr, the full name of a function or that of a parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from astray.checkpoints.contents import Contents, Unread, printable
from astray.checkpoints.open_files import Files
from astray.checkpoints.stored_tensor import Stored
from astray.checkpoints.torch_files import open_any
from astray.errors import CheckpointError
from astray.foreign.hooktools.call_file import CLASSES, role_of, unwrap
from astray.foreign.hooktools.layout import CallFile
from astray.records import Kind, Role

LONGEST_NAME = 100
"""A module's repr beyond this is cut: that of a whole model has thousands of lines."""

KINDS = ("module", "function", "op", "parameter", "collective", "custom")

WAY_OUT = (
    "Where such objects can be loaded, put plain tensors in their place: data = torch.load(file, weights_only=False), "
    "then torch.save({'module_name': data.module_name, 'input': data.input, 'output': …}, file)."
)


class Saved(NamedTuple):
    """One file, read: the call, and where its tensors lie."""

    file: CallFile
    kind: Kind
    site: str
    type: str
    tensors: list[tuple[Role, str, str, Stored]]  # role, path, name in the file
    ours: Mapping[str, Any] | None  # what a file of ours says besides
    problems: list[str]

    def number(self, name: str) -> int | None:
        """A number that a file of ours says; None when it does not, or it is none that can be."""
        value = (self.ours or {}).get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def read_file(file: CallFile, opened: Files) -> Saved:
    """What a file holds. Raises CheckpointError when it cannot be read."""
    contents = open_any(file.path, opened, unwrap)
    others = contents.others
    name = others.get("module_name")
    if not isinstance(name, str):
        raise CheckpointError(_no_call(file, contents))
    ours = others if isinstance(others.get("astray"), int) else None
    kind, site, type = _named(name, file, others) if ours is None else _as_told(name, others)
    tensors, strange = list[tuple[Role, str, str, Stored]](), list[str]()
    for full, stored in contents.tensors.items():
        place = role_of(file.phase, _as_now(full, file, contents) if ours is None else full)
        if place is None:
            strange.append(full.partition(".")[0])
        else:
            tensors.append((*place, full, stored))
    problems = [
        f"Files such as {file.path} hold {printable(part)!r}, which is no part of a call, and is not read."
        for part in dict.fromkeys(strange)
    ]
    for full, other in others.items():
        if isinstance(other, Unread) and other.tensors:
            problems.append(f"{printable(full)} of {printable(site)} is {other}. {WAY_OUT}")
    return Saved(file, kind, site, type, tensors, ours, problems)


def _as_now(full: str, file: CallFile, contents: Contents) -> str:
    """The name of a tensor in a file of hooktools as ours would have it.

    Gradients came in a tuple, even the one gradient of a lone output: that is the output itself.
    """
    if file.phase != "backward" or full != "output.0":
        return full
    several = sum(name.startswith("output.") for name in (*contents.tensors, *contents.others)) > 1
    return full if several else "output"


def _as_told(name: str, said: Mapping[str, Any]) -> tuple[Kind, str, str]:
    kind = said.get("kind")
    type = said.get("module_type")
    return cast(Kind, kind if kind in KINDS else "module"), name, type if isinstance(type, str) else ""


def _named(name: str, file: CallFile, said: Mapping[str, object]) -> tuple[Kind, str, str]:
    """What a call was, from what hooktools wrote: a repr, the full name of a function, or that of a parameter."""
    if file.phase == "gradient":
        return "parameter", name, "Parameter"
    if "(" not in name and said.get("classify") != CLASSES["module"]:
        return "function", f"/{name.rpartition('.')[2]}", name
    line = " ".join(name.split())
    if len(line) > LONGEST_NAME:  # the rest tells it from others that begin alike
        line = f"{line[:LONGEST_NAME]}… {zlib.crc32(name.encode(errors='replace')):08x}"
    return "module", printable(line, 2 * LONGEST_NAME), name.partition("(")[0]


def _no_call(file: CallFile, contents: Contents) -> str:
    for what in contents.others.values():
        if isinstance(what, Unread) and what.why:
            return f"{file.path} holds {what}. {WAY_OUT}"
    return f"{file.path} holds no call of hooktools: it has no module_name."
