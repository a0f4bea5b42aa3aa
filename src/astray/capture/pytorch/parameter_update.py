"""What happens to one parameter in one step of its optimizer: gradient and state in; state, update and weight out.

`optimizer_steps` makes a `ParameterUpdate` for each parameter of a step. Nothing here writes to a tensor of the
program, makes an entry in the optimizer's state, or draws a random number; the one copy it needs, for the update, is
dropped with it. `is_nested_step` and `closure_of` read torch's frame and arguments of an `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from astray.capture.engine import Engine
from astray.capture.pytorch.native.core import _torch
from astray.capture.structure import Flattener
from astray.interrupts import pass_interrupt

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

_FLAT = Flattener(_torch, lambda value: isinstance(value, torch.Tensor) or type(value) in _NUMBERS)
"""Numbers count as tensors: some optimizers keep their `step` as a number, others as a tensor."""

KnownStates = dict[str, list[Any]]
"""The state of each parameter when it was last observed, by the parameter's name."""


class ParameterUpdate:
    """A parameter during a step. Its call has the number `seq`."""

    __slots__ = ("_engine", "_name", "_optimizer", "_seq", "_tensor", "_wanted", "_weight_before")

    def __init__(
        self, engine: Engine, optimizer: Any, tensor: torch.Tensor, name: str, seq: int, wanted: frozenset[str]
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._tensor = tensor
        self._name = name
        self._seq = seq
        self._wanted = wanted
        self._weight_before: torch.Tensor | None = None

    def observe_gradient(self, *, scaled: bool) -> None:
        """The gradient as the optimizer uses it. scaled: a GradScaler may have left unscaling to the optimizer."""
        gradient = self._tensor.grad
        if gradient is None or "gradient" not in self._wanted:
            return
        path = "grad"
        with _without_modes(gradient):
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                self._engine.tensors.observe(self._seq, "input", "grad.indices", gradient.indices())
                path, gradient = "grad.values", gradient.values()
            scale = getattr(self._optimizer, "grad_scale", None) if scaled else None
            if isinstance(scale, torch.Tensor):
                gradient = gradient / scale.to(gradient.device)
        self._engine.tensors.changed(gradient)  # it may have been reduced over ranks, which does not change its version
        self._engine.tensors.observe(self._seq, "input", path, gradient)

    def observe_before(self, known: KnownStates) -> None:
        """The values that the step starts from, besides the gradient."""
        engine, tensor = self._engine, self._tensor
        if self._wanted & {"weight", "update"}:
            # Programs write to weights through `.data`, which does not change their version.
            engine.tensors.changed(tensor)
            engine.tensors.observe(self._seq, "parameter", "weight", tensor)
        if "state" in self._wanted:
            state = _parts(self._optimizer.state.get(tensor))  # get: looking must not make an entry
            if known.get(self._name) != self._identities(state):
                for path, part in state:  # not as the last step that was seen has left it
                    engine.tensors.observe(self._seq, "state", path, _as_tensor(part))
        if "update" in self._wanted:
            if tensor.is_floating_point() or tensor.is_complex():
                with _without_modes(tensor):
                    self._weight_before = tensor.detach().clone()
            else:
                engine.missed(f"the update of {self._name}", f"it holds {tensor.dtype}")

    def observe_after(self, known: KnownStates) -> None:
        """In the order in which they are computed: a wrong state makes a wrong update, and that a wrong weight."""
        engine, tensor = self._engine, self._tensor
        if "state" in self._wanted:
            state = _parts(self._optimizer.state.get(tensor))
            _observe_state(engine, self._seq, state)
            known[self._name] = self._identities(state)
        if self._weight_before is not None:
            with _without_modes(tensor):
                update = difference(tensor.detach(), self._weight_before)
            self._weight_before = None
            engine.tensors.observe(self._seq, "output", "update", update)
        if "weight" in self._wanted:
            engine.tensors.changed(tensor)
            engine.tensors.observe(self._seq, "output", "weight", tensor)

    def _identities(self, state: list[tuple[str, Any]]) -> list[Any]:
        """Keys that are equal as long as the state has not changed, as far as is known without reading it."""
        identities: list[Any] = []
        for path, part in state:
            if isinstance(part, torch.Tensor):
                identity = self._engine.tensors.reader.identity(part)
                part = object() if identity is None else identity.key
            identities.append((path, part))
        return identities


def observe_shared_state(engine: Engine, optimizer: Any, seq: int) -> None:
    """The state that an optimizer keeps under its own keys, for no particular parameter."""
    shared = {key: kept for key, kept in optimizer.state.items() if isinstance(key, str | int)}
    _observe_state(engine, seq, _parts(shared))


def _observe_state(engine: Engine, seq: int, state: list[tuple[str, Any]]) -> None:
    for path, part in state:
        tensor = _as_tensor(part)
        engine.tensors.changed(tensor)  # a write through `.data` does not change its version
        engine.tensors.observe(seq, "output", path, tensor)


def difference(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`after - before`, exact where the two are close in size, otherwise rounded once. Overwrites `before`.

    Weights in half precision are subtracted in float32, since their difference may need more digits than they have.
    """
    if after.dtype.itemsize < 4 and not after.is_complex():
        return after.float() - before.float()
    if type(before) in _PLAIN:
        return torch.sub(after, before, out=before)  # so that it takes no more memory
    return after - before


def _parts(state: Any) -> list[tuple[str, Any]]:
    """The tensors and numbers in a nested state, with their paths: `state.exp_avg`."""
    parts, _ = _FLAT.arguments((), {"state": state})
    return [(path.removeprefix("kwargs."), value) for path, value in parts]


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")
    except (OverflowError, RuntimeError) as error:  # a whole number of more than 64 bits
        pass_interrupt(error)
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _without_modes(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Turns every dispatch mode off for what is computed here: it is not part of the program."""
    if type(tensor) in _PLAIN:
        return torch._C._DisableTorchDispatch()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # a tensor of another class computes by dispatching


def is_nested_step(frame: FrameType, optimizer: Any) -> bool:
    """Whether the step of torch's frame runs inside a step of the same optimizer.

    torch calls its step hooks from one frame at the start and the end of a step. A class of the user's own whose `step`
    calls that of its parent has them called for both, one inside the other, though it is one step.
    """
    return any(
        outer.f_code is frame.f_code and outer.f_locals.get("self") is optimizer for outer in frames(frame.f_back)
    )


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those around it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that computes the gradients inside the step, if there is one; `args` begins with the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
