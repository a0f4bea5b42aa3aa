"""Records calls of torch functions, torch.nn.functional and Tensor methods, however they were imported.

A TorchFunctionMode is told of every call before it is made, so no function is replaced. Functions that one of them
calls inside are its own business: the mode is off there. Which functions are worth recording is in `catalogue`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from astray.capture.engine import NOT_WRITTEN, Engine, OpenCall
from astray.capture.pytorch.backward import BACKWARDS, backward_roots
from astray.capture.pytorch.catalogue import Callee, Catalogue, Unfilled
from astray.capture.pytorch.collectives import Collective, FunctionalCollective, Underway, unseen
from astray.capture.pytorch.gradients import InputEdges, LiveGradients
from astray.capture.pytorch.places import Places
from astray.capture.pytorch.tensors import is_tensor
from astray.capture.structure import Flattener

_UNKNOWN = object()


class FunctionMode(TorchFunctionMode):
    """Records every call of a function in the catalogue, for as long as it is on torch's stack of modes."""

    def __init__(
        self, engine: Engine, gradients: LiveGradients, places: Places, catalogue: Catalogue, underway: Underway
    ) -> None:
        super().__init__()
        self._engine = engine
        self._gradients = gradients
        self._places = places
        self._catalogue = catalogue
        self._underway = underway
        for name in unseen():
            engine.missed(f"calls of torch.distributed.{name}", "this torch makes them without telling a mode")
        self._flat = Flattener(is_tensor)
        self._known: dict[Any, Any] = dict.fromkeys(BACKWARDS)

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        function = self._known.get(func, _UNKNOWN)
        if function is None or not self._engine.listening:
            roots = backward_roots(func, *args, **kwargs)
            if roots is None:
                return func(*args, **kwargs)
            with self:  # the backward pass runs functions of the program too, such as those of a checkpoint
                return torch.autograd.backward(*roots)
        if function is _UNKNOWN:
            function = self._known[func] = self._catalogue.find(func)
            if isinstance(function, FunctionalCollective) and function.unread:
                self._engine.missed(f"the output of {function.type}", function.unread)
        if function is None or self._places.is_running(func):
            return func(*args, **kwargs)
        if isinstance(function, Unfilled):
            result = func(*args, **kwargs)
            self._made(result)
            return result
        call, edges = self._begin(function, args, kwargs, sys._getframe(1))
        if call is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._abandon(call, error)
            raise
        self._end(call, function, func, edges, args, kwargs, result)
        return result

    def _begin(
        self, function: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[OpenCall | None, InputEdges | None]:
        engine = self._engine
        try:
            with DisableTorchFunction():
                if self._underway:
                    self._underway.look()
                call = self._places.enter(function, frame)
                if call is None:
                    return None, None
                if not call.recorded:
                    return call, None
                inputs, skeleton = function.inputs(self._flat, args, kwargs)
                if call.seq != NOT_WRITTEN:
                    engine.begin(call, skeleton)
                    engine.observe_inputs(call.seq, inputs, function.not_read(args, kwargs))
                differentiable = torch.is_grad_enabled() and call.phase == "forward"
                return call, self._gradients.edges(inputs) if differentiable else None
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {function.type}", error)
            return None, None

    def _end(
        self,
        call: OpenCall,
        function: Callee,
        func: Any,
        edges: InputEdges | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        engine = self._engine
        try:
            with DisableTorchFunction():
                if call.recorded:
                    self._finish(call, function, func, edges, args, kwargs, result)
                engine.leave(call)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"the result of {function.type}", error)

    def _finish(
        self,
        call: OpenCall,
        function: Callee,
        func: Any,
        edges: InputEdges | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if isinstance(function, Collective):
            self._underway.ended(call, function, self._flat, args, kwargs, result)
            return
        for tensor in function.written(args, kwargs):
            self._engine.written(tensor)
        outputs = function.outputs(self._flat, args, kwargs, result)
        if not outputs and call.site.kind == "function":
            self._known[func] = None  # it tells something about a tensor; nothing to record next time
        for path, tensor in outputs:
            self._engine.observe_unread(call.seq, "output", path, tensor)
            if function.makes_buffers:
                self._engine.changed(tensor)
        if edges is not None:
            self._gradients.watch(self._engine, call, edges, outputs)

    def _made(self, result: Any) -> None:
        try:
            with DisableTorchFunction():
                for _, tensor in self._flat.result(result):
                    self._engine.made(tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("memory that is not filled yet", error)

    def _abandon(self, call: OpenCall, error: BaseException) -> None:
        """The function raised. Checkpointing stops work done again by an exception of its own."""
        if call.recorded and not call.recompute:
            self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
        self._engine.leave(call)
