"""Records calls of torch functions, torch.nn.functional and Tensor methods, however they were imported.

A TorchFunctionMode is told of every call before it is made, so no function is replaced. Functions that one of them
calls inside are its own business: the mode is off there. Which functions are worth recording is in `catalogue`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from astray.capture.engine import Engine, OpenCall
from astray.capture.pytorch.backward.gradients import InputEdges, LiveGradients
from astray.capture.pytorch.backward.roots import BACKWARDS, backward_roots
from astray.capture.pytorch.calls.catalogue import Catalogue, Function, Unfilled
from astray.capture.pytorch.calls.collectives import Collective, FunctionalCollective, Underway
from astray.capture.pytorch.calls.places import Places
from astray.capture.pytorch.calls.taking import Taking, Tensors
from astray.capture.pytorch.compiled.code import never_compiled

_UNKNOWN, _BACKWARD = object(), object()


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
        self._taking = Taking(engine, places)
        self._known: dict[Any, Any] = dict.fromkeys(BACKWARDS, _BACKWARD)

    @never_compiled
    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        function = self._known.get(func, _UNKNOWN)
        if function is None or not self._engine.listening:
            return func(*args, **kwargs)
        if function is _BACKWARD:
            return self._run_backward(func, args, kwargs)
        if function is _UNKNOWN:
            function = self._known[func] = self._catalogue.find(func)
            if isinstance(function, FunctionalCollective) and function.unread:
                self._engine.missed(f"the output of {function.type}", function.unread)
        if function is None or self._places.is_running(func):
            return func(*args, **kwargs)
        if isinstance(function, Unfilled):
            result = func(*args, **kwargs)
            self._taking.made(result, sys._getframe(1))
            return result
        if self._underway:
            self._underway.look()
        call, inputs = self._taking.begin(function, args, kwargs, sys._getframe(1))
        if call is None:
            return func(*args, **kwargs)
        edges = self._edges(call, inputs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._taking.abandon(call, error)
            raise
        self._taking.end(call, function, self._take, func, edges, args, kwargs, result)
        return result

    def _run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Starts a backward pass with this mode on: it runs functions of the program too, such as a checkpoint's."""
        roots = backward_roots(*args, **kwargs)
        if roots is None:
            return func(*args, **kwargs)
        with self:
            return torch.autograd.backward(*roots)

    def _edges(self, call: OpenCall, inputs: Tensors) -> InputEdges | None:
        """Where the inputs hang in the graph, to be asked before the call can change them."""
        if not call.recorded or call.phase != "forward" or not torch.is_grad_enabled():
            return None
        try:
            with DisableTorchFunction():
                return self._gradients.edges(inputs)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the gradients of {call.site.name}", error)
            return None

    def _take(
        self,
        call: OpenCall,
        function: Function | Collective | FunctionalCollective,
        func: Any,
        edges: InputEdges | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if isinstance(function, Collective):
            self._underway.ended(call, function, self._taking.flat, args, kwargs, result)
            return
        outputs = self._taking.take_outputs(call, function, args, kwargs, result)
        if not outputs and call.site.kind == "function":
            self._known[func] = None  # it tells something about a tensor; not worth recording again
        if edges is not None:
            self._gradients.watch(self._engine, call, edges, outputs)
