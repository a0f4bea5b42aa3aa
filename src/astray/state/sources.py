"""Where states come from: a model's weights and gradients, an optimizer's states, any mapping, activations.

Without `clone` a state of weights or optimizer states shares memory and follows the training. `zero_grad` drops
gradients, so a state of them keeps those it was made of. Activations are filled in by hooks until `remove()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from astray.errors import StateError
from astray.state.mapping import UNNAMED, Lazy
from astray.state.models import as_torch, reader_of
from astray.state.naming import Pattern, matching, warn
from astray.state.state_dict import StateDict
from astray.wording import counted

if TYPE_CHECKING:
    from typing_extensions import Self


def from_state_dict(
    raw_state_dict: Mapping[str, Any],
    pattern: Pattern | None = None,
    *,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    unwrap: bool = False,
) -> StateDict:
    """A state of any mapping from names to tensors of torch or Paddle, such as `model.state_dict()`: with the buffers.

    >>> astray.state.from_state_dict(model.state_dict())

    pattern: only names that this regular expression matches, from the first character on.
    clone: copy the values; otherwise they are shared, and follow what writes to them.
    device, dtype: where to move them and what to convert them to.
    name: the name of the state in tables.
    unwrap: drop the parts of names that DDP, FSDP and torch.compile add.

    A lazy mapping, such as a checkpoint, stays lazy.
    """
    if isinstance(raw_state_dict, Lazy):
        return _finished(StateDict(raw_state_dict), pattern, clone, device, dtype, name, unwrap)
    others = {}
    tensors: dict[str, torch.Tensor | float] = {}
    for key, value in raw_state_dict.items():
        if isinstance(value, Mapping) and not _is_plain(value):
            raise StateError(f"{key!r} is a mapping itself. Give the one that has the tensors, such as raw[{key!r}].")
        value = as_torch(key, value)
        if isinstance(value, torch.Tensor | float | int):
            tensors[key] = value
        else:
            others[key] = type(value).__name__
    if others:
        listed = ", ".join(f"{key!r} ({kind})" for key, kind in list(others.items())[:4])
        warn(f"{counted(len(others), 'entry')} that are neither tensors nor numbers were left out: {listed}.")
    return _finished(StateDict(tensors), pattern, clone, device, dtype, name or UNNAMED, unwrap)


def _is_plain(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has nothing but numbers and texts, as that of a schedule within an optimizer's has."""
    return bool(value) and all(item is None or isinstance(item, float | int | str) for item in value.values())


def from_weight(
    model: Any,
    pattern: Pattern | None = None,
    *,
    requires_grad: bool = False,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    unwrap: bool = False,
) -> StateDict:
    """The parameters of a model of torch or Paddle, without its buffers; one that is used under several names once.

    >>> weight = astray.state.from_weight(model)
    >>> before = weight.clone()
    >>> optimizer.step()
    >>> update = weight - before

    requires_grad: only the parameters that are trained. Paddle has the statistics of normalisations among the others.
    clone, device, dtype, name, unwrap: as for `from_state_dict`. Without `clone` the state follows the model.
    """
    reader = reader_of(model)
    chosen = {key: each for key, each in reader.parameters(model) if reader.is_trained(each) or not requires_grad}
    wanted = list(chosen) if unwrap else matching(chosen, pattern)
    parameters = {key: reader.tensor(key, chosen[key]) for key in wanted}
    pattern = pattern if unwrap else None  # it is for the names without wrappers
    return _finished(StateDict(parameters), pattern, clone, device, dtype, name or f"{_class(model)}_weights", unwrap)


def from_grad(
    model: Any,
    pattern: Pattern | None = None,
    *,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    unwrap: bool = False,
) -> StateDict:
    """The gradients that a model's parameters have now: call it between `backward()` and `zero_grad()`.

    >>> loss.backward()
    >>> grad = astray.state.from_grad(model, clone=True)

    Parameters without a gradient are left out, and a warning names those that are trained. Zeros in their place would
    look like gradients that vanished. Paddle's `clear_grad()` writes zeros, unless it is told to drop gradients: use
    `clone`.
    """
    reader = reader_of(model)
    trained = {key: reader.gradient(each) for key, each in reader.parameters(model) if reader.is_trained(each)}
    wanted = matching(trained, pattern)
    gradients = {key: reader.tensor(key, grad) for key in wanted if (grad := trained[key]) is not None}
    _warn_of_missing(wanted, gradients)
    return _finished(StateDict(gradients), None, clone, device, dtype, name or f"{_class(model)}_grads", unwrap)


