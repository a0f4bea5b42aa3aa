"""Records what an optimizer does to each parameter: the gradient it was given, its state, the update and the weight.

Each `step()` is a call of the optimizer (`AdamW`, a second one `AdamW#2`, in the order of their first steps), and in it
each parameter is a call at its own site. Inputs are observed immediately before the step, results immediately after it.
Only gradients that Paddle clips are observed inside of it, when that is done: other frameworks clip before the step.

Paddle's optimizers have no hooks, so their methods are replaced while a recording runs, in every class that has one of
its own. Wrappers of fleet step by a method of their own, and are recorded as the optimizer that they wrap.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import Optimizer

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.optimizer_sites import OptimizerSites, inner_optimizer
from astray.capture.paddle.calls.flattening import flattener
from astray.capture.paddle.calls.wrappers import optimizer_wrappers
from astray.capture.paddle.gradients import ParameterCapture
from astray.capture.paddle.native.core import OpenCall, _paddle
from astray.capture.paddle.setup_capture import SetupCapture, groups
from astray.capture.paddle.tensors import parts_of
from astray.capture.paddle.unobserved import Unobserved
from astray.capture.patched_function import PatchedFunction

_METHODS = ("step", "minimize", "_apply_optimize")
"""Each is a step, unless it runs within another. A wrapper that is not known calls the last of them."""

_HANDED_OVER = "append_regularization_ops"
"""What every step calls with its gradients once they are clipped."""

KnownStates = dict[str, list[Any]]
"""The state of each parameter when it was last observed, by the parameter's name."""


