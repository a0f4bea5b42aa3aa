"""Records what an optimizer does to each parameter: the gradient it was given, its state, the update and the weight.

Each `step()` is a call of the optimizer (`AdamW`, a second one `AdamW#2`, in the order of their first steps), and in it
each parameter is a call at its own site. Inputs are observed immediately before the step, after gradients have been
clipped, unscaled or reduced; results immediately after it. Only gradients that a closure computes are observed after
the step.
"""

from __future__ import annotations

import json
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.optimizer_sites import OptimizerSites
from astray.capture.pytorch.calls.modes import Modes
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.gradients import ParameterCapture
from astray.capture.pytorch.native.core import OpenCall, _torch
from astray.capture.pytorch.parameter_update import (
    KnownStates,
    ParameterUpdate,
    closure_of,
    frames,
    is_nested_step,
    observe_shared_state,
)
from astray.capture.pytorch.setup_capture import SetupCapture
from astray.capture.pytorch.tensors import is_tensor
from astray.capture.structure import Flattener

_POST_HOOKS: dict[int, Any] = getattr(torch_optimizer, "_global_optimizer_post_hooks", {})
_INNER_LEVELS = frozenset({"function", "op"})
_NOT_SETTINGS = frozenset({"params", "param_names"})


class _OptimizerStep:
    """A running step.

    An exception may end it without its hook: then its frame is no longer on the stack. A step during which the modes
    are off has no frame here, but a `_SuspendedModes`, which lives as long as the frame.
    """

    def __init__(self, frame: FrameType | None, optimizer: Any, wanted: frozenset[str]) -> None:
        self.frame = frame
        self.thread = threading.get_ident()
        self.optimizer = optimizer
        self.wanted = wanted
        self.call: OpenCall | None = None
        self.parameters: list[ParameterUpdate] = []
        self.has_closure = False  # a closure computes the gradients inside the step
        self.hook: Any = None