def from_optimizer_state(
    model: Any,
    optimizer: Any,
    optimizer_key: str | None = None,
    pattern: Pattern | None = None,
    *,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    unwrap: bool = False,
) -> StateDict:
    """What an optimizer keeps for each parameter under a key, by the parameter's name in the model.

    >>> m = astray.state.from_optimizer_state(model, optimizer, "exp_avg")  # "moment1" of Paddle's

    Parameters that the optimizer has no state for are left out. The float32 copies that an optimizer of Paddle keeps of
    weights are its "master_weight".
    """
    reader = reader_of(model)
    found = {key: reader.states(optimizer, each) for key, each in reader.parameters(model)}
    states = {key: each for key, each in found.items() if each is not None}
    chosen = {key: each[optimizer_key] for key, each in states.items() if each.get(optimizer_key) is not None}  # type: ignore[index, arg-type]
    if not chosen:
        raise StateError(_no_state(optimizer, reader.has_states(optimizer), states.values(), optimizer_key))
    values = {key: reader.tensor(key, each) for key, each in chosen.items()}
    name = name or f"{_class(model)}_{optimizer_key}"
    return _finished(StateDict(values), pattern, clone, device, dtype, name, unwrap)


def from_together(
    model: Any,
    optimizer: Any,
    optimizer_keys: Sequence[str] | None = None,
    pattern: Pattern | None = None,
    *,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    unwrap: bool = False,
) -> tuple[StateDict, StateDict, list[StateDict]]:
    """Weights, gradients, and the optimizer's states of these keys, at once.

    >>> weight, grad, (m, v) = astray.state.from_together(model, optimizer, ["exp_avg", "exp_avg_sq"])

    After `zero_grad()` there are no gradients: their state is empty then, and a warning says so.
    """
    keys = [optimizer_keys] if isinstance(optimizer_keys, str) else (optimizer_keys or [])
    options: dict[str, Any] = {"clone": clone, "device": device, "dtype": dtype, "unwrap": unwrap}
    states = [from_optimizer_state(model, optimizer, key, pattern, **options) for key in keys]
    return from_weight(model, pattern, **options), from_grad(model, pattern, **options), states


def _finished(
    state: StateDict,
    pattern: Pattern | None,
    clone: bool,
    device: Any,
    dtype: torch.dtype | None,
    name: str | None,
    unwrap: bool,
) -> StateDict:
    """The state with the options that all sources have."""
    if unwrap:
        state = state.unwrap()
    if pattern is not None:
        state = state.filter(pattern)
    if clone:
        state = state.clone(device, dtype)
    elif device is not None or dtype is not None:
        state.to(device, dtype)
    return state if name is None else state.set_name(name)


def _warn_of_missing(wanted: Sequence[str], gradients: Mapping[str, Any]) -> None:
    missing = [key for key in wanted if key not in gradients]
    if not missing:
        return
    if not gradients:
        warn(
            f"None of {counted(len(wanted), 'parameter')} has a gradient: before the first backward(), and after "
            "zero_grad(), there are none. The state of gradients is empty; take it between backward() and zero_grad()."
        )
        return
    listed = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    warn(f"{len(missing)} of {counted(len(wanted), 'parameter')} have no gradient and were left out: {listed}.")


def _no_state(optimizer: Any, has_states: bool, states: Iterable[Mapping[Any, Any]], key: str | None) -> str:
    """Why an optimizer has no state under a key."""
    kind = type(optimizer).__name__
    if not has_states:
        return f"{kind} has no state yet: it has it after the first step()."
    keys = list(dict.fromkeys(str(each) for state in states for each in state))
    if not keys:
        return f"{kind} has states, but for none of this model's parameters. Is it the model that it trains?"
    problem = "Say which state" if key is None else f"{kind} keeps no {key!r} for this model's parameters"
    return f"{problem}: it keeps {', '.join(keys)}."


def _class(model: Any) -> str:
    return type(model).__name__


# -- activations and their gradients -----------------------------------------------------------------------------------


