"""Which calls are collectives of torch.distributed, which of their tensors may be read, and when.

Used by `functions` and `ops`. A collective fills its outputs in place, without changing their version counters, and
often after the call has returned. Waiting for it here could make two ranks wait for each other, so a pending result is
read later, once the program has waited for it, or not at all; the run says which.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.pytorch.native.core import OpenCall
from astray.capture.structure import Flattener
from astray.records import Kind

Tensors = list[tuple[str, torch.Tensor]]

_MODULE = "torch.distributed.distributed_c10d"


class _Flow(NamedTuple):
    """Which arguments of a collective go in and which come out.

    `root` is the argument that names the one rank whose input counts ("src") or whose output does ("dst"): the other
    ranks give a buffer that may hold anything.
    """

    into: str | None
    out_of: str | None
    root: str | None = None


_FLOWS = {
    "all_reduce": _Flow("tensor", "tensor"),
    "all_reduce_coalesced": _Flow("tensors", "tensors"),
    "reduce": _Flow("tensor", "tensor", "dst"),
    "broadcast": _Flow("tensor", "tensor", "src"),
    "all_gather": _Flow("tensor", "tensor_list"),
    "all_gather_single": _Flow("input_tensor", "output_tensor"),
    "all_gather_into_tensor": _Flow("input_tensor", "output_tensor"),
    "all_gather_coalesced": _Flow("input_tensor_list", "output_tensor_lists"),
    "gather": _Flow("tensor", "gather_list", "dst"),
    "scatter": _Flow("scatter_list", "tensor", "src"),
    "reduce_scatter": _Flow("input_list", "output"),
    "reduce_scatter_single": _Flow("input", "output"),
    "reduce_scatter_tensor": _Flow("input", "output"),
    "all_to_all": _Flow("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": _Flow("input", "output"),
    "send": _Flow("tensor", None),
    "isend": _Flow("tensor", None),
    "recv": _Flow(None, "tensor"),
    "irecv": _Flow(None, "tensor"),
}

_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Newer versions of torch call the first under the name of the second: both have one site."""


class Collective:
    """A function of torch.distributed, as its calls are recorded."""

    kind: Kind = "collective"
    is_only_view = is_plain = makes_buffers = False

    def __init__(self, func: Callable[..., Any], flow: _Flow) -> None:
        self.name = _RENAMED.get(func.__name__, func.__name__)
        self.type = f"torch.distributed.{self.name}"
        self._flow = flow
        self._parameters = tuple(inspect.signature(func).parameters)

    def inputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensors, str]:
        """The tensors that this rank contributes, and the arguments as JSON, with the ranks of the group."""
        given = self._by_name(args, kwargs)
        shown = dict(given)
        shown["group"] = _ranks(given.get("group"))
        if "op" in given:
            shown["op"] = getattr(given["op"], "name", None) or str(given["op"])
        tensors, skeleton = flat.arguments((), shown)
        into = self._flow.into
        if into is None or not _is_member(given) or (self._flow.root == "src" and not _is_root(given, "src")):
            return [], skeleton
        own = f"kwargs.{into}"
        return [(path, tensor) for path, tensor in tensors if path == own or path.startswith(f"{own}.")], skeleton

    def outputs(
        self, flat: Flattener, args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any = None
    ) -> Tensors:
        """The tensors that this rank receives, once they have arrived."""
        given = self._by_name(args, kwargs)
        if self._flow.out_of is None or not _is_member(given):
            return []
        if self._flow.root == "dst" and not _is_root(given, "dst"):
            return []
        return flat.result(given.get(self._flow.out_of))

    def written(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Empty: when it returns its outputs may not be written yet. See `PendingCollectives`."""
        return []

    def not_read(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """It reads all of its inputs."""
        return []

    def is_coalesced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is only queued, to run together with others: there is nothing to wait for yet."""
        group = self._by_name(args, kwargs).get("group")
        return (group if group is not None else dist.group.WORLD) in dist.distributed_c10d._world.pg_coalesce_state

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._parameters, args, strict=False)) | dict(kwargs)


