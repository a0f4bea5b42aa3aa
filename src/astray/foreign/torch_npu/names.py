"""A tensor of a dump of torch_npu.hooks, in either of the two forms, and its name, read and written.

In `16_Functional_relu_backward_input.0` the number counts tensors through the whole file, and says nothing of the call.
The backward pass is named as autograd's nodes see it: `input` are the gradients that a call sends to its inputs,
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

Side = Literal["input", "output"]

Floats = npt.NDArray[np.float64]

Array = npt.NDArray[Any]

_NAME = re.compile(r"(?:(\d{1,18})_)?([A-Za-z]+)_(.+)_(forward|backward)_(input|output)(\..+)?")
_MODULE, _OPERATOR = "Module", "Aten"

NODE = "node."
"""How the path of a gradient begins that is of an autograd node and not known to be of an argument."""

SAMPLE = 10
"""How many values a sampled line begins with: the first of the tensor, in row-major order."""

SUMMARY = 3
"""What follows them: the maximum, the minimum and the mean of the whole tensor."""


class TensorName(NamedTuple):
    """A tensor's name, taken apart.

    number: None in the oldest dumps. prefix, function: what was called: "Functional" and "linear".
    side: on which side of it the tensor is, and path: which of the tensors there; empty where there is one alone.
    """

    number: int | None
    prefix: str
    function: str
    phase: Phase
    side: Side
    path: str

    @property
    def called(self) -> str:
        """What was called, and in which pass: what the tensors of one call share."""
        return f"{self.prefix}_{self.function}_{self.phase}"

    @property
    def unnumbered(self) -> str:
        """The name without its number: what pairs the tensors of two dumps."""
        return f"{self.called}_{self.side}{'.' * bool(self.path)}{self.path}"

    @property
    def role(self) -> Role:
        """The role as astray sees it: what flows into a call is its input, in the backward pass too."""
        return self.side if self.phase == "forward" else "output" if self.side == "input" else "input"


class DumpedTensor(NamedTuple):
    """A tensor as the dump has it.

    text: its name as it is written, `name` the same taken apart. place: where it stands, in words.
    numbers: gives what the dump holds of it, in float64, one after another. Raises RunError.
    is_sampled: that is some of its values, and three numbers that say something of all.
    counts_tensors: the path in its name counts the tensors on its side, of which a lone one is number 0.
    """

    name: TensorName
    text: str
    place: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Callable[[], Floats]
    values: ValueLocation | None = None
    statistics: Statistics | None = None
    note: str | None = None
    is_sampled: bool = False
    counts_tensors: bool = False


class TorchNpuDump(NamedTuple):
    """The tensors of one rank, in order, and what is wrong with it. `is_cut`: its end shows that it was cut short."""

    tensors: list[DumpedTensor]
    problems: list[str]
    is_cut: bool = False


class FunctionSite(NamedTuple):
    """What astray calls a function of which the module is not known."""

    kind: Kind
    site: str
    type: str


def parse(text: str) -> TensorName | None:
    """What a name says; None when it is none.

    >>> parse("3_Functional_linear_forward_output")
    Name(number=3, prefix='Functional', function='linear', phase='forward', side='output', path='')
    >>> parse("7_Tensor___getitem___backward_input.0").function
    '__getitem__'
    """
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    number, prefix, function, phase, side, path = found.groups()
    count = None if number is None else int(number)
    return TensorName(count, prefix, function, cast(Phase, phase), cast(Side, side), (path or ".")[1:])


def site(prefix: str, function: str) -> FunctionSite:
    """What astray calls it.

    >>> site("Functional", "linear")
    Site(kind='function', site='/linear', type='torch.nn.functional.linear')
    """
    if prefix == _MODULE:  # of a module the dump knows the class alone
        return FunctionSite("module", f"/{function}", function)
    if prefix == _OPERATOR:
        return FunctionSite("op", f"/aten.{function.partition('.')[0]}", f"aten.{function}")
    entry = api.parse(f"{prefix}.{function}.0.forward")
    assert entry is not None, "a prefix of letters and a function make a name"
    return FunctionSite(entry.kind, f"/{entry.path}", entry.type)


def stem(kind: str, type: str, code: str) -> str | None:
    """How the names of a call's tensors begin; None when such a call has no name in these dumps.

    code: the line it was called in, which tells `x + y` from `x.add(y)`.

    >>> stem("function", "torch.nn.functional.linear", ""), stem("module", "Linear", ""), stem("custom", "dict", "")
    ('Functional_linear', 'Module_Linear', None)
    """
    if kind == "module":
        return f"{_MODULE}_{type}"
    if kind == "op":
        return f"{_OPERATOR}_{type.removeprefix('aten.')}"
    found = api.function_stem(type, code) if kind in ("function", "collective") else None
    return None if found is None else found.replace(".", "_", 1)


def written_path(function: str, role: Role, path: str, phase: Phase) -> tuple[Side, str]:
    """On which side a tensor is and how its place there is written.

    function: the last part of the call's site. role, path: as astray has them.

    >>> written_path("linear", "output", "out", "forward"), written_path("linear", "input", "out", "backward")
    (('output', ''), ('output', '0'))
    >>> written_path("layer_norm", "input", "kwargs.weight", "forward")
    ('input', '2')
    """
    if path == "out" or path.startswith("out."):
        place = path[4:]
        return "output", place if place or phase != "backward" else "0"
    if path.startswith(NODE):  # as another dump of this kind had it
        return "input", path[len(NODE) :]
    side: Side = "input" if (role == "input") == (phase != "backward") else "output"
    return side, api.positional(function, path)


def order(path: str) -> tuple[tuple[int, int, str], ...]:
    """What sorts paths: numbers by their size, and before words."""
    parts = ((part, numeral(part)) for part in path.split(".") if part)
    return tuple((1, 0, part) if number is None else (0, number, "") for part, number in parts)
