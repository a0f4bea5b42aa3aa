"""Records the ATen operations that everything else is made of, in the forward and the backward pass.

A TorchDispatchMode sees them below autograd, with the tensors they really get. It lets `torch.compile` be: a compiled
region runs as one piece, and the run says so elsewhere.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from astray.capture.engine import NOT_WRITTEN, Engine, OpenCall
from astray.capture.function_list import FunctionList
from astray.capture.pytorch.collectives import FunctionalCollective, describe_op
from astray.capture.pytorch.places import Places
from astray.capture.pytorch.tensors import is_tensor
from astray.capture.structure import Flattener
from astray.record import Kind

_SILENT = frozenset(
    """
    aten.detach aten.alias aten.empty aten.empty_like aten.empty_strided aten.new_empty aten.new_empty_strided
    aten.empty_permuted aten.resize_ aten.set_ aten.is_pinned aten._local_scalar_dense aten.lift_fresh
    aten.is_same_size aten.record_stream aten._has_compatible_shallow_copy_type
    """.split()  # noqa: SIM905 - a list of a hundred quoted words is harder to read
)
"""They compute nothing, or give memory that nobody has filled yet."""

_COLLECTIVES = ("c10d.", "_c10d_functional.")


class Op:
    """An operation, as its calls are recorded. `writes` are the positions of the arguments it changes."""

    __slots__ = ("kind", "name", "returns", "type", "writes")

    def __init__(self, op: OpOverload[..., Any]) -> None:
        self.type = str(op)
        self.name = self.type.rpartition(".")[0]
        self.kind: Kind = "collective" if self.name.startswith(_COLLECTIVES) else "op"
        arguments = op._schema.arguments
        self.writes = [i for i, argument in enumerate(arguments) if _is_written(argument)]
        self.returns = bool(op._schema.returns)

    def inputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], str]:
        """The tensors a call gets, with their paths, and the structure of its arguments."""
        return flat.arguments(args, kwargs)

    def outputs(self, flat: Flattener, args: tuple[Any, ...], result: Any) -> list[tuple[str, torch.Tensor]]:
        """The tensors a call gives, or has changed when it returns nothing."""
        return flat.result(result if self.returns else [args[i] for i in self.writes if i < len(args)])

    def written(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors a call has written into."""
        found: list[torch.Tensor] = []
        for i in self.writes:
            if i < len(args):
                found += [args[i]] if isinstance(args[i], torch.Tensor) else args[i] or []
        return found


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation, for as long as it is on torch's stack of modes."""

    def __init__(self, engine: Engine, places: Places, listed: FunctionList | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine
        self._places = places
        self._listed = listed
        self._flat = Flattener(is_tensor)
        self._known: dict[OpOverload[..., Any], Op | FunctionalCollective | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._engine.listening:
            return func(*args, **kwargs)
        try:
            op = self._known[func]
        except KeyError:
            op = self._known[func] = self._find(func)
        call = None if op is None else self._begin(op, args, kwargs)
        if op is None or call is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if call.recorded and not call.recompute:
                self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
            self._engine.leave(call)
            raise
        self._end(call, op, args, result)
        return result

    def _find(self, func: OpOverload[..., Any]) -> Op | FunctionalCollective | None:
        collective = describe_op(func)
        if collective is not None:
            wanted = self._listed is None or self._listed.wants("distributed", collective.name, True)
            if wanted and collective.unread:
                self._engine.missed(f"the output of {collective.type}", collective.unread)
            return collective if wanted else None
        op = Op(func)
        namespace, _, name = op.name.partition(".")
        by_default = op.name not in _SILENT and namespace not in ("prim", "prims")
        if self._listed is not None and namespace == "aten":
            return op if self._listed.wants(namespace, name, by_default) else None
        return op if by_default else None

    def _begin(self, op: Op | FunctionalCollective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        engine = self._engine
        try:
            with DisableTorchFunction():
                call = self._places.enter(op, sys._getframe(2))
                if call is not None and call.seq != NOT_WRITTEN:
                    inputs, skeleton = op.inputs(self._flat, args, kwargs)
                    engine.begin(call, skeleton)
                    for path, tensor in inputs:
                        engine.observe(call.seq, "input", path, tensor)
                return call
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {op.type}", error)
            return None

    def _end(self, call: OpenCall, op: Op | FunctionalCollective, args: tuple[Any, ...], result: Any) -> None:
        engine = self._engine
        try:
            with DisableTorchFunction():
                if call.seq != NOT_WRITTEN:
                    for tensor in op.written(args, {}):
                        engine.changed(tensor)
                    for path, tensor in op.outputs(self._flat, args, result):
                        engine.observe(call.seq, "output", path, tensor)
                engine.leave(call)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"the result of {op.type}", error)