class FunctionalCollective:
    """An operator that starts a collective and returns what will hold its result, or one that waits for it.

    The result may not be read before it has been waited for. It is the output of `wait_tensor`, and, where the program
    leaves the waiting to the first use, an input of that. `unread` says so, for an operator that this is true of.
    """

    _result_from = "wait_tensor"

    is_only_view = is_plain = makes_buffers = False

    def __init__(self, op: OpOverload[..., Any] | OpOverloadPacket[..., Any], kind: Kind = "collective") -> None:
        namespace, name = str(op).split(".")[:2]
        self.kind = kind
        self.type = str(op) if kind == "op" else f"torch.ops.{op}"
        self.name = f"{namespace}.{name}" if kind == "op" else f"functional.{name}"
        self._waits = name == "wait_tensor"
        self._has_inputs = not self._waits and not name.startswith(("_wrap", "irecv", "batch_p2p"))
        gives = not self._waits and not name.startswith(("_wrap", "send", "isend", "barrier"))
        self.unread = f"it is under way when the operator returns; {self._result_from} has it" if gives else None

    def inputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensors, str]:
        tensors, skeleton = flat.arguments(args, kwargs)
        return tensors if self._has_inputs else [], skeleton

    def outputs(self, flat: Flattener, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], result: Any) -> Tensors:
        return flat.result(result) if self._waits else []

    def not_read(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """It reads all of its inputs."""
        return []

    def written(self, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that it writes into, now or later, without changing their version counters."""
        return [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]


class GroupOperator(FunctionalCollective):
    """The operator behind a function of torch.distributed, which DDP calls directly: `c10d.allreduce_`."""

    _result_from = "the function level"

    def __init__(self, op: OpOverload[..., Any]) -> None:
        super().__init__(op, "op")
        # A buffer that is only going to be filled may hold anything.
        unknown_inputs = op._schema.name.partition("::")[2].startswith(("recv", "broadcast", "barrier"))
        arguments = enumerate(op._schema.arguments)
        self._by_name = {
            str(i) for i, argument in arguments if not unknown_inputs and not argument.name.startswith("output")
        }

    def inputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensors, str]:
        tensors, skeleton = flat.arguments(args, kwargs)
        return [(path, tensor) for path, tensor in tensors if path.partition(".")[0] in self._by_name], skeleton


def describe(func: Any) -> Collective | FunctionalCollective | None:
    """The collective that a function mode is called for; None for any other function."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return FunctionalCollective(func) if _is_functional(func) else None
    if getattr(func, "__module__", None) != _MODULE:
        return None
    flow = _FLOWS.get(getattr(func, "__name__", ""))
    return None if flow is None else Collective(func, flow)


def describe_op(op: OpOverload[..., Any]) -> FunctionalCollective | None:
    """The same for a dispatch mode, to which every collective is an operator."""
    if op.namespace == "c10d":
        return GroupOperator(op)
    return FunctionalCollective(op, "op") if _is_functional(op) else None


def _is_functional(op: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> bool:
    return "c10d_functional" in str(op).partition(".")[0]


def unseen_collectives() -> list[str]:
    """The collectives that this version of torch runs without calling a function mode."""
    if not dist.is_available():
        return []
    functions = {name: getattr(dist, name, None) for name in _FLOWS}
    return [name for name, func in functions.items() if func is not None and not _calls_function_modes(func)]


def _calls_function_modes(func: Callable[..., Any]) -> bool:
    names = inspect.unwrap(func).__code__.co_names
    return "has_torch_function" in names or _RENAMED.get(func.__name__) in names


class PendingCollectives:
    """Collectives that have been called and whose outputs have not been recorded yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[tuple[OpenCall, Any, Tensors]] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def returned(
        self, call: OpenCall, collective: Collective, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any],
        result: Any,
    ) -> None:  # fmt: skip
        """A collective has returned: a `Work` to wait for, or another result when it has waited itself."""
        outputs = collective.outputs(flat, args, kwargs)
        for _, tensor in outputs:
            self._engine.tensors.written(tensor)
        if call.seq == NO_ROW or not outputs:
            return
        if collective.is_coalesced(args, kwargs):
            self._engine.missed(f"the output of {call.site.name}", "it is carried out later, together with others")
        elif isinstance(result, dist.Work):
            with self._lock:
                self._waiting.append((call, result, outputs))
        else:
            for path, tensor in outputs:
                self._engine.tensors.observe(call.seq, "output", path, tensor)

    def poll(self) -> None:
        """Records the outputs that have arrived. Called before every function, which could overwrite them."""
        with self._lock:
            pending, self._waiting = self._waiting, []
        for entry in pending:
            call, work, outputs = entry
            try:
                if not work.is_completed():
                    self._waiting.append(entry)
                    continue
                for path, tensor in outputs:
                    self._engine.tensors.changed(tensor)
                    self._engine.tensors.observe(call.seq, "output", path, tensor)
            except Exception as error:  # noqa: BLE001 - it failed, or reading did; the others may be fine
                self._engine.failed(f"the output of {call.site.name}", error)

    def finish(self) -> None:
        """The recording ends: outputs that have not arrived are reported as missed."""
        self.poll()
        with self._lock:
            lost, self._waiting = self._waiting, []
        for call, _, _ in lost:
            self._engine.missed(f"the output of {call.site.name}", "it was still under way when the recording ended")


def _is_member(given: Mapping[str, Any]) -> bool:
    group = given.get("group")
    return group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0


def _is_root(given: Mapping[str, Any], name: str) -> bool:
    """Whether this rank is the one that `src` or `dst` means, by its number in the world or in the group."""
    within = given.get(f"group_{name}")
    if within is not None:
        return bool(dist.get_rank(given.get("group")) == within)
    return bool(dist.get_rank() == (given.get(name) or 0))


def _ranks(group: Any) -> list[int] | None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    return list(dist.get_process_group_ranks(group))