ROOT = "<root>"
"""The key of the model itself, whose own name is empty."""


class Activations(StateDict):
    """The outputs of a model's modules, in the order they were made; empty until the model has run.

    The hooks remain until `remove()`, or the end of a `with`; the recorded values stay after that. Each forward of the
    whole model clears them. A module that it calls several times has each result: `relu`, `relu#1`, `relu#2`.

    root: the key of the model itself.
    """

    _holds = "activations"

    def __init__(self, model: Any, pattern: Pattern | None, clone: bool, name: str | None, root: str = ROOT) -> None:
        super().__init__(name=name or f"{type(model).__name__}_{self._holds}")
        self._clone = clone
        self._calls: dict[str, int] | None = None
        self._reader = reader = reader_of(model)
        modules = {module_name or root: module for module_name, module in reader.modules(model)}
        self._handles = [reader.before_forward(model, self._begin)]
        for module_name in matching(modules, pattern):
            self._handles.append(reader.after_forward(modules[module_name], self._hook_of(module_name)))
        self._handles.append(reader.after_forward(model, self._end, failed=True))

    def remove(self) -> None:
        """Removes the hooks from the model. The recorded values stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, *_: Any) -> None:
        if not self._reader.recomputing():
            self.clear()
            self._calls = {}

    def _end(self, *_: Any) -> None:
        if not self._reader.recomputing():
            self._calls = None

    def _hook_of(self, module_name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            if self._reader.recomputing():  # activation checkpointing runs it again, with the same result
                return
            for path, tensor in tensors_in(self._numbered(module_name), output, self._reader.is_tensor):
                self._record(path, tensor)

        return hook

    def _numbered(self, module_name: str) -> str:
        """The name of this call; calls are counted within a forward of the whole model."""
        if self._calls is None:
            return module_name
        number = self._calls.get(module_name, 0)
        self._calls[module_name] = number + 1
        return f"{module_name}#{number}" if number else module_name

    def _record(self, path: str, tensor: Any) -> None:
        self._keep(path, tensor)

    def _keep(self, path: str, tensor: Any) -> None:
        kept = self._reader.tensor(path, tensor).detach()
        self[path] = kept.clone() if self._clone else kept


class ActivationGradients(Activations):
    """The gradients that arrive at the outputs of a model's modules, in the order of the forward pass."""

    _holds = "activation_grads"

    def __init__(self, model: Any, pattern: Pattern | None, clone: bool, name: str | None, root: str = ROOT) -> None:
        self._order: dict[str, int] = {}
        super().__init__(model, pattern, clone, name, root)

    def clear(self) -> None:
        super().clear()
        self._order = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values, key=self._order.__getitem__))  # they arrive from the last to the first

    def _record(self, path: str, tensor: Any) -> None:
        order = self._order
        order[path] = len(order)

        def arrived(gradient: Any) -> None:
            if order is self._order and self._handles:  # not for an earlier forward, nor after `remove`
                self._keep(path, gradient)

        self._reader.on_gradient(tensor, arrived)


def from_activation(
    model: Any, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> Activations:
    """A state of the outputs of the modules of a model of torch or Paddle, filled by each forward until it is removed.

    >>> with astray.state.from_activation(model) as acts:
    ...     model(batch)
    >>> acts.describe(lw=True)

    Tuples, dicts and dataclasses are taken apart: `encoder.0`, `head.logits`. The model itself is `<root>`.

    pattern: only modules whose names this regular expression matches, from the first character on.
    clone: copy each output at once; otherwise a later operation in place changes the recorded value.
    """
    return Activations(model, pattern, clone, name)


def from_activation_grad(
    model: Any, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> ActivationGradients:
    """A state of the gradients of what `from_activation` records, filled by each backward pass until it is removed.

    >>> with astray.state.from_activation_grad(model) as grads:
    ...     loss(model(batch)).backward()
    >>> grads.norm2(lw=True)
    """
    return ActivationGradients(model, pattern, clone, name)


def tensors_in(path: str, value: Any, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """The tensors in nested containers, each with the path to it."""
    if is_tensor(value):
        yield path, value
        return
    members: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        members = value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        members = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        members = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for key, member in members.items():
        yield from tensors_in(f"{path}.{key}", member, is_tensor)
