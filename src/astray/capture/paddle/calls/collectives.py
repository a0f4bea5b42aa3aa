"""Records the collectives of `paddle.distributed`, and what they write.

A collective fills its outputs in place, without raising their versions, and with `sync_op=False` often after the call
has returned: such a pending result is read once the program has waited for it, or not at all; the run says which.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from paddle import distributed

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.paddle.calls.flattening import Tensors, flattener
from astray.capture.paddle.gradients import in_backward
from astray.capture.paddle.native.core import OpenCall, _paddle
from astray.capture.paddle.unobserved import is_unobserved
from astray.capture.patched_function import put_back, replace
from astray.capture.sites import FunctionSites
from astray.records import Kind, Phase


class _Flow(NamedTuple):
    """Which arguments of a collective go in and which come out.

    `root` is the argument that names the one rank whose input counts ("src") or whose output does ("dst").
    """

    into: str | None
    out_of: str | None
    root: str | None = None


_FLOWS = {
    "all_reduce": _Flow("tensor", "tensor"),
    "reduce": _Flow("tensor", "tensor", "dst"),
    "broadcast": _Flow("tensor", "tensor", "src"),
    "all_gather": _Flow("tensor", "tensor_list"),
    "gather": _Flow("tensor", "gather_list", "dst"),
    "scatter": _Flow("tensor_list", "tensor", "src"),
    "reduce_scatter": _Flow("tensor_list", "tensor"),
    "alltoall": _Flow("in_tensor_list", "out_tensor_list"),
    "alltoall_single": _Flow("in_tensor", "out_tensor"),
    "all_to_all": _Flow("in_tensor_list", "out_tensor_list"),
    "send": _Flow("tensor", None),
    "isend": _Flow("tensor", None),
    "recv": _Flow(None, "tensor"),
    "irecv": _Flow(None, "tensor"),
}


class Collective:
    """A function of paddle.distributed, as its calls are recorded."""

    kind: Kind = "collective"

    def __init__(self, name: str, flow: _Flow, function: Callable[..., Any]) -> None:
        self.name = name
        self.type = f"paddle.distributed.{name}"
        self.flow = flow
        self.parameters = tuple(inspect.signature(function).parameters)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.parameters, args, strict=False)) | kwargs


class CollectiveCapture:
    """Replaces the collectives while a recording runs, until `remove`. At every level: they write to tensors."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flat = flattener()
        self._sites = FunctionSites(engine, _paddle)
        self.records = False  # else only what they write is taken note of
        self._waiting: list[tuple[OpenCall, Any, Tensors]] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        wrappers = {}
        for name, flow in _FLOWS.items():
            original = getattr(distributed, name, None)
            if original is not None:
                wrappers[id(original)] = self._wrap(Collective(name, flow, original), original)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if callable(value) and id(value) in wrappers:
                        self._replaced.append((module, name, wrappers[id(value)]))
                        replace(module, name, wrappers[id(value)])

    def remove(self) -> None:
        self.poll()
        for call, _, _ in self._waiting:
            self._engine.missed(f"the output of {call.site.name}", "it was still under way when the recording ended")
        self._waiting.clear()
        for owner, name, ours in self._replaced:
            put_back(owner, name, ours)
        self._replaced.clear()

    def poll(self) -> None:
        """Records the outputs that have arrived."""
        pending, self._waiting = self._waiting, []
        for entry in pending:
            call, task, outputs = entry
            try:
                if not task.is_completed():
                    self._waiting.append(entry)
                    continue
                self._observe(call, outputs)
            except Exception as error:  # noqa: BLE001 - it failed, or reading did; the others may be fine
                self._engine.failed(f"the output of {call.site.name}", error)

    def _wrap(self, collective: Collective, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._engine.in_own_process or is_unobserved():
                return original(*args, **kwargs)
            return self._run(collective, original, args, kwargs, sys._getframe(1))

        return wrapper

    def _run(
        self,
        collective: Collective,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        engine = self._engine
        if self._waiting:
            self.poll()
        call = self._begin(collective, args, kwargs, frame)
        try:
            task = original(*args, **kwargs)
        except BaseException as error:
            if call is not None:
                engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
                engine.leave(call)
            raise
        try:
            outputs = self._outputs(collective, args, kwargs)
            for _, tensor in outputs:
                engine.tensors.changed(tensor)
            if call is not None and call.seq != NO_ROW:
                is_pending = hasattr(task, "is_completed") and not collective.by_name(args, kwargs).get("sync_op", True)
                if is_pending and outputs:
                    self._waiting.append((call, task, outputs))
                else:
                    self._observe(call, outputs)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {collective.type}", error)
        finally:
            if call is not None:
                engine.leave(call)
        return task

    def _begin(
        self, collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> OpenCall | None:
        engine = self._engine
        if not self.records or "function" not in engine.settings.level:
            return None
        try:
            outer = engine.enclosing
            if outer is None and self._sites._is_in_other_recording():
                return None
            phase: Phase = "backward" if in_backward() and outer is None else "forward"
            call = engine.enter(self._sites.of(outer, collective), frame, phase=phase)
            if call.recorded and call.seq != NO_ROW:
                given = collective.by_name(args, kwargs)
                shown = {name: value for name, value in given.items() if name not in ("group", "op")}
                shown["group"] = _ranks(given.get("group"))
                shown["op"] = given.get("op", 0)
                tensors, skeleton = self._flat.arguments((), shown)
                engine.begin(call, skeleton)
                own = f"kwargs.{collective.flow.into}"
                if collective.flow.into is not None and self._counts(collective, given, "src"):
                    for path, tensor in tensors:
                        if path == own or path.startswith(f"{own}."):
                            engine.tensors.changed(tensor)
                            engine.tensors.observe(call.seq, "input", path, tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {collective.type}", error)
            return None
        return call

    def _outputs(self, collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
        """The tensors that this rank receives."""
        given = collective.by_name(args, kwargs)
        if collective.flow.out_of is None or not self._counts(collective, given, "dst"):
            return []
        return self._flat.result(given.get(collective.flow.out_of))

    def _counts(self, collective: Collective, given: dict[str, Any], root: str) -> bool:
        """Whether what this rank gives, or gets, counts."""
        return collective.flow.root != root or distributed.get_rank() == (given.get(root) or 0)

    def _observe(self, call: OpenCall, outputs: Tensors) -> None:
        for path, tensor in outputs:
            self._engine.tensors.changed(tensor)
            self._engine.tensors.observe(call.seq, "output", path, tensor)


def _ranks(group: Any) -> list[int] | None:
    ranks = getattr(group, "ranks", None)
    return list(range(distributed.get_world_size())) if ranks is None else list(ranks)
