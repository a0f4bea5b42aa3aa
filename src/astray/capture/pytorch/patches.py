"""The functions of torch that are replaced while a recording runs, each until `remove` or `stop`.

`CudaGraphReplays` wraps the replay of CUDA graphs, `Clipping` the functions that clip gradients, `LossLabels` those
that compute a loss from labels. `discovery` wraps `GradScaler.step` and `scale` by `PatchedFunction` too, and `hooks`
gives `nn.Module` a `__reduce_ex__`. Every wrapper calls the original with the arguments it was given.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling
from torch.nn import utils
from torch.nn.utils import clip_grad

from astray.capture.clipping import CLIPPING_SETTINGS, ClippingLimits
from astray.capture.engine import Engine
from astray.capture.patched_function import PatchedFunction
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.native.core import Site
from astray.interrupts import pass_interrupt


class CudaGraphReplays:
    """Counts replays of CUDA graphs as missed calls, and forgets what was measured before them, until `stop`.

    A replay is not seen call by call, and writes to memory past every version counter: only what goes into it and
    comes out of it can be recorded, by the modules around it. While the program captures a graph, nothing of ours is
    put into it, and the rows of that time say so.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._original: Any = None

    def start(self) -> None:
        original = self._original = torch.cuda.CUDAGraph.replay
        engine = self._engine

        @functools.wraps(original)
        def replay(graph: torch.cuda.CUDAGraph) -> None:
            original(graph)
            if engine.listening and engine.in_own_process:
                engine.tensors.forget()  # its outputs hold other numbers now, at the same address and version
                engine.missed("calls inside a CUDA graph", "a replay of it runs as a whole")

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        if self._original is not None:
            torch.cuda.CUDAGraph.replay = self._original  # type: ignore[method-assign]
            self._original = None


# -- clipping of gradients -------------------------------------------------------------------------------------------


_CLIP_WITH_NORM = "_clip_grads_with_norm_"
"""What `clip_grad_norm_` calls by its name, however a program has imported that; older versions of torch lack it."""


class Clipping:
    """Notes the limits to which torch's functions clip gradients, until `remove`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = ClippingLimits()
        norm, value = (functools.partial(_wrap_clipping, self, name) for name in CLIPPING_SETTINGS)
        functions = [(clip_grad, _CLIP_WITH_NORM, norm)] if hasattr(clip_grad, _CLIP_WITH_NORM) else [
            (utils, "clip_grad_norm_", norm), (clip_grad, "clip_grad_norm_", norm),
        ]  # fmt: skip
        functions += [(utils, "clip_grad_value_", value), (clip_grad, "clip_grad_value_", value)]
        self._patches = [PatchedFunction(owner, name, wrap) for owner, name, wrap in functions]

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._limits.clear()

    @never_compiled
    def clipped(self, name: str, parameters: Any, limit: Any) -> None:
        """The gradients of one or several parameters are about to be clipped."""
        engine = self._engine
        try:
            if engine.listening and engine.in_own_process:
                several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
                self._limits.note(name, several, limit)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed("what gradients are clipped to", error)

    def of(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """What the gradients of these parameters were clipped to since the last call with them."""
        return self._limits.of(parameters)


def _wrap_clipping(clipping: Clipping, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    """A function that clips, after it has given the limit to `clipping`."""
    signature = inspect.signature(clip)
    parameters, limit, *_ = signature.parameters

    @functools.wraps(clip)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:  # torch raises it itself
            pass_interrupt(error)
            return clip(*args, **kwargs)
        if not isinstance(call.arguments[parameters], torch.Tensor):
            call.arguments[parameters] = list(call.arguments[parameters])  # an iterator can be read only once
        clipping.clipped(name, call.arguments[parameters], call.arguments[limit])
        return clip(*call.args, **call.kwargs)

    return wrapper


# -- labels of losses ------------------------------------------------------------------------------------------------


LABEL_ARGUMENTS = {
    "cross_entropy": "target", "nll_loss": "target", "multi_margin_loss": "target", "multilabel_margin_loss": "target",
    "ctc_loss": "targets",
}  # fmt: skip
"""The losses of torch that take labels, and by which argument."""


class LossLabels:
    """Records the labels of losses computed outside of all modules, where only modules are recorded, until `remove`.

    A loss is mostly a function between the model's call and the backward pass. Labels in another order change the
    gradients of all layers, and hardly one of their statistics. They are integers, so they are either equal or wrong.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sites = {name: Site(f"/{name}", f"torch.nn.functional.{name}", "", "custom") for name in LABEL_ARGUMENTS}
        self._patches = [PatchedFunction(F, name, functools.partial(_wrap_loss, self)) for name in LABEL_ARGUMENTS]

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()

    def record(self, name: str, labels: Any, frame: FrameType | None) -> None:
        """A loss is about to be computed with these labels. `frame` calls it."""
        engine = self._engine
        if not engine.recording or not engine.in_own_process or "function" in engine.settings.level:
            return
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or engine.is_in_module:
            return
        try:
            with DisableTorchFunction(), torch._C._DisableTorchDispatch():  # recording is not part of the program
                call = engine.enter(self._sites[name], frame)
                try:
                    if call.recorded:
                        engine.begin(call, None)
                        engine.tensors.observe(call.seq, "input", LABEL_ARGUMENTS[name], labels)
                finally:
                    engine.leave(call)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the labels of {name}", error)


def _wrap_loss(labels: LossLabels, loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that gives its labels to `labels` before it runs.

    torch.jit.script reads the source of what a wrapper wraps, and looks up its names in the wrapper's own globals. So
    these are the globals of the loss, and what the wrapper itself needs is in its closure.
    """
    name = loss.__name__
    argument = LABEL_ARGUMENTS[name]
    index = list(inspect.signature(loss).parameters).index(argument)
    record, caller, compiling = labels.record, sys._getframe, is_compiling

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not compiling():
            record(name, args[index] if len(args) > index else kwargs.get(argument), caller(1))
        return loss(*args, **kwargs)

    with_globals = FunctionType(wrapper.__code__, loss.__globals__, name, None, wrapper.__closure__)
    return functools.wraps(loss)(with_globals)
