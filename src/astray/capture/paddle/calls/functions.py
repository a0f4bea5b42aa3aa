"""Records calls of Paddle's functions and of the operators of its tensors, however they were imported.

Paddle has nothing like a function mode: its Python functions call those of `paddle._C_ops`, and operators such as `+`
call C++ directly. So both are replaced while functions are recorded, wherever a module has them under a name, and put
back. What a function calls inside is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import paddle
from paddle import _C_ops

from astray.capture.engine import Engine
from astray.capture.nonfinite_values import ObservedTensor
from astray.capture.observer import NO_ROW
from astray.capture.paddle.calls.catalogue import METHODS, OPERATORS, WRITERS, Catalogue, Function
from astray.capture.paddle.calls.flattening import Tensors, flattener
from astray.capture.paddle.gradients import in_backward
from astray.capture.paddle.native.core import OpenCall, _paddle
from astray.capture.paddle.unobserved import is_unobserved
from astray.capture.patched_function import PatchedFunction, put_back, replace
from astray.capture.sites import FunctionSites
from astray.records import Phase

_NOT_PATCHED = ("paddle.base.libpaddle", "paddle._pir_ops")
"""Modules whose functions stay as they are: what Paddle itself is made of, and what static graphs call."""


class FunctionCapture:
    """Records functions while they are replaced, until `remove`."""

    def __init__(self, engine: Engine, gradients: Any) -> None:
        self._engine = engine
        self._gradients = gradients
        self._flat = flattener()
        self._sites = FunctionSites(engine, _paddle)
        self._replaced: list[tuple[Any, str, Any]] = []  # where, under which name, by what
        self._wanted: Catalogue | None = None

    def use(self, catalogue: Catalogue | None) -> None:
        """Records the functions of a catalogue from now on; none without one."""
        self.remove()
        self._wanted = catalogue

    def switch(self, on: bool) -> None:
        """Replaces the functions, or puts them back, for steps that are not recorded."""
        if not on:
            self.remove()
        elif not self._replaced and self._wanted is not None:
            self._replace(self._wanted)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The functions are as they were, inside the block."""
        was_on = bool(self._replaced)
        self.remove()
        try:
            yield
        finally:
            self.switch(was_on)

    def remove(self) -> None:
        """Puts the functions back."""
        for owner, name, ours in self._replaced:
            put_back(owner, name, ours)
        self._replaced.clear()

    def _replace(self, catalogue: Catalogue) -> None:
        wrappers: dict[int, Any] = {}
        for name, original in vars(_C_ops).items():
            if isinstance(original, BuiltinFunctionType) or _is_ours(original):
                function = catalogue.of_op(name)
                if function is not None:
                    wrappers[id(original)] = self._wrap(function, original)
        for path, module in list(sys.modules.items()):  # `_C_ops` says of itself that it is another module
            if isinstance(module, ModuleType) and not path.startswith(_NOT_PATCHED):
                self._replace_in(module, wrappers)
        for name in (*OPERATORS, *METHODS):
            original = vars(paddle.Tensor).get(name)
            function = None if original is None else catalogue.of_method(name)
            if function is not None:
                self._put(paddle.Tensor, name, self._wrap(function, original))

    def _replace_in(self, module: ModuleType, wrappers: dict[int, Any]) -> None:
        for name, value in list(vars(module).items()):
            if id(value) in wrappers:
                self._put(module, name, wrappers[id(value)])

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append((owner, name, ours))
        replace(owner, name, ours)

    def _wrap(self, function: Function, original: Callable[..., Any]) -> Callable[..., Any]:
        run = self._run_unfilled if function.is_unfilled else self._run
        frame, engine = sys._getframe, self._engine

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not engine.listening or is_unobserved():
                return original(*args, **kwargs)
            return run(function, original, args, kwargs, frame(1))

        return _named(wrapper, original)

    def _run_unfilled(
        self, _function: Function, original: Callable[..., Any], args: Any, kwargs: Any, _frame: FrameType
    ) -> Any:
        result = original(*args, **kwargs)
        try:
            for _, tensor in self._flat.result(result):
                self._engine.tensors.allocated(tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("memory that is not filled yet", error)
        return result

    def _run(
        self,
        function: Function,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        call = self._begin(function, args, kwargs, frame)
        if call is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._raised(call, error)
            raise
        self._end(call, function, args, kwargs, result)
        return result

    def _begin(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> OpenCall | None:
        engine = self._engine
        if not engine.in_own_process:
            return None
        try:
            outer = engine.enclosing
            if outer is None and self._sites._is_in_other_recording():
                return None
            is_backward = in_backward()
            site = self._sites.of(outer, function)
            # In the backward pass a function inside a module is a part of a recomputation.
            phase: Phase = "backward" if is_backward else "forward"
            if outer is not None:
                phase = outer.phase
            call = engine.enter(site, frame, phase=phase, recompute=is_backward and outer is not None)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {function.type}", error)
            return None
        try:
            if call.recorded:
                self._observe_inputs(call, function, args, kwargs)
        except Exception as error:  # noqa: BLE001
            engine.failed(f"a call of {function.type}", error)
        return call

    def _observe_inputs(
        self, call: OpenCall, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine = self._engine
        inputs, skeleton = self._flat.arguments(args, kwargs)
        if call.seq != NO_ROW:
            engine.begin(call, skeleton)
            unread = function.not_read(args)
            for path, tensor in inputs:
                if not tensor._is_initialized():  # stands for an argument that this call does not have
                    continue
                is_unread = any(tensor is one for one in unread)
                (engine.tensors.observe_unread if is_unread else engine.tensors.observe)(
                    call.seq, "input", path, tensor
                )
        if call.phase == "forward" and engine.follows_gradients(call) and paddle.is_grad_enabled():
            call.input_edges = self._gradients.edges(inputs)

    def _end(
        self, call: OpenCall, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        engine = self._engine
        try:
            for tensor in function.written(args):
                engine.tensors.written(tensor)
            if call.recorded:
                # A result that this call does not have comes as a tensor without memory.
                outputs = [one for one in self._flat.result(function.result(args, result)) if one[1]._is_initialized()]
                is_bad = False
                if call.seq != NO_ROW:
                    observe = engine.tensors.observe_unread if function.is_view else engine.tensors.observe
                    for path, tensor in outputs:
                        is_bad = bool(observe(call.seq, "output", path, tensor)) or is_bad
                if is_bad:
                    self._on_nonfinite(call, args, kwargs, outputs)
                if call.input_edges is not None:
                    self._gradients.watch(call, call.input_edges, outputs)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {function.type}", error)
        finally:
            call.input_edges = None
            engine.leave(call)

    def _on_nonfinite(self, call: OpenCall, args: Any, kwargs: Any, outputs: Tensors) -> None:
        inputs, skeleton = self._flat.arguments(args, kwargs)
        tensors: list[ObservedTensor] = [("input", *named) for named in inputs]
        tensors += [("output", *named) for named in outputs]
        self._engine.tensors.on_nonfinite(call.seq, tensors, skeleton)

    def _raised(self, call: OpenCall, error: BaseException) -> None:
        if call.recorded and not call.recompute:
            self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
        call.input_edges = None
        self._engine.leave(call)


class WatchedWriters:
    """Forgets what was measured of a tensor that is written to past its version counter, until `remove`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.writes = 0  # how many there were
        present = [name for name in WRITERS if name in vars(paddle.Tensor)]
        self._patches = [PatchedFunction(paddle.Tensor, name, self._wrap) for name in present]

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            self._written((tensor, *args))
            return result

        return _named(wrapper, original)

    def _written(self, given: tuple[Any, ...]) -> None:
        if self._engine.in_own_process:
            self.writes += 1
            for tensor in given:
                if isinstance(tensor, paddle.Tensor):
                    self._engine.tensors.changed(tensor)

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._patches.clear()


def _is_ours(function: Any) -> bool:
    """Whether another recording has put it there."""
    return isinstance(function, FunctionType) and function.__module__ == __name__


def _named(wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """The wrapper under the name of what it calls."""
    return functools.update_wrapper(wrapper, original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
