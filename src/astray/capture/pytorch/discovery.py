"""Finds the models of a program that knows nothing of astray, and where its steps end.

`ModelDiscovery`: a module that is not attached yet is outermost when it is first called. The first one with parameters
is the model, and its sites carry plain names; any other (a loss, a second network) is named by its class:
`CrossEntropyLoss`, then `CrossEntropyLoss#2`. Trainers such as Lightning's call `training_step` of a model and never
the model itself: what is called in there is named as a part of that model, `net.5`. `FirstCall` waits for the first
call of a module in a child process, which may be a rank.

`StepDetector`, which the adapter uses too: the first optimizer that steps sets the pace. Each of its steps ends a step,
however many forwards came before it (gradient accumulation) or ran inside it (the closure of LBFGS). Where several
optimizers take turns in one iteration, what runs after the first belongs to the next step, in every run alike. A
program without an optimizer is one long step, and its forwards are micro steps; so is one whose optimizer is compiled,
which runs without hooks.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
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
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.process import rank_and_world_size
from astray.records import SKIPPED_UPDATE

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
        self._roots = {label: weakref.ref(module) for label, module in attached.items()}
        self._has_model = "" in self._roots
        self._step_detector = StepDetector(engine, end_step)
        self._handle = register_module_forward_pre_hook(self._before_any_module)
        self._warning_filter = CompileWarningFilter()

    @property
    def has_found(self) -> bool:
        """Whether the program has called a module yet."""
        return bool(self._roots)

    def let_program_end_steps(self) -> None:
        self._step_detector.let_program_end_steps()

    def remove(self) -> None:
        self._handle.remove()
        self._warning_filter.remove()
        self._step_detector.remove()

    @never_compiled
    def _before_any_module(self, module: nn.Module, args: Any) -> None:
        if not is_compiling():
            self.module_called(module, args, sys._getframe(1))

    def module_called(self, module: nn.Module, args: Any, frame: FrameType) -> None:
        """A module is called, from this frame of torch's."""
        if not self._engine.in_own_process:
            if get_worker_info() is None:
                note_fork()
            return
        if self._capture.site(module) is not None:
            return
        try:
            if is_compiled_graph(module, frame):
                return
            label = self._label(module, _name_in_step(frame, module))
            self._roots[label] = weakref.ref(module)
            self._capture.attach(module, label)
            if len(self._roots) == 1:
                self._on_first_module()
            if self._engine.recording:
                # torch has collected the hooks of this call already, so the new one is called here. A global hook is
                # not given the keyword arguments: they are read from torch's frame that calls it.
                self._capture.enter_running_call(module, args, frame.f_locals.get("kwargs") or {}, frame)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the first call of {type(module).__name__}", error)

    def _label(self, module: nn.Module, name_in_step: str | None) -> str:
        """A name that the same module gets again in the next run. Names of modules that have died are reused.

        name_in_step: what it is called in the model of a trainer's step.
        """
        self._has_model = self._has_model or name_in_step is not None
        if name_in_step is None and not self._has_model and has_parameters(module):
            self._has_model = True
            return ""
        name = type_name(module) if name_in_step is None else name_in_step
        for number in range(1, len(self._roots) + 2):
            label = name if number == 1 else f"{name or type_name(module)}#{number}"
            if label not in self._roots or self._roots[label]() is None:
                return label
        return name


def _name_in_step(frame: FrameType | None, module: nn.Module) -> str | None:
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


class StepDetector:
    """Calls `end_step` as steps end, until `remove`.

    A GradScaler that finds infinities skips the optimizer, and torch has no hook there, so its `step` is patched on the
    class: an iteration whose update is skipped ends a step too. So is `scale`, after which gradients may overflow.
    Scalers themselves are not changed.
    """

    def __init__(self, engine: Engine, end_step: Callable[[], None]) -> None:
        self._engine = engine
        self._end_step = end_step
        self._pacing_optimizer: weakref.ref[Any] | None = None
        self._local = threading.local()  # how many steps of any optimizer this thread has seen
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._patches = [PatchedFunction(GradScaler, "step", functools.partial(_wrap_step, self))]
        kinds: list[type] = [GradScaler, *GradScaler.__subclasses__()]
        for kind in kinds:
            if "scale" in vars(kind):
                self._patches.append(PatchedFunction(kind, "scale", functools.partial(_wrap_scale, self)))

    def let_program_end_steps(self) -> None:
        """The program says by itself where steps end."""
        self._end_step = _end_no_step

    def remove(self) -> None:
        self._handle.remove()
        for patch in self._patches:
            patch.remove()
        self._pacing_optimizer = None
        self._end_step = _end_no_step

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

    def scaled(self, scaler: GradScaler) -> None:
        """A loss has been scaled."""
        if self._engine.in_own_process:
            self._engine.scaled = True
            if self._engine.listening:
                note_scaler(self._engine, scaler)

    def skipped(self, optimizer: Any) -> None:
        """An optimizer has skipped its step, because gradients overflowed."""
        if self._engine.in_own_process and self._engine.listening:
            self._engine.note(SKIPPED_UPDATE, {"optimizer": type(optimizer).__name__})
        self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or has skipped its step."""
        if not self._engine.in_own_process:
            return
        if self._pacing_optimizer is None or self._pacing_optimizer() is None:
            self._pacing_optimizer = weakref.ref(optimizer)
        if self._pacing_optimizer() is optimizer:
            self._end_step()  # which guards itself


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
            detector.scaled(self)
        return scale(self, *args, **kwargs)

    return wrapper


def _end_no_step() -> None:
    """Ends no step."""
