"""The rows of one step of one rank, as the search for an origin reads them.

Takes the tables of calls and tensors, from the readers of `store` or from memory while a program runs: only the rows of
the step, tensors in the order of observation. Calls and tensors are identified by their row in these tables. Which call
is inside which, and which result made a value, is in `graph`. `function_of` gives functions, ops and modules one name.
"""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.graph import Graph
from astray.records import ROOT, Statistics
from astray.store import Table

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]

NO_ROW = -1

_LEVELS = {"op": 0, "function": 1, "collective": 1, "module": 2}
_OUTERMOST = 3  # parameters, optimizers and values saved by the program: every other call is inside of these
_NO_ELEMENTS = Statistics(None, None, None, None, None, None, 0, 0, 0, 0)


class StepView:
    """One step of one rank: `calls` and `tensors` hold its rows and no others."""

    def __init__(self, calls: Table, tensors: Table) -> None:
        self.calls, self.tensors = calls, tensors
        row_of = {seq: row for row, seq in enumerate(calls.numbers("seq").tolist())}
        self.call_of = [row_of.get(seq, NO_ROW) for seq in tensors.numbers("seq").tolist()]
        self.graph = Graph(calls, tensors, np.array(self.call_of, np.int64))
        self.nan, self.inf = (tensors.numbers(name) for name in ("nan", "inf"))
        self.sizes = tensors.numbers("count")
        self.kinds = _words(calls, "kind")
        self.phases = _words(calls, "phase")
        self.sites = _words(calls, "site")
        self.types = _words(calls, "type")
        self.roles = _words(tensors, "role")
        self.paths = _words(tensors, "path")
        self.micros: list[int] = calls.numbers("micro").tolist()
        self.parents: list[int] = self.graph.parent.tolist()

    @cached_property
    def bad(self) -> list[int]:
        """The tensors that hold NaN or infinity, in the order of observation."""
        known = np.asarray(self.call_of, np.int64) >= 0
        rows: list[int] = np.flatnonzero(((self.nan > 0) | (self.inf > 0)) & known).tolist()
        return rows

    @cached_property
    def rows_of(self) -> dict[int, list[int]]:
        """The tensors of each call."""
        rows_of: dict[int, list[int]] = {}
        for row, call in enumerate(self.call_of):
            rows_of.setdefault(call, []).append(row)
        return rows_of

    @cached_property
    def has_call_gradients(self) -> bool:
        """Whether the backward of any call was recorded; a guard may read the gradients of parameters alone."""
        return any(phase == "backward" and kind in _LEVELS for phase, kind in zip(self.phases, self.kinds, strict=True))

    def is_input(self, row: int) -> bool:
        """Whether the tensor is an input of its call; outputs and gradients are its results."""
        return self.roles[row] in ("input", "parameter", "state")

    def level(self, call: int) -> int:
        """How far out calls of this kind are: ops are inside functions, functions inside modules."""
        return _LEVELS.get(self.kinds[call], _OUTERMOST)

    def is_bad(self, row: int) -> bool:
        """Whether a tensor holds NaN or infinity."""
        return bool(self.nan[row] > 0 or self.inf[row] > 0)

    def value_id(self, row: int) -> int:
        """The same number for all rows that show the same value: the first of them."""
        return int(self.graph.first_seen[row])

    def statistics(self, row: int) -> Statistics:
        """The statistics of a tensor; of one without any, those of an empty tensor."""
        return Statistics.of(self.tensors[list(Statistics._fields)].row(row)) or _NO_ELEMENTS

    def module(self, call: int) -> str:
        """The module whose code a call belongs to: of a function, the part of its site before the slash."""
        site = self.sites[call]
        if self.kinds[call] == "parameter":
            return site.rpartition(".")[0] or ROOT
        return site if self.kinds[call] == "module" else site.rpartition("/")[0]


def _words(table: Table, name: str) -> list[str]:
    return [word or "" for word in table.coded(name).tolist()]


_SYNONYMS = {
    "true_divide": "div",
    "divide": "div",
    "truediv": "div",
    "rtruediv": "rdiv",
    "rdiv": "rdiv",
    "multiply": "mul",
    "rmul": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "radd": "add",
    "bmm": "matmul",
    "mm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "rmatmul": "matmul",
    "addbmm": "matmul",
    "baddbmm": "matmul",
    "addmm": "matmul",
    "linalg_vector_norm": "norm",
    "vector_norm": "norm",
    "safe_softmax": "softmax",
    "to_copy": "to",
    "allreduce": "all_reduce",
    "softmax_backward_data": "softmax",
    "log_softmax_backward_data": "log_softmax",
    "float_power": "pow",
    "rpow": "pow",
    "logsoftmax": "log_softmax",
}


@cache
def function_of(type_: str) -> str:
    """The plain name of what a call's type does: one name, so that one rule fits functions, ops and modules.

    >>> function_of("torch.Tensor.__truediv__"), function_of("aten.div.Tensor")
    ('div', 'div')
    >>> function_of("torch.Tensor.mul_"), function_of("aten._softmax.default"), function_of("Softmax")
    ('mul', 'softmax', 'softmax')
    """
    parts = type_.split(".")
    name = parts[1] if parts[0] in ("aten", "c10d", "_c10d_functional", "prims") and len(parts) > 1 else parts[-1]
    if len(parts) == 1:  # a module's class
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    name = name.strip("_")
    return _SYNONYMS.get(name, name)


def joined(module: str, name: str) -> str:
    """The qualified name of a parameter or buffer of a module.

    >>> joined("h.2.mlp", "weight"), joined("<root>", "scale")
    ('h.2.mlp.weight', 'scale')
    """
    return name if module in ("", ROOT) else f"{module}.{name}"
