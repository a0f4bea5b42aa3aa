"""Finds the models of a program that knows nothing of astray, and where its steps end: `step_ends` has the rules.

`ModelDiscovery`: a module that is not attached yet is outermost when it is first called. Trainers such as Lightning's
call `training_step` of a model and never the model itself: what is called in there is named as a part of that model,
`net.5`. `FirstCall` waits for the first call of a module in a child process, which may be a rank. A program whose
optimizer is compiled is one long step: it runs without hooks.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import get_worker_info

from astray.capture.children import note_fork
from astray.capture.engine import Engine
from astray.capture.patched_function import PatchedFunction
from astray.capture.pytorch.calls.modules import ModuleCapture
from astray.capture.pytorch.calls.wrappers import chains, has_parameters, type_name
from astray.capture.pytorch.compiled.dynamo import CompileWarningFilter, is_compiled_graph, never_compiled
from astray.capture.pytorch.parameter_update import is_nested_step
from astray.capture.pytorch.setup_capture import note_scaler
from astray.capture.step_ends import ModelNames, PacingOptimizer
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.process import rank_and_world_size

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a model that a trainer calls in place of the model."""


class ModelDiscovery:
    """Attaches `capture` to every outermost module as it is first called, and calls `end_step` as steps end.

    `on_first_module` is called at the first of them: what a program computes before, to make its weights, is not part
    of a step. `attached` are those that are attached already, by their names.
    """

    def __init__(
        self,
        engine: Engine,
        capture: ModuleCapture,
        end_step: Callable[[], None],
        on_first_module: Callable[[], None],
        attached: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self._engine = engine
        self._on_first_module = on_first_module
        self._capture = capture
        self._names = ModelNames(attached)
        self._step_detector = StepDetector(engine, end_step)
        self._handle = register_module_forward_pre_hook(self._before_any_module)  # type: ignore[arg-type]
        self._warning_filter = CompileWarningFilter()

    @property
    def has_found(self) -> bool:
        """Whether the program has called a module yet."""
        return bool(self._names)

    def let_program_end_steps(self) -> None:
        self._step_detector.let_program_end_steps()

    def remove(self) -> None:
        self._handle.remove()
        self._warning_filter.remove()
        self._step_detector.remove()

    @never_compiled
    def _before_any_module(self, module: nn.Module, args: Any) -> tuple[Any, ...] | None:
        return None if is_compiling() else self.module_called(module, args, sys._getframe(1))

    def module_called(self, module: nn.Module, args: Any, frame: FrameType) -> tuple[Any, ...] | None:
        """A module is called, from this frame of torch's. Returns what to call it with instead, if anything."""
        if not self._engine.in_own_process:
            if get_worker_info() is None:
                note_fork()
            return None
        if self._capture.site(module) is not None:
            return None
        try:
            if is_compiled_graph(module, frame):
                return None
            kind, given = type_name(module), name_in_step(frame, module)
            self._capture.attach(module, self._names.add(module, kind, partial(has_parameters, module), given))
            if len(self._names) == 1:
                self._on_first_module()
            if self._engine.recording:
                # torch has collected the hooks of this call already, so the new one is called here. A global hook is
                # not given the keyword arguments: they are read from torch's frame that calls it.
                kwargs = frame.f_locals.get("kwargs") or {}
                instead = self._capture.enter_running_call(module, args, kwargs, frame)
                if instead is not None:
                    kwargs.update(instead[1])  # the dict is of this call's own, and torch goes on to use it
                    return instead[0]
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the first call of {type(module).__name__}", error)
        return None


def name_in_step(frame: FrameType | None, module: nn.Module) -> str | None:
    """What a module is called in the model whose step calls it, empty for that model; None where there is no such step.

    Only the locals of such steps' frames are read: before Python 3.13 reading keeps the frame's objects alive until it
    ends.
    """
    name = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in STEP_METHODS and code.co_argcount:
            model = frame.f_locals.get(code.co_varnames[0])
            if isinstance(model, nn.Module):
                named = (chain.name for chain in chains(model) if any(link is module for link in chain.modules))
                name = next(named, name)
        frame = frame.f_back
    return name


class FirstCall:
    """Calls `begin` once, at the first call of a module, with the rank and the number of ranks, or with None.

    Only then is a rank known: a launcher may pass it as an argument, and torch.distributed knows it once the program
    has set it up. Workers of a DataLoader are not ranks, even if they have inherited the environment of one. `begin`
    returns a recorder that has been started, or None.
    """

    def __init__(self, begin: Callable[[tuple[int, int] | None], Any]) -> None:
        self._begin = begin
        self._process = os.getpid()
        self._warning_filter = CompileWarningFilter()
        self._handle = register_module_forward_pre_hook(self._before_any_module)

    @never_compiled
    def _before_any_module(self, module: nn.Module, args: Any) -> None:
        if is_compiling() or os.getpid() != self._process or torch.utils.data.get_worker_info() is not None:
            return
        frame = sys._getframe(1)
        if is_compiled_graph(module, frame):
            return
        self._handle.remove()
        self._warning_filter.remove()
        try:
            recorder = self._begin(_ranks())
            if recorder is not None:
                recorder.module_called(module, args, frame)
        except Exception as error:  # noqa: BLE001 - the program must not fail because we did
            pass_interrupt(error)
            logger.warning("This process is not recorded (%s: %s).", type(error).__name__, error)


def _ranks() -> tuple[int, int] | None:
    """Which rank this process is, and of how many; None when it is not a rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank_and_world_size(os.environ) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


class StepDetector(PacingOptimizer):
    """Calls `end_step` as steps end, until `remove`.

    A GradScaler that finds infinities skips the optimizer, and torch has no hook there, so its `step` is patched on the
    class: an iteration whose update is skipped ends a step too. So is `scale`, after which gradients may overflow.
    Scalers themselves are not changed.
    """

    def __init__(self, engine: Engine, end_step: Callable[[], None]) -> None:
        super().__init__(engine, end_step)
        self._local = threading.local()  # how many steps of any optimizer this thread has seen
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._patches = [PatchedFunction(GradScaler, "step", partial(_wrap_step, self))]
        kinds: list[type] = [GradScaler, *GradScaler.__subclasses__()]
        for kind in kinds:
            if "scale" in vars(kind):
                self._patches.append(PatchedFunction(kind, "scale", partial(_wrap_scale, self)))

    def remove(self) -> None:
        super().remove()
        self._handle.remove()
        for patch in self._patches:
            patch.remove()

    @property
    def steps_seen(self) -> int:
        return getattr(self._local, "steps_seen", 0)

    @never_compiled
    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        self._local.steps_seen = self.steps_seen + 1
        if not is_nested_step(sys._getframe(1), optimizer):
            self.stepped(optimizer)

    def scales(self, scaler: GradScaler) -> None:
        """A loss is scaled."""
        if self.scaled():
            note_scaler(self._engine, scaler)


def _wrap_step(detector: StepDetector, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step` that calls `detector.skipped` when no optimizer has stepped in it."""

    @functools.wraps(scaler_step)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = detector.steps_seen
        result = scaler_step(self, optimizer, *args, **kwargs)
        if detector.steps_seen == before:
            detector.skipped(getattr(optimizer, "optimizer", optimizer))  # of a wrapper, the one that it wraps
        return result

    return step


def _wrap_scale(detector: StepDetector, scale: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.scale` that calls `detector.scaled` first."""

    @functools.wraps(scale)
    def wrapper(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            detector.scales(self)
        return scale(self, *args, **kwargs)

    return wrapper
