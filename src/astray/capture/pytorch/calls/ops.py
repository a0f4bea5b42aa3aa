"""Records the ATen operations that everything else is made of, in the forward and the backward pass.

A TorchDispatchMode sees them below autograd, with the tensors they really get. It does not see into compiled code: a
compiled region runs as a whole, which `compiled/dynamo.py` reports.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from astray.capture.engine import Engine
from astray.capture.function_list import FunctionList
from astray.capture.pytorch.calls.call_capture import CallCapture, Mode
from astray.capture.pytorch.calls.catalogue import NOT_COMPUTING, RUNNING_STATISTICS, UnfilledFunction, is_buffer_maker
from astray.capture.pytorch.calls.collectives import FunctionalCollective, describe_op
from astray.capture.pytorch.calls.sites import FunctionSites
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.tensors import is_tensor
from astray.capture.structure import Flattener
from astray.records import Kind

_NOT_COMPUTING = frozenset(
    """
    aten.detach aten.alias aten.set_ aten.is_pinned aten._local_scalar_dense aten.lift_fresh aten.is_same_size
    aten.record_stream aten._has_compatible_shallow_copy_type
    """.split()  # noqa: SIM905 - a list of quoted words is harder to read
)
"""They compute nothing."""

_UNFILLED = frozenset(
    """
    aten.empty aten.empty_like aten.empty_strided aten.new_empty aten.new_empty_strided aten.empty_permuted aten.resize_
    """.split()  # noqa: SIM905
)
"""They return unfilled memory."""

_WORKSPACES = {"aten.mkldnn_rnn_layer": "out.3", "aten.mkldnn_rnn_layer_backward": "22"}
"""The output that an op leaves for its own backward, in memory that is only partly filled."""


class Op:
    """An operation, as its calls are recorded.

    `writes` are the arguments it says it changes, `fills` those of them that are not inputs, such as `out`. `moves` are
    those it reads, and changes though its schema does not say so.
    """

    __slots__ = (
        "fills", "is_only_view", "is_plain", "is_view", "kind", "makes_buffers", "moves", "name", "returns", "type",
        "workspace", "writes",
    )  # fmt: skip

    def __init__(self, op: OpOverload[..., Any]) -> None:
        self.type = str(op)
        self.name = self.type.rpartition(".")[0]
        self.kind: Kind = "op"
        self.makes_buffers = is_buffer_maker(self.name.removeprefix("aten."))
        arguments = op._schema.arguments
        written = [
            (i, argument)
            for i, argument in enumerate(arguments)
            if argument.alias_info and argument.alias_info.is_write
        ]
        self.is_view = bool(arguments and arguments[0].alias_info and not arguments[0].alias_info.is_write)
        self.writes = [(i, argument.name) for i, argument in written]
        self.fills = tuple(f"kwargs.{argument.name}" for _, argument in written if argument.kwarg_only)
        silent = [
            (i, argument.name)
            for i, argument in enumerate(arguments)
            if not argument.alias_info and argument.name in RUNNING_STATISTICS
        ]
        self.moves = [] if self.name.endswith("backward") else silent
        self.returns = bool(op._schema.returns)
        self.workspace = _WORKSPACES.get(self.name)
        self.is_plain = not self.is_view and not self.writes and not self.moves and self.workspace is None
        self.is_only_view = self.is_view and not self.writes and self.workspace is None and self.returns

    def inputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], str]:
        """The input tensors of a call, with their paths, and the structure of its arguments."""
        tensors, skeleton = flat.arguments(args, kwargs)
        if self.fills or self.workspace:
            tensors = [named for named in tensors if not named[0].startswith(self.fills) and named[0] != self.workspace]
        return tensors, skeleton

    def outputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[tuple[str, torch.Tensor]]:
        """The output tensors of a call, or those it has changed when it returns nothing."""
        tensors = flat.result(result if self.returns else _arguments(self.writes, args, kwargs))
        return [named for named in tensors if named[0] != self.workspace] if self.workspace else tensors

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors a call writes into."""
        return self._tensors(self.writes, args, kwargs) + self._tensors(self.moves, args, kwargs)

    def not_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call does not read: it only writes into them, or only returns views of them."""
        if self.is_view:
            return [arg for arg in args[:1] if is_tensor(arg)]
        return self._tensors(self.writes, args, kwargs)

    def _tensors(
        self, which: list[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for arg in _arguments(which, args, kwargs) if which else ():
            tensors += [arg] if isinstance(arg, torch.Tensor) else arg or []
        return tensors


def _arguments(which: list[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in which]


class OpMode(Mode, TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Records every operation, for as long as it is on torch's stack of modes."""

    def __init__(self, engine: Engine, sites: FunctionSites, function_list: FunctionList | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine
        self._sites = sites
        self._function_list = function_list
        self._calls = CallCapture(engine, sites)
        sites.sees_ops = True
        # By their ids, since torch hashes an operator in Python; each is kept alive, so that its id is not reused.
        self._known: dict[int, tuple[OpOverload[..., Any], Op | FunctionalCollective | UnfilledFunction | None]] = {}
        self.attach("__torch_dispatch__", True, self._calls.native, self._known, Op, None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch should keep dynamo off `__torch_dispatch__`, at two more calls per op. It is already."""
        return False

    @never_compiled
    def __torch_dispatch__(
        self, func: OpOverload[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch calls a native method instead, unless a compiler traces or watches what runs."""
        return self._dispatch(func, args, kwargs)

    def _run(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Runs an op that the native method leaves to Python, or that it does not know yet. `frame` calls it."""
        if not self._engine.listening:
            return self._sites.run(func, args, kwargs)
        known = self._known.get(id(func))
        if known is None:
            known = self._known[id(func)] = (func, self._find(func))
        op = known[1]
        if op is None or isinstance(op, UnfilledFunction):
            result = self._sites.run(func, args, kwargs)
            if op is not None:
                self._calls.allocated(result, frame)
            return result
        call, args, kwargs = self._calls.begin(op, args, kwargs, frame)
        if call is None:
            return self._sites.run(func, args, kwargs)
        try:
            result = self._sites.run(func, args, kwargs)
        except BaseException as error:
            self._calls.call_raised(call, error)
            raise
        result = self._calls.grafted(call, op, result)
        self._calls.end(call, op, args, kwargs, result)
        return result

    def graft(self, grafts: Any) -> None:
        """From now on `grafts`, a `Grafts`, replaces what calls are given and return."""
        self._calls.native.graft(grafts)

    def _find(self, func: OpOverload[..., Any]) -> Op | FunctionalCollective | UnfilledFunction | None:
        collective = describe_op(func)
        if collective is not None:
            wanted = self._function_list is None or self._function_list.wants("distributed", collective.name, True)
            if wanted and collective.unread:
                self._engine.missed(f"the output of {collective.type}", collective.unread)
            return collective if wanted else None
        op = Op(func)
        namespace, _, name = op.name.partition(".")
        wanted = op.name not in _NOT_COMPUTING and op.name not in _UNFILLED and namespace not in NOT_COMPUTING
        if self._function_list is not None and namespace == "aten":
            wanted = self._function_list.wants(namespace, name, wanted)
        if wanted:
            return op
        return UnfilledFunction() if op.name in _UNFILLED else None
