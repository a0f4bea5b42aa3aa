"""The functions of Paddle that are watched while a recording runs, at every level, each until `remove`.

`Clipping` notes the limits to which gradients are clipped outside of optimizers, `LossLabels` records the labels of
losses. Every wrapper calls the original with the arguments it was given.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.nn import utils

from astray.capture.clipping import CLIPPING_SETTINGS, ClippingLimits
from astray.capture.engine import Engine
from astray.capture.paddle.native.core import Site
from astray.capture.paddle.unobserved import Unobserved, is_unobserved
from astray.capture.patched_function import put_back, replace

Arguments = dict[str, Any]


class _WatchedFunctions:
    """Functions that are replaced wherever a module has them under a name, by ones that call `before` first."""

    def __init__(self, functions: dict[str, Any], before: Callable[[str, Arguments, FrameType], None]) -> None:
        wrappers = {id(function): _watched(name, function, before) for name, function in functions.items()}
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if id(value) in wrappers:
                        self._replaced.append((module, name, wrappers[id(value)]))
                        replace(module, name, wrappers[id(value)])

    def remove(self) -> None:
        for module, name, ours in self._replaced:
            put_back(module, name, ours)
        self._replaced.clear()


def _watched(
    name: str, function: Callable[..., Any], before: Callable[[str, Arguments, FrameType], None]
) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_unobserved():
            before(name, dict(zip(names, args, strict=False)) | kwargs, sys._getframe(1))
        return function(*args, **kwargs)

    return wrapper


class Clipping:
    """Notes the limits to which Paddle's functions clip gradients, until `remove`. Optimizers say their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = ClippingLimits()
        clip = dict(zip(CLIPPING_SETTINGS, (utils.clip_grad_norm_, utils.clip_grad_value_), strict=True))
        self._functions = _WatchedFunctions(clip, self._clipping)

    def remove(self) -> None:
        self._functions.remove()
        self._limits.clear()

    def of(self, parameters: list[paddle.Tensor]) -> dict[str, Any]:
        """What the gradients of these parameters were clipped to since the last call with them."""
        return self._limits.of(parameters)

    def _clipping(self, name: str, given: Arguments, _frame: FrameType) -> None:
        engine = self._engine
        try:
            if engine.listening and engine.in_own_process:
                parameters, limit = given.get("parameters"), given.get("max_norm", given.get("clip_value"))
                several = [parameters] if isinstance(parameters, paddle.Tensor) else parameters
                if isinstance(several, list | tuple):  # an iterator can be read only once
                    self._limits.note(name, several, limit)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed("what gradients are clipped to", error)


LABEL_ARGUMENTS = {
    "cross_entropy": "label", "nll_loss": "label", "softmax_with_cross_entropy": "label", "multi_margin_loss": "label",
    "ctc_loss": "labels",
}  # fmt: skip
"""The losses of Paddle that take labels, and by which argument."""


class LossLabels:
    """Records the labels of losses computed outside of all layers, where only layers are recorded, until `remove`.

    Labels in another order change the gradients of all layers, and hardly one of their statistics. They are integers,
    so they are either equal or wrong.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        losses = {name: getattr(F, name) for name in LABEL_ARGUMENTS if hasattr(F, name)}
        self._sites = {name: Site(f"/{name}", f"paddle.nn.functional.{name}", "", "custom") for name in losses}
        self._functions = _WatchedFunctions(losses, self._called)

    def remove(self) -> None:
        self._functions.remove()

    def _called(self, name: str, given: Arguments, frame: FrameType) -> None:
        """A loss is about to be computed. `frame` calls it."""
        engine, labels = self._engine, given.get(LABEL_ARGUMENTS[name])
        if not engine.recording or not engine.in_own_process or "function" in engine.settings.level:
            return
        if not isinstance(labels, paddle.Tensor) or labels.is_floating_point() or engine.is_in_module:
            return
        try:
            call = engine.enter(self._sites[name], frame)
            try:
                if call.recorded:
                    engine.begin(call, None)
                    with Unobserved():
                        engine.tensors.observe(call.seq, "input", LABEL_ARGUMENTS[name], labels)
            finally:
                engine.leave(call)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the labels of {name}", error)
