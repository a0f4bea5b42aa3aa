"""Records calls of torch functions, torch.nn.functional and Tensor methods, however they were imported.

torch calls a TorchFunctionMode before every call of a function, so no function is replaced. What a function calls
inside is not recorded: the mode is off there. A backward pass is started from the edges of the graph
(`backward_roots`), so that the mode stays on in it. Which functions are recorded is in `catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from astray.capture.engine import Engine
from astray.capture.pytorch.calls.call_capture import CallCapture, Mode
from astray.capture.pytorch.calls.catalogue import Catalogue, Function, RandomFunction, UnfilledFunction
from astray.capture.pytorch.calls.collectives import Collective, FunctionalCollective, PendingCollectives
from astray.capture.pytorch.calls.generators import GeneratorStates
from astray.capture.pytorch.calls.sites import FunctionSites
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.gradients import LastNodes, LiveGradients
from astray.capture.pytorch.native.core import OpenCall
from astray.capture.pytorch.tensors import PLAIN

_UNKNOWN, _BACKWARD = object(), object()

_LOOKED_INTO = (torch.Tensor.__rdiv__, torch.Tensor.__rfloordiv__)
"""Functions whose inner calls msprobe records: `1 / x` is a reciprocal and a product there."""


class _TransparentFunction:
    """A function that is not recorded itself; the functions that it calls are."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner


class FunctionMode(Mode, TorchFunctionMode):  # type: ignore[misc]
    """Records every call of a function in the catalogue, for as long as it is on torch's stack of modes."""

    def __init__(
        self,
        engine: Engine,
        gradients: LiveGradients | LastNodes,
        sites: FunctionSites,
        catalogue: Catalogue,
        pending: PendingCollectives,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._sites = sites
        self._catalogue = catalogue
        self._pending = pending
        self._calls = CallCapture(engine, sites, gradients)
        sites.sees_functions = True
        self._known: dict[Any, Any] = dict.fromkeys(BACKWARDS, _BACKWARD)
        self._looked_into = _LOOKED_INTO if isinstance(gradients, LastNodes) else ()
        self.attach("__torch_function__", False, self._calls.native, self._known, Function, pending)

    @never_compiled
    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch calls a native method instead, unless a compiler traces or watches what runs."""
        if is_compiling():
            return func(*args, **(kwargs or {}))
        return self._dispatch(func, args, kwargs)

    def _run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Runs a function that the native method leaves to Python, or that it does not know yet. `frame` calls it."""
        function = self._known.get(func, _UNKNOWN)
        if function is None or not self._engine.listening:
            return func(*args, **kwargs)
        if type(function) is not Function:  # the others are few
            if function is _BACKWARD:
                return self._run_backward(func, args, kwargs)
            if function is _UNKNOWN:
                function = self._known[func] = self._find(func)
            if function is None:
                return func(*args, **kwargs)
            if isinstance(function, _TransparentFunction):
                with self:
                    return function.inner(*args, **kwargs)
            if isinstance(function, UnfilledFunction):
                result = func(*args, **kwargs)
                self._calls.allocated(result, frame)
                return result
        if self._sites.sees_ops and self._sites.is_running(func):
            return func(*args, **kwargs)
        if self._pending:
            self._pending.poll()
        call, args, kwargs = self._calls.begin(function, args, kwargs, frame)
        if call is None:
            return func(*args, **kwargs)
        drawn = GeneratorStates.of(self._engine, call, args, kwargs) if type(function) is RandomFunction else None
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._calls.call_raised(call, error)
            raise
        if drawn is not None:
            drawn.record(self._engine, call)
        result = self._calls.grafted(call, function, result)
        record_outputs = self._record_collective if isinstance(function, Collective) else None
        outputs = self._calls.end(call, function, args, kwargs, result, record_outputs)
        if outputs == [] and function.kind == "function":
            self._known[func] = None  # it only queries a tensor; it is not recorded again
        return result

    def graft(self, grafts: Any) -> None:
        """From now on `grafts`, a `Grafts`, replaces what calls are given and return."""
        self._calls.native.graft(grafts)

    def _find(self, func: Any) -> Any:
        """The entry of a function in the catalogue; None when it is not recorded."""
        if func in self._looked_into and hasattr(
            func, "__wrapped__"
        ):  # else it would call this mode again, without end
            return _TransparentFunction(func.__wrapped__)
        function = self._catalogue.find(func)
        if isinstance(function, FunctionalCollective) and function.unread:
            self._engine.missed(f"the output of {function.type}", function.unread)
        return function

    def _run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Starts a backward pass with this mode on: it runs functions of the program too, such as a checkpoint's."""
        roots = backward_roots(*args, **kwargs)
        if roots is None:
            return func(*args, **kwargs)
        with self:
            return torch.autograd.backward(*roots)

    def _record_collective(
        self, call: OpenCall, collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._pending.returned(call, collective, self._calls.flat, args, kwargs, result)


BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)

Roots = tuple[list[GradientEdge], list[torch.Tensor], bool | None, bool]


def backward_roots(
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *others: Any,
    gradient: Any = None,
    grad_tensors: Any = None,
    **more: Any,
) -> Roots | None:
    """The arguments for `torch.autograd.backward` that have the same effect as those of one of `BACKWARDS`.

    `Tensor.backward` is a torch function itself: while it runs, the mode that was called for it is off, and what the
    backward pass calls would not be recorded. Given edges of the graph instead of tensors, torch calls no mode.

    None for arguments that are left to torch to accept or reject.
    """
    if any(other is not None for other in (*others, *more.values())):  # such as `inputs`
        return None
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = next((each for each in (gradients, gradient, grad_tensors) if each is not None), None)
    arriving = [None] * len(roots) if given is None else [given] if isinstance(given, torch.Tensor) else list(given)
    with torch._C.DisableTorchFunction():
        if len(arriving) != len(roots) or not all(map(_is_plain_root, roots, arriving)):
            return None
        edges = [get_gradient_edge(root) for root in roots]
        filled = [
            torch.ones_like(root, memory_format=torch.preserve_format) if each is None else each
            for root, each in zip(roots, arriving, strict=True)
        ]
    return edges, filled, retain_graph, create_graph


def _is_plain_root(root: Any, gradient: Any) -> bool:
    """Whether torch would accept it: the result of an operation, with one element where no gradient is given."""
    if type(root) not in PLAIN or root.grad_fn is None:
        return False
    if gradient is None:
        return bool(root.numel() == 1 and root.dtype.is_floating_point)
    return type(gradient) in PLAIN and gradient.shape == root.shape
