"""Finds the models of a program that knows nothing of astray, and where its steps end: `step_ends` has the rules.

Paddle has no hook that every layer calls, so `Layer.__call__` is replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import paddle
from paddle import distributed, nn

from astray.capture.children import note_fork
from astray.capture.engine import Engine
from astray.capture.optimizer_sites import inner_optimizer
from astray.capture.paddle.calls.layers import LayerCapture
from astray.capture.paddle.calls.wrappers import has_parameters, is_static, type_name
from astray.capture.paddle.setup_capture import note_scaler
from astray.capture.patched_function import PatchedFunction
from astray.capture.step_ends import ModelNames, PacingOptimizer
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.process import rank_and_world_size


class _CallWatch:
    """Calls `before` with each layer that is called, its arguments and the frame that calls, until `remove`."""

    def __init__(self, before: Callable[[nn.Layer, tuple[Any, ...], dict[str, Any], FrameType], None]) -> None:
        self._patch = PatchedFunction(nn.Layer, "__call__", partial(_wrap_call, before))

    def remove(self) -> None:
        self._patch.remove()


def _wrap_call(before: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        before(self, args, kwargs, sys._getframe(1))
        return call(self, *args, **kwargs)

    return wrapper


class ModelDiscovery:
    """Attaches `capture` to every outermost layer as it is first called.

    `on_first_layer` is called at the first of them: what a program computes before, to make its weights, is not part
    of a step. `attached` are those that are attached already, by their names.
    """

    def __init__(
        self,
        engine: Engine,
        capture: LayerCapture,
        on_first_layer: Callable[[], None],
        attached: Mapping[str, nn.Layer] = MappingProxyType({}),
    ) -> None:
        self._engine = engine
        self._on_first_layer = on_first_layer
        self._capture = capture
        self._names = ModelNames(attached)
        self._is_active = True
        self._watch = _CallWatch(self.layer_called)

    @property
    def has_found(self) -> bool:
        """Whether the program has called a layer yet."""
        return bool(self._names)

    def remove(self) -> None:
        self._is_active = False
        self._watch.remove()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The call of layers is Paddle's own, inside the block."""
        self._watch.remove()
        try:
            yield
        finally:
            if self._is_active:
                self._watch = _CallWatch(self.layer_called)

    def layer_called(self, layer: nn.Layer, _args: Any, _kwargs: Any, _frame: FrameType) -> None:
        """A layer is about to be called: hooks that it gets now are in time for this call."""
        if not self._engine.in_own_process:
            if paddle.io.get_worker_info() is None:
                note_fork()
            return
        if self._capture.site(layer) is not None:
            return
        try:
            label = self._names.add(layer, type_name(layer), partial(has_parameters, layer))
            self._capture.attach(layer, label)
            if len(self._names) == 1:
                self._on_first_layer()
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the first call of {type(layer).__name__}", error)


class FirstCall:
    """Calls `begin` once, at the first call of a layer, with the rank and the number of ranks, or with None.

    Only then is a rank known. Workers of a DataLoader are not ranks, even if they have inherited the environment of
    one. `begin` returns a recorder that has been started, or None.
    """

    def __init__(self, begin: Callable[[tuple[int, int] | None], Any]) -> None:
        self._begin = begin
        self._process = os.getpid()
        self._watch = _CallWatch(self._before_any_layer)

    def _before_any_layer(self, layer: nn.Layer, args: Any, _kwargs: Any, frame: FrameType) -> None:
        if os.getpid() != self._process or paddle.io.get_worker_info() is not None or is_static(layer):
            return
        self._watch.remove()
        try:
            recorder = self._begin(_ranks())
            if recorder is not None:
                recorder.module_called(layer, args, frame)
        except Exception as error:  # noqa: BLE001 - the program must not fail because we did
            pass_interrupt(error)
            logger.warning("This process is not recorded (%s: %s).", type(error).__name__, error)


def _ranks() -> tuple[int, int] | None:
    """Which rank this process is, and of how many; None when it is not a rank."""
    if distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return rank_and_world_size(os.environ) if "PADDLE_TRAINER_ID" in os.environ else None


class StepDetector(PacingOptimizer):
    """Calls `end_step` as steps end, until `remove`.

    A GradScaler that finds infinities skips the optimizer: an iteration whose update is skipped ends a step too. After
    `scale` gradients may overflow. `steps_seen` returns how many steps of optimizers there were.
    """

    def __init__(self, engine: Engine, end_step: Callable[[], None], steps_seen: Callable[[], int]) -> None:
        super().__init__(engine, end_step)
        self.steps_seen = steps_seen
        self.in_scaler = False  # whether a scaler's step runs
        self._patches = []
        for kind in _kinds(paddle.amp.AmpScaler):
            for name, wrap in (("step", _wrap_step), ("minimize", _wrap_step), ("scale", _wrap_scale)):
                if name in vars(kind):
                    self._patches.append(PatchedFunction(kind, name, partial(wrap, self)))

    def remove(self) -> None:
        super().remove()
        for patch in self._patches:
            patch.remove()

    def scales(self, scaler: Any) -> None:
        """A loss is scaled."""
        if self.scaled():
            note_scaler(self._engine, scaler)


def _kinds(kind: Any) -> list[type]:
    return [kind, *(one for child in kind.__subclasses__() for one in _kinds(child))]


def _wrap_step(detector: StepDetector, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's `step` that calls `detector.skipped` when no optimizer has stepped in it."""

    @functools.wraps(scaler_step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if detector.in_scaler:  # the one of its parent class
            return scaler_step(self, optimizer, *args, **kwargs)
        before, detector.in_scaler = detector.steps_seen(), True
        try:
            result = scaler_step(self, optimizer, *args, **kwargs)
        finally:
            detector.in_scaler = False
        if detector.steps_seen() == before:
            detector.skipped(inner_optimizer(optimizer))
        return result

    return step


def _wrap_scale(detector: StepDetector, scale: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's `scale` that calls `detector.scaled` first."""

    @functools.wraps(scale)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enable():
            detector.scales(self)
        return scale(self, *args, **kwargs)

    return wrapper