class OptimizerCapture:
    """Records the steps of every optimizer that has a parameter of the recorded models, until `remove`.

    everything: also of optimizers that have none, for a program whose models are found as it runs.
    """

    def __init__(
        self, engine: Engine, parameters: ParameterCapture, modes: Modes, setup: SetupCapture, *, everything: bool
    ) -> None:
        self._engine = engine
        self._setup_capture = setup
        self._parameters = parameters
        self._modes = modes
        self._everything = everything
        self._flat = Flattener(_torch, is_tensor)
        self._sites = OptimizerSites(_torch)
        self._known_states: KnownStates = {}
        self._running: list[_OptimizerStep] = []
        self._suspended: dict[int, _OptimizerStep] = {}  # by threads, the step for which the modes are off
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for step in self._running:
            self._release(step)
        self._running = []
        self._resume_abandoned()

    # -- what the hooks do ---------------------------------------------------------------------------------------

    @never_compiled
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        engine.tensors.forget()  # weights will change, those of distributed tensors without changing version counters
        self._note_setup(optimizer)
        if is_compiling() or not (engine.settings.optimizer or self._sees_inner_calls()) or not engine.in_own_process:
            return None
        try:
            with DisableTorchFunction(), torch.no_grad():  # what is done here is not part of the program
                frame = sys._getframe(1)
                self._drop_interrupted(frame)
                self._resume_abandoned()
                if not self._is_wanted(optimizer) or is_nested_step(frame, optimizer):
                    return None
                if self._can_suspend_modes(optimizer, args, kwargs):
                    return self._open_without_modes(optimizer, frame, args, kwargs)
                step = _OptimizerStep(frame, optimizer, engine.settings.optimizer - {"calls"})
                self._running.append(step)
                if optimizer._optimizer_step_pre_hooks:
                    # The optimizer's own hooks run after ours and may change gradients: run after the last of them.
                    step.hook = optimizer.register_step_pre_hook(_AfterOwnHooks(self, step))
                else:
                    self._begin(step, frame, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"a step of {type(optimizer).__name__}", error)
        return None

    def _open_without_modes(
        self, optimizer: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Opens a step during which the modes are off. torch holds what it returns until the step ends."""
        step = _OptimizerStep(None, optimizer, self._engine.settings.optimizer - {"calls"})
        suspended = _SuspendedModes(self, step, args, kwargs)
        try:
            if step.wanted:
                self._running.append(step)
                self._begin(step, frame, args, kwargs)
        except BaseException:  # `suspended` may live long: an exception holds the frames that it passed through
            self.step_ended(step)
            raise
        return suspended

    @never_compiled
    def _after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._engine.tensors.forget()
        if is_compiling() or not self._engine.in_own_process:
            return
        self._resume_modes()
        if not self._running:
            return
        frame, thread = sys._getframe(1), threading.get_ident()
        for step in self._running:
            if step.frame is frame or (step.frame is None and step.thread == thread and step.optimizer is optimizer):
                break
        else:
            return
        self._running.remove(step)
        try:
            with DisableTorchFunction(), torch.no_grad():
                self._end(step)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"a step of {type(optimizer).__name__}", error)
        finally:
            self._release(step)

    def begin_after_hooks(self, step: _OptimizerStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All hooks of the optimizer itself have run."""
        try:
            with DisableTorchFunction(), torch.no_grad():
                self._begin(step, step.frame, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"a step of {type(step.optimizer).__name__}", error)

    def _sees_inner_calls(self) -> bool:
        """Whether functions and ops are recorded: those inside a step get sites under it."""
        return not _INNER_LEVELS.isdisjoint(self._engine.settings.level)

    def _can_suspend_modes(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the modes can be off during a step: calls inside it are not recorded, and all of it is torch's code.
        torch's optimizers make several queries of every parameter, and the function mode would be called for each; ops
        get all parameters at once, and an op mode has them wrapped one by one.
        """
        settings = self._engine.settings
        if not self._sees_inner_calls() or self._records_inner_calls() or settings.scope is not None:
            return False
        if closure_of(args, kwargs) is not None or not _is_torch_optimizer(optimizer):
            return False
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return False
        first = next(iter(_POST_HOOKS.values()), None)  # another's would be called before ours
        return first == self._after and not (dist.is_available() and dist.is_initialized())

    def _records_inner_calls(self) -> bool:
        """Whether the calls that an optimizer makes in its step are recorded."""
        settings = self._engine.settings
        return "calls" in settings.optimizer and "update" in settings.phases

    def _resume_modes(self) -> bool:
        """Resumes the modes; False when no step of this thread has suspended them."""
        thread = threading.get_ident()
        step = self._suspended.get(thread)
        if step is not None:
            self._modes.resume(step)
            self._suspended.pop(thread, None)
        return step is not None

    def suspend(self, step: _OptimizerStep) -> None:
        """Takes the modes off for a step of this thread."""
        self._suspended[step.thread] = step
        self._modes.suspend(step, ops=True)

    def step_ended(self, step: _OptimizerStep) -> None:
        """A step during which the modes were off has ended; usually its post hook has done all of this already."""
        if self._suspended.get(step.thread) is step and threading.get_ident() == step.thread:
            self._resume_modes()
        if step in self._running:
            self._running.remove(step)
            self._release(step)

    def _resume_abandoned(self) -> None:
        """`_resume_modes` for a step of this thread that ended long ago, if there is one."""
        if self._resume_modes():
            why = "an exception ended it and was kept, and with it what keeps the modes off"
            self._engine.missed("functions and ops that were called after a step of an optimizer", why)

    def _drop_interrupted(self, frame: FrameType) -> None:
        """Forgets steps of this thread whose frame is no longer on the stack, with the copies they hold."""
        if self._running:
            running = set(frames(frame))
            thread = threading.get_ident()
            ended = [step for step in self._running if step.thread == thread and step.frame not in running]
            for step in ended:
                self._running.remove(step)
                self._release(step)

    def _release(self, step: _OptimizerStep) -> None:
        if step.call is not None:
            self._engine.leave(step.call)
        step.parameters.clear()
        if step.hook is not None:
            step.hook.remove()

    # -- which optimizers and parameters -------------------------------------------------------------------------

    def _is_wanted(self, optimizer: Any) -> bool:
        """Whether to record this step. An optimizer gets its name at its first step, recorded or not."""
        kind = type(optimizer).__name__
        if not self._everything and not self._has_known_parameters(optimizer):
            if self._engine.listening:
                self._engine.missed(f"a step of {kind}", "none of its parameters belongs to a recorded model")
            return False
        self._sites.label(optimizer)
        if not self._engine.listening:
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._engine.missed(f"a step of {kind}", "it was captured into a CUDA graph")
            return False
        return True

    def _note_setup(self, optimizer: Any) -> None:
        """Notes the settings of an optimizer, in steps that are recorded."""
        engine = self._engine
        if is_compiling() or not engine.listening or not engine.in_own_process:
            return
        try:
            if self._everything or self._has_known_parameters(optimizer):
                with DisableTorchFunction():
                    self._setup_capture.optimizer(optimizer, self._sites.label(optimizer), self._name)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the settings of {type(optimizer).__name__}", error)

    def _name(self, parameter: torch.Tensor) -> str | None:
        site = self._parameters.site(parameter)
        return None if site is None else site.name

    def _has_known_parameters(self, optimizer: Any) -> bool:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(self._parameters.site(parameter) is not None for parameter in parameters)

    # -- one step ------------------------------------------------------------------------------------------------

    def _begin(
        self, step: _OptimizerStep, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine, optimizer, kind = self._engine, step.optimizer, type(step.optimizer).__name__
        label = self._sites.label(optimizer)
        step.has_closure = closure_of(args, kwargs) is not None
        step.call = engine.enter(self._sites.of(label, kind), frame, phase="update", micro=0, row=bool(step.wanted))
        if step.frame is None:
            step.call.frame = None
        step.call.runs_inner = step.has_closure  # what a closure calls is the program's, and not the optimizer's
        if self._sees_inner_calls():
            engine.tensors.forget()  # gradients may have been summed over ranks without changing version counters
        if not step.wanted:
            return
        stack, seq = step.call.stack, step.call.seq
        groups = [self._settings(group) for group in optimizer.param_groups]
        if seq != NO_ROW:
            engine.begin(step.call, f'{{"param_groups":[{",".join(text for _, text in groups)}]}}')
        parent = None if seq == NO_ROW else seq
        for number, (tensors, _) in enumerate(groups):
            for path, tensor in tensors:
                engine.tensors.observe(seq, "input", f"param_groups.{number}.{path}", tensor)
        for number, (group, (_, text)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for index, tensor in enumerate(group["params"]):
                if not tensor.requires_grad and tensor.grad is None:
                    continue  # frozen: no optimizer touches it
                owner = self._parameters.site(tensor)
                name = owner.name if owner is not None else f"{label}/param_groups.{number}.{index}"
                site = self._sites.of(name, kind, owner)
                seq = engine.event(site, "update", parent, stack=stack, args=text)
                if seq != NO_ROW:
                    step.parameters.append(ParameterUpdate(engine, optimizer, tensor, site.name, seq, step.wanted))
        for parameter in step.parameters:
            if not step.has_closure:
                parameter.observe_gradient(scaled=True)
            parameter.observe_before(self._known_states)

    def _settings(self, group: dict[str, Any]) -> tuple[list[tuple[str, torch.Tensor]], str]:
        """The settings of a parameter group: those that are tensors, and all of them as text."""
        given = {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
        tensors, text = self._flat.arguments((), given)
        plain = json.dumps(json.loads(text).get("kwargs", {}), separators=(",", ":"), ensure_ascii=False)
        return [(path.removeprefix("kwargs."), tensor) for path, tensor in tensors], plain

    def _end(self, step: _OptimizerStep) -> None:
        if step.has_closure:
            for parameter in step.parameters:
                parameter.observe_gradient(scaled=False)
        for parameter in step.parameters:
            parameter.observe_after(self._known_states)
        if "state" in step.wanted and step.call is not None:
            observe_shared_state(self._engine, step.optimizer, step.call.seq)


class _SuspendedModes(tuple[Any, ...]):
    """Keeps the modes off for as long as it lives.

    Our hook returns it: the arguments unchanged. torch's frame that called the hook refers to it until the step ends,
    even by an exception.
    """

    def __new__(
        cls, _capture: OptimizerCapture, _step: _OptimizerStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _SuspendedModes:
        return super().__new__(cls, (args, kwargs))

    def __init__(self, capture: OptimizerCapture, step: _OptimizerStep, _args: Any, _kwargs: Any) -> None:
        # Not in `__del__`, which would lose exceptions of the program's signal handlers.
        self._ending = _torch.Finalizer(lambda: capture.step_ended(step))
        capture.suspend(step)


def _is_torch_optimizer(optimizer: Any) -> bool:
    """Whether a step of this optimizer is torch's own code."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and getattr(torch.optim, kind.__name__, None) is kind


class _AfterOwnHooks:
    """Runs after the optimizer's own hooks, for one step."""

    def __init__(self, capture: OptimizerCapture, step: _OptimizerStep) -> None:
        self._capture = capture
        self._step = step

    @never_compiled
    def __call__(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self._capture.begin_after_hooks(self._step, args, kwargs)
