"""A tensor of a dump of torch_npu.hooks, in either of the two forms, and its name, read and written.

In `16_Functional_relu_backward_input.0` the number counts tensors through the whole file; it does not identify the
call. The backward pass is named as autograd's nodes see it: `input` are the gradients that a call sends to its inputs,
`output` those that arrive at its outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from astray.foreign.dump_rows import ValueLocation
from astray.foreign.msprobe import names as api
from astray.records import Kind, Phase, Role, Statistics
from astray.wording import numeral

Direction = Literal["input", "output"]

Floats = npt.NDArray[np.float64]

Array = npt.NDArray[Any]

_NAME = re.compile(r"(?:(\d{1,18})_)?([A-Za-z]+)_(.+)_(forward|backward)_(input|output)(\..+)?")
_MODULE, _OPERATOR = "Module", "Aten"

SAMPLE = 10
"""How many values a sampled line begins with: the first elements of the tensor, in row-major order."""

SUMMARY = 3
"""What follows them: the maximum, the minimum and the mean of the whole tensor."""


class TensorName(NamedTuple):
    """A tensor's name in its parts.

    number: None in the oldest dumps. prefix, function: what was called, such as "Functional" and "linear".
    side: whether the tensor is an input or an output. path: its position there; empty where there is only one.
    """

    number: int | None
    prefix: str
    function: str
    phase: Phase
    side: Direction
    path: str

    @property
    def operator(self) -> str:
        """The function and the pass, which the tensors of one call share: "Functional_linear_forward"."""
        return f"{self.prefix}_{self.function}_{self.phase}"

    @property
    def unnumbered(self) -> str:
        """The name without its number, by which the tensors of two dumps are paired."""
        return f"{self.operator}_{self.side}{'.' * bool(self.path)}{self.path}"

    @property
    def role(self) -> Role:
        """The role in astray's records: what flows into a call is its input, in the backward pass too."""
        return self.side if self.phase == "forward" else "output" if self.side == "input" else "input"


class DumpedTensor(NamedTuple):
    """A tensor of a dump.

    text: its name as written; `name` is the parsed one.
    numbers: reads the numbers that the dump holds of it, flat, in float64. Raises RunError.
    is_sampled: those numbers are its first values, then maximum, minimum and mean of all.
    counts_tensors: the path in its name counts the tensors on its side, so that a single one is number 0.
    """

    name: TensorName
    text: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Callable[[], Floats]
    values: ValueLocation | None = None
    statistics: Statistics | None = None
    note: str | None = None
    is_sampled: bool = False
    counts_tensors: bool = False


class TorchNpuDump(NamedTuple):
    """The tensors of one rank, in order, and its problems. `is_cut`: the end of the dump is missing."""

    tensors: list[DumpedTensor]
    problems: list[str]
    is_cut: bool = False


class FunctionSite(NamedTuple):
    """How astray records a function whose module is not known."""

    kind: Kind
    site: str
    type: str


def parse(text: str) -> TensorName | None:
    """A tensor's name in its parts; None when the text is not such a name.

    >>> parse("3_Functional_linear_forward_output")
    TensorName(number=3, prefix='Functional', function='linear', phase='forward', side='output', path='')
    >>> parse("7_Tensor___getitem___backward_input.0").function
    '__getitem__'
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    number, prefix, function, phase, side, path = match.groups()
    count = None if number is None else int(number)
    return TensorName(count, prefix, function, cast(Phase, phase), cast(Direction, side), (path or ".")[1:])


def site(prefix: str, function: str) -> FunctionSite:
    """The site, kind and type that astray records a function under.

    >>> site("Functional", "linear")
    FunctionSite(kind='function', site='/linear', type='torch.nn.functional.linear')
    """
    if prefix == _MODULE:  # the dump has only the class of a module
        return FunctionSite("module", f"/{function}", function)
    if prefix == _OPERATOR:
        return FunctionSite("op", f"/aten.{function.partition('.')[0]}", f"aten.{function}")
    entry = api.parse(f"{prefix}.{function}.0.forward")
    assert entry is not None, "a prefix of letters and a function make a name"
    return FunctionSite(entry.kind, f"/{entry.path}", entry.type)


def stem(kind: str, type: str, code: str) -> str | None:
    """The beginning of the names of a call's tensors; None for calls that these dumps have no name for.

    code: the line of the call, which distinguishes `x + y` from `x.add(y)`.

    >>> stem("function", "torch.nn.functional.linear", ""), stem("module", "Linear", ""), stem("custom", "dict", "")
    ('Functional_linear', 'Module_Linear', None)
    """
    if kind == "module":
        return f"{_MODULE}_{type}"
    if kind == "op":
        return f"{_OPERATOR}_{type.removeprefix('aten.')}"
    dotted = api.function_stem(type, code) if kind in ("function", "collective") else None
    return None if dotted is None else dotted.replace(".", "_", 1)


def written_path(function: str, role: Role, path: str, phase: Phase) -> tuple[Direction, str]:
    """The side of a tensor and the text of its position there.

    function: the last part of the call's site. role, path: as in astray's records.

    >>> written_path("linear", "output", "out", "forward"), written_path("linear", "input", "out", "backward")
    (('output', ''), ('output', '0'))
    >>> written_path("layer_norm", "input", "kwargs.weight", "forward")
    ('input', '2')
    """
    if path == "out" or path.startswith("out."):
        position = path[4:]
        return "output", position if position or phase != "backward" else "0"
    if path.startswith(api.NODE):  # the run was read from such a dump
        return "input", path[len(api.NODE) :]
    side: Direction = "input" if (role == "input") == (phase != "backward") else "output"
    return side, api.positional(function, path)


def path_order(path: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key for paths: numbers by their value, and before words."""
    parts = ((part, numeral(part)) for part in path.split(".") if part)
    return tuple((1, 0, part) if number is None else (0, number, "") for part, number in parts)