class OptimizerCapture:
    """Records the steps of every optimizer that has a parameter of the recorded models, until `remove`.

    everything: also of optimizers that have none, for a program whose models are found as it runs. `stepped` is called
    with each optimizer that has stepped, recorded or not.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: ParameterCapture,
        setup: SetupCapture,
        stepped: Callable[[Any], None],
        *,
        everything: bool,
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._setup = setup
        self._stepped = stepped
        self._everything = everything
        self._flat = flattener()
        self._sites = OptimizerSites(_paddle)
        self._known_states: KnownStates = {}
        self._running: dict[int, _Step | None] = {}  # optimizers that step: a step may call that of its parent class
        self.steps = 0  # how many there were, recorded or not
        self._patched: set[type] = set()
        self._patches: list[PatchedFunction] = []
        self.patch_new_classes()

    def patch_new_classes(self) -> None:
        """Replaces the methods of classes that were defined since the last call."""
        for kind in (*_subclasses(Optimizer), *optimizer_wrappers()):
            if kind not in self._patched:
                self._patched.add(kind)
                for name in (*_METHODS, _HANDED_OVER):
                    if name in vars(kind):
                        wrap = _wrap_handed_over if name == _HANDED_OVER else _wrap
                        self._patches.append(PatchedFunction(kind, name, functools.partial(wrap, self)))

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._patches.clear()
        self._patched.clear()

    def run(self, optimizer: Any, step: Callable[[], Any], frame: FrameType) -> Any:
        """An optimizer steps, or what wraps one."""
        engine, optimizer = self._engine, inner_optimizer(optimizer)
        if id(optimizer) in self._running or not engine.in_own_process:
            return step()
        self._running[id(optimizer)] = recorded = None
        try:
            self._running[id(optimizer)] = recorded = self._before(optimizer, frame)
            result = step()
        except BaseException:
            if recorded is not None:
                engine.leave(recorded.call)
            raise
        finally:
            self._running.pop(id(optimizer), None)
            engine.tensors.forget()  # weights have changed, without raising their versions
        self._after(optimizer, recorded)
        self.steps += 1
        self._stepped(optimizer)
        return result

    def handed_over(self, optimizer: Any, gradients: Any) -> None:
        """A step that runs has clipped these gradients, those of one group, and applies them now."""
        step = self._running.get(id(optimizer))
        if step is None or not step.clips:
            return
        try:
            clipped = {id(parameter): gradient for parameter, gradient in gradients}
            with Unobserved():
                for update in step.updates:
                    if update.parameter_id in clipped:
                        update.observe_gradient(clipped[update.parameter_id])
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"the clipped gradients of {type(optimizer).__name__}", error)

    # -- before and after ----------------------------------------------------------------------------------------

    def _before(self, optimizer: Any, frame: FrameType) -> _Step | None:
        engine = self._engine
        engine.tensors.forget()  # gradients may have been reduced, without raising their versions
        if not engine.listening:
            return None
        kind = type(optimizer).__name__
        try:
            if not self._everything and not self._has_known_parameters(optimizer):
                engine.missed(f"a step of {kind}", "none of its parameters belongs to a recorded model")
                return None
            label = self._sites.label(optimizer)
            self._setup.optimizer(optimizer, label, self._name)
            if not engine.settings.optimizer and "function" not in engine.settings.level:
                return None
            return self._begin(optimizer, label, frame)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"a step of {kind}", error)
            return None

    def _begin(self, optimizer: Any, label: str, frame: FrameType) -> _Step:
        engine, kind = self._engine, type(optimizer).__name__
        wanted = engine.settings.optimizer - {"calls"}
        call = engine.enter(self._sites.of(label, kind), frame, phase="update", micro=0, row=bool(wanted))
        call.runs_inner = False
        step = _Step(call, clips(optimizer), [])
        if not wanted:
            return step
        seq = call.seq
        listed = groups(optimizer)
        texts = [_settings_text(self._flat.arguments((), settings)[1]) for settings, _ in listed]
        if seq != NO_ROW:
            engine.begin(call, f'{{"param_groups":[{",".join(texts)}]}}')
        for number, ((_, parameters), text) in enumerate(zip(listed, texts, strict=True)):
            for index, parameter in enumerate(parameters):
                if parameter.stop_gradient and parameter._grad_ivar() is None:
                    continue  # frozen: no optimizer touches it
                owner = self._parameters.site(parameter)
                name = owner.name if owner is not None else f"{label}/param_groups.{number}.{index}"
                site = self._sites.of(name, kind, owner)
                parent = None if seq == NO_ROW else seq
                row = engine.event(site, "update", parent, stack=call.stack, args=text)
                if row != NO_ROW:
                    step.updates.append(_Update(engine, optimizer, parameter, name, row, wanted))
        with Unobserved():
            for update in step.updates:
                if not step.clips:
                    update.observe_gradient()
                update.observe_before(self._known_states)
        return step

    def _after(self, optimizer: Any, step: _Step | None) -> None:
        if step is None:
            return
        try:
            with Unobserved():
                for update in step.updates:
                    update.observe_after(self._known_states)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"a step of {type(optimizer).__name__}", error)
        finally:
            self._engine.leave(step.call)

    # -- which optimizers and parameters -------------------------------------------------------------------------

    def _name(self, parameter: paddle.Tensor) -> str | None:
        site = self._parameters.site(parameter)
        return None if site is None else site.name

    def _has_known_parameters(self, optimizer: Any) -> bool:
        return any(self._parameters.site(one) is not None for _, several in groups(optimizer) for one in several)


class _Step:
    """A running step. clips: whether it clips the gradients itself."""

    __slots__ = ("call", "clips", "updates")

    def __init__(self, call: OpenCall, clips: bool, updates: list[_Update]) -> None:
        self.call = call
        self.clips = clips
        self.updates = updates


class _Update:
    """What happens to one parameter in a step. Its call has the number `seq`.

    Nothing here writes to a tensor of the program, or draws a random number; the one copy that is needed, for the
    update, is dropped with it.
    """

    __slots__ = ("_before", "_engine", "_name", "_optimizer", "_parameter", "_seen_gradient", "_seq", "_wanted")

    def __init__(
        self, engine: Engine, optimizer: Any, parameter: paddle.Tensor, name: str, seq: int, wanted: frozenset[str]
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._parameter = parameter
        self._name = name
        self._seq = seq
        self._wanted = wanted
        self._before: paddle.Tensor | None = None
        self._seen_gradient = False

    @property
    def parameter_id(self) -> int:
        return id(self._parameter)

    def observe_gradient(self, gradient: paddle.Tensor | None = None) -> None:
        """The gradient that the step applies: this one, or that of the parameter."""
        gradient = self._gradient() if gradient is None else gradient
        if gradient is not None and "gradient" in self._wanted:
            self._seen_gradient = True
            for path, part in parts_of("grad", gradient):
                self._observe("input", path, part)

    def observe_before(self, known: KnownStates) -> None:
        """The other values that the step starts from."""
        parameter = self._parameter
        if self._wanted & {"weight", "update"}:
            self._observe("parameter", "weight", parameter)
        if "state" in self._wanted:
            state = state_of(self._optimizer, parameter)
            if known.get(self._name) != _identities(state):
                for path, tensor in state:  # not as the last step that was seen has left it
                    self._observe("state", path, tensor)
        if "update" in self._wanted and self._gradient() is not None:
            if parameter.is_floating_point() or parameter.is_complex():
                self._before = self._weight().clone()
            else:
                self._engine.missed(f"the update of {self._name}", f"it holds {parameter.dtype}")

    def observe_after(self, known: KnownStates) -> None:
        """In the order in which they are computed: a wrong state makes a wrong update, and that a wrong weight."""
        if not self._seen_gradient:  # the step has clipped nothing after all, as that of LBFGS
            self.observe_gradient()
        if "state" in self._wanted:
            state = state_of(self._optimizer, self._parameter)
            for path, tensor in state:
                self._observe("output", path, tensor)
            known[self._name] = _identities(state)
        if self._before is not None:
            self._observe("output", "update", difference(self._weight(), self._before))
            self._before = None
        if "weight" in self._wanted:
            self._observe("output", "weight", self._parameter)

    def _gradient(self) -> paddle.Tensor | None:
        """What the parameter has accumulated, where the step looks for it: first in what mixed precision keeps."""
        main = getattr(self._parameter, "main_grad", None)
        return self._parameter._grad_ivar() if main is None else main

    def _weight(self) -> paddle.Tensor:
        return self._parameter.detach()

    def _observe(self, role: Any, path: str, tensor: paddle.Tensor) -> None:
        # Sums, reductions and optimizers write without raising versions.
        self._engine.tensors.changed(tensor)
        self._engine.tensors.observe(self._seq, role, path, tensor)


def state_of(optimizer: Any, parameter: paddle.Tensor) -> list[tuple[str, paddle.Tensor]]:
    """The tensors that an optimizer keeps for a parameter: `state.moment1`, `state.master_weight`."""
    found = []
    for name, by_parameter in optimizer._accumulators.items():
        tensor = by_parameter.get(parameter.name)
        if tensor is None:  # kept for its master weight
            master = optimizer._master_weights.get(parameter.name)
            tensor = None if master is None else by_parameter.get(master.name)
        if isinstance(tensor, paddle.Tensor):
            found.append((f"state.{name}", tensor))
    master = optimizer._master_weights.get(parameter.name)
    if isinstance(master, paddle.Tensor):
        found.append(("state.master_weight", master))
    return found


def difference(after: paddle.Tensor, before: paddle.Tensor) -> paddle.Tensor:
    """`after - before`, exact where the two are close in size, otherwise rounded once.

    Weights in half precision are subtracted in float32, since their difference may need more digits than they have.
    """
    if after.element_size() < np.dtype(np.float32).itemsize:
        return after.astype("float32") - before.astype("float32")
    return after - before


def clips(optimizer: Any) -> bool:
    """Whether the optimizer itself clips gradients, all of them or those of a group."""
    listed = optimizer._param_groups or []
    own = [group.get("grad_clip") for group in listed if isinstance(group, dict)]
    return any(clip is not None for clip in (optimizer._grad_clip, *own))


def _identities(state: list[tuple[str, paddle.Tensor]]) -> list[Any]:
    """Keys that are equal as long as the state is made of the same tensors."""
    return [(path, id(tensor)) for path, tensor in state]


def _settings_text(arguments: str) -> str:
    return arguments.removeprefix('{"args":[],"kwargs":').removesuffix("}") if '"kwargs"' in arguments else "{}"


def _subclasses(kind: Any) -> Iterator[type]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


def _wrap(capture: OptimizerCapture, method: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` or `minimize` that is recorded."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return capture.run(self, functools.partial(method, self, *args, **kwargs), sys._getframe(0))

    return wrapper


def _wrap_handed_over(capture: OptimizerCapture, regularise: Callable[..., Any]) -> Callable[..., Any]:
    """The method to which a step hands its gradients, after `capture` has seen them."""

    @functools.wraps(regularise)
    def wrapper(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        capture.handed_over(self, gradients)
        return regularise(self, gradients, *args, **kwargs)

    return wrapper
