"""What the file of a call holds.

Ours is a dict of plain values and tensors. `input`, `output`, `module_name` and `classify` mean what they always did:
in a backward file `input` are the gradients that the call sends to its inputs, `output` those that arrive at its
outputs. The files of hooktools itself hold an object of its own; its attributes have the same names, and are read as
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from astray.checkpoints.torch_objects import attributes
from astray.foreign.array_files import Nest
from astray.records import Role
from astray.safe_text import parse_json
from astray.wording import numeral

CLASSES = {"module": "nn.module", "parameter": "gradient"}
"""What `classify` says of each kind of call; of all others it says that they are no nn.module."""

OTHERWISE = "non nn.module"

DEEPEST = 32
"""Beyond so many steps a path is a name with dots in it: nothing that was called had arguments so deep."""

PARTS: dict[str, dict[str, tuple[Role, str]]] = {
    "forward": {
        "input": ("input", ""),
        "kwargs": ("input", "kwargs"),
        "parameters": ("parameter", ""),
        "buffers": ("state", ""),
        "output": ("output", "out"),
    },
    "backward": {
        "output": ("input", "out"),
        "input": ("output", ""),
        "kwargs": ("output", "kwargs"),
    },
    "gradient": {
        "gradient": ("parameter", "value"),
        "gradient_grad": ("gradient", "grad"),
        "gradient_added": ("gradient", "added"),
    },
}
"""Of each phase, the parts of a file: the role of their tensors, and how the paths of these begin."""


class NestPath(NamedTuple):
    """Where a tensor stands in a file."""

    part: str
    path: str


def place_of(phase: str, role: str, path: str) -> NestPath | None:
    """Where a tensor of this role and path is put; None when such a file has no place for it.

    >>> place_of("forward", "output", "out.logits"), place_of("backward", "input", "out")
    (Place(part='output', path='logits'), Place(part='output', path=''))
    """
    best: NestPath | None = None
    for part, (of, beginning) in PARTS[phase].items():
        if of == role and (not beginning or path == beginning or path.startswith(f"{beginning}.")):
            place = NestPath(part, path[len(beginning) :].lstrip(".") if beginning else path)
            best = place if best is None or beginning else best  # `kwargs.mask` is no input called so
    return best


def role_of(phase: str, name: str) -> tuple[Role, str] | None:
    """The role and the path of a tensor by its name in a file; None when it is not one of a call.

    >>> role_of("forward", "output.logits"), role_of("forward", "input.0")
    (('output', 'out.logits'), ('input', '0'))
    """
    part, _, rest = name.partition(".")
    if part not in PARTS[phase]:
        return None
    role, beginning = PARTS[phase][part]
    if not beginning and not rest:
        return role, "0"  # a lone tensor where a tuple is meant
    return role, ".".join(filter(None, (beginning, rest)))


def nest(leaves: Mapping[str, Nest], depth: int = 0) -> Nest:
    """A nest in which each leaf stands at its path: tuples where all steps are numbers, else dicts.

    >>> nest({"0": 1, "2.a": 3})
    (1, None, {'a': 3})
    """
    if "" in leaves:
        return leaves[""]
    groups: dict[str, dict[str, Nest]] = {}
    for path, leaf in leaves.items():
        first, _, rest = path.partition(".") if depth < DEEPEST else (path, "", "")
        if rest and first in leaves:
            groups[path] = {"": leaf}  # one leaf below another: it had a dot in its key
        else:
            groups.setdefault(first, {})[rest] = leaf
    places = [numeral(key) for key in groups]
    if groups and all(place is not None and str(place) == key for key, place in zip(groups, places, strict=True)):
        length = max(place for place in places if place is not None) + 1
        if length <= 2 * len(groups) + 64:  # a dict of a few large numbers is no tuple
            inner = (groups.get(str(place)) for place in range(length))
            return tuple(None if group is None else nest(group, depth + 1) for group in inner)
    return {key: nest(group, depth + 1) for key, group in groups.items()}


def plain_leaves(args: str | None) -> dict[str, dict[str, Nest]]:
    """The arguments of a call that are no tensors, of `input` and of `kwargs`, by their paths."""
    try:
        found = parse_json(args) if args else {}
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    parts = {"input": found.get("args", []), "kwargs": found.get("kwargs", {})}
    return {part: dict(_leaves(value, "")) for part, value in parts.items()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Nest]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path and value != "<tensor>":
        yield path, value


def unwrap(content: Any) -> Any:
    """The dict of a file, also where hooktools has pickled an object with these attributes.

    Its newer objects are modules, which have a parameter registered as `gradient`, and its gradient as `gradient_grad`;
    the older ones had only the gradient, and called it `gradient`.
    """
    found = attributes(content)
    if found is None or "module_name" not in found:
        return content
    if "gradient" in content.state and "gradient_grad" not in found:
        found["gradient_grad"] = found.pop("gradient")
    return {key: value for key, value in found.items() if not key.startswith("_")}
