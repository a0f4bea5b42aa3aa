"""Which functions are recorded, and what they are called.

Functions that compute with tensors are recorded, however they were imported; functions that only query a tensor (its
size, its device) or return unfilled memory are not. A user's list narrows or widens this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import resolve_name

from astray.capture.function_list import FunctionList, categorise
from astray.capture.pytorch.calls.collectives import Collective, FunctionalCollective, describe
from astray.capture.pytorch.calls.function_names import QUERIES, UNFILLED
from astray.capture.pytorch.calls.generators import may_draw
from astray.capture.structure import Flattener
from astray.records import Kind

_VIEWS = frozenset(
    """
    getitem view view_as reshape flatten unflatten transpose permute movedim moveaxis swapaxes swapdims t adjoint
    unsqueeze squeeze expand expand_as narrow select chunk split unbind tensor_split hsplit vsplit dsplit diagonal
    unfold as_strided ravel
    """.split()  # noqa: SIM905
)
"""They return views of their first argument, or may do so. They do not read it."""

_BUFFER_MAKERS = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
"""Their results are often filled later, by a kernel that does not change the version counter."""

RUNNING_STATISTICS = ("running_mean", "running_var")
"""The arguments of a normalisation that its kernel writes to without changing their version counters."""

_NORMALISATIONS = {
    "torch.nn.functional.batch_norm": 1, "torch.nn.functional.instance_norm": 1, "torch.batch_norm": 3,
    "torch.instance_norm": 3, "torch.native_batch_norm": 3,
}  # fmt: skip
"""Functions with such arguments, and the index of the first."""

NOT_COMPUTING = frozenset({"prim", "prims", "profiler"})
"""Namespaces of ops that compute nothing."""

_WRITTEN_TOO = {"_amp_foreach_non_finite_check_and_unscale_": 1, "_amp_update_scale_": 1}
"""Functions that write to another argument besides the first: its index."""

_FIRST_ARGUMENT = ("input", "tensor", "self")  # what torch calls the first argument, when it is given by name

_NAMESPACES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}


class UnfilledFunction:
    """A function that returns unfilled memory. Its calls are not recorded."""


class Function:
    """A function of torch, as its calls are recorded. `returns_first`: its result is its first argument, changed.

    `running` is the index of the first running statistic of a normalisation among the arguments.
    """

    __slots__ = (
        "in_place", "is_only_view", "is_plain", "is_view", "kind", "makes_buffers", "name", "returns_first", "running",
        "type",
    )  # fmt: skip

    def __init__(self, name: str, type: str) -> None:
        self.name = name
        self.type = type
        self.kind: Kind = "function"
        self.returns_first = name == "setitem"
        self.makes_buffers = is_buffer_maker(name)
        self.is_view = name in _VIEWS
        self.in_place = self.returns_first or (name.endswith("_") and not name.endswith("__")) or _is_augmented(type)
        self.running = _NORMALISATIONS.get(type)
        self.is_plain = not self.is_view and not self.in_place and self.running is None
        self.is_only_view = self.is_view and not self.in_place

    def inputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], str]:
        """The input tensors of a call, with their paths, and the structure of its arguments. `out` is not an input."""
        tensors, skeleton = flat.arguments(args, kwargs)
        if "out" in kwargs:
            tensors = [(path, tensor) for path, tensor in tensors if not path.startswith("kwargs.out")]
        return tensors, skeleton

    def outputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[tuple[str, torch.Tensor]]:
        """The output tensors of a call, or those it has changed when it returns nothing."""
        if self.returns_first:
            return flat.result(args[0])
        return flat.result(self._overwritten(args, kwargs) if result is None and self.in_place else result)

    def not_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call does not read: it only writes into them, or only returns views of them."""
        if self.is_view:
            return [arg for arg in args[:1] if isinstance(arg, torch.Tensor)]
        return self._overwritten(args, kwargs)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors a call writes into."""
        written = self._overwritten(args, kwargs)
        if self.running is not None:
            given = [
                *args[self.running : self.running + len(RUNNING_STATISTICS)],
                *(kwargs.get(name) for name in RUNNING_STATISTICS),
            ]
            written += [arg for arg in given if isinstance(arg, torch.Tensor)]
        return written

    def _overwritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that it overwrites without reading them."""
        written: list[torch.Tensor] = []
        if not self.in_place and "out" not in kwargs:
            return written
        first = args[0] if args else next((kwargs[name] for name in _FIRST_ARGUMENT if name in kwargs), None)
        second = _WRITTEN_TOO.get(self.name)
        also = None if second is None or second >= len(args) else args[second]
        for value in (first if self.in_place else None, also, kwargs.get("out")):
            if isinstance(value, torch.Tensor):
                written.append(value)
            elif isinstance(value, list | tuple):  # such as of `torch._foreach_add_`
                written += [item for item in value if isinstance(item, torch.Tensor)]
        return written


class RandomFunction(Function):
    """A function that may draw random numbers: the state of their generator is kept with its tensors."""

    __slots__ = ()


_UNFILLED_FUNCTION = UnfilledFunction()


def is_buffer_maker(name: str) -> bool:
    """Whether the result of a function must be measured again when it is next used."""
    return name in _BUFFER_MAKERS


class Catalogue:
    """Finds the catalogue entry of a function that torch calls; None for a function that is not recorded."""

    def __init__(self, function_list: FunctionList | None) -> None:
        self._function_list = function_list

    def find(self, func: Any) -> Function | Collective | FunctionalCollective | UnfilledFunction | None:
        collective = describe(func)
        if collective is not None:
            wanted = self._function_list is None or self._function_list.wants("distributed", collective.name, True)
            return collective if wanted else None
        raw = getattr(func, "__name__", None)
        if raw is None or raw in ("__get__", "__set__", "__delete__"):
            return None
        full = full_name(func)
        category, name = categorise(full)
        if category == "aten":
            return None  # called by hand, or by what a compiler made: the op level sees it
        if full.startswith("torch.ops.") and full.split(".")[2] in NOT_COMPUTING:
            return None
        last = name.rpartition(".")[2]
        by_default = last not in QUERIES and last not in UNFILLED
        if by_default if self._function_list is None else self._function_list.wants(category, name, by_default):
            return (RandomFunction if may_draw(func) else Function)(short_name(full), full)
        return _UNFILLED_FUNCTION if last in UNFILLED else None


def full_name(func: Any) -> str:
    """`torch.nn.functional.linear`, `torch.Tensor.add`, `torch.ops.mylib.fused.default`."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{func}"
    own = getattr(func, "__name__", type(func).__name__)
    resolved: str | None = resolve_name(func)
    if resolved is None:
        resolved = f"{getattr(func, '__module__', None) or 'torch'}.{own}"
    home, _, name = resolved.rpartition(".")
    if name != own and getattr(_NAMESPACES.get(home), own, None) is func:
        resolved = f"{home}.{own}"  # torch.mm is torch.spmm too; its own name is the one people know
    return resolved.replace("torch.functional.", "torch.").replace("torch._C._VariableFunctions.", "torch.")


def short_name(full: str) -> str:
    """The name in a site: `linear`, `add`, `getitem`; for a custom op `mylib.fused`."""
    if full.startswith("torch.ops."):
        return ".".join(full.split(".")[2:4])
    name = full.rpartition(".")[2]
    return name.strip("_") if name.startswith("__") and name.endswith("__") else name


def _is_augmented(full: str) -> bool:
    """`x += y` and the like."""
    name = full.rpartition(".")[2]
    return name in {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__iand__",
                    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imod__", "__idiv__"}  # fmt: skip
