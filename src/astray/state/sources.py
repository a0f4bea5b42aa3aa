"""Where states come from: a model's weights and gradients, an optimizer's states, any mapping.

Without `clone` a state of weights or optimizer states shares memory and follows the training. Gradients are let go of
by `zero_grad`, so a state of them keeps those it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from astray.errors import StateError
from astray.state.base import UNNAMED
from astray.state.naming import Pattern, matching
from astray.state.notices import warn
from astray.state.state_dict import StateDict
from astray.state.values import Lazy
from astray.wording import counted


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
    """A state of any mapping from names to tensors, such as `model.state_dict()`: with the buffers.

    >>> astray.from_state_dict(model.state_dict())

    pattern: only names that this regular expression matches, from the first character on.
    clone: copy the values; otherwise they are shared, and follow what writes to them.
    device, dtype: where to move them and what to convert them to.
    name: what tables call the state.
    unwrap: drop what DDP, FSDP and torch.compile put in front of names.

    A lazy mapping, such as a checkpoint, stays lazy.
    """
    if isinstance(raw_state_dict, Lazy):
        return _finished(StateDict(raw_state_dict), pattern, clone, device, dtype, name, unwrap)
    others = {}
    tensors: dict[str, torch.Tensor | float] = {}
    for key, value in raw_state_dict.items():
        if isinstance(value, Mapping):
            raise StateError(f"{key!r} is a mapping itself. Give the one that has the tensors, such as raw[{key!r}].")
        if isinstance(value, torch.Tensor | float | int):
            tensors[key] = value
        else:
            others[key] = type(value).__name__
    if others:
        told = ", ".join(f"{key!r} ({kind})" for key, kind in list(others.items())[:4])
        warn(f"{counted(len(others), 'entry')} that are neither tensors nor numbers were left out: {told}.")
    return _finished(StateDict(tensors), pattern, clone, device, dtype, name or UNNAMED, unwrap)


def from_weight(
    model: nn.Module,
    pattern: Pattern | None = None,
    *,
    requires_grad: bool = False,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    unwrap: bool = False,
) -> StateDict:
    """A model's parameters, without its buffers; one that is used under several names once.

    >>> weight = astray.from_weight(model)
    >>> before = weight.clone()
    >>> optimizer.step()
    >>> update = weight - before

    requires_grad: only the parameters that are trained.
    clone, device, dtype, name, unwrap: as for `from_state_dict`. Without `clone` the state follows the model.
    """
    parameters = {key: value for key, value in _named_parameters(model) if value.requires_grad or not requires_grad}
    return _finished(StateDict(parameters), pattern, clone, device, dtype, name or f"{_class(model)}_weights", unwrap)


def from_grad(
    model: nn.Module,
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
    >>> grad = astray.from_grad(model, clone=True)

    Parameters without a gradient are left out, and a warning tells which, unless they are not trained. Zeros in their
    place would look like gradients that vanished.
    """
    trained = {key: value.grad for key, value in _named_parameters(model) if value.requires_grad}
    wanted = matching(trained, pattern)
    found = {key: grad for key in wanted if (grad := trained[key]) is not None}
    _tell_of_missing(wanted, found)
    # What the pattern leaves out was told above, once.
    return _finished(StateDict(found), None, clone, device, dtype, name or f"{_class(model)}_grads", unwrap)


def from_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
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

    >>> m = astray.from_optimizer_state(model, optimizer, "exp_avg")

    Parameters that the optimizer has no state for are left out.
    """
    states = {key: optimizer.state[value] for key, value in _named_parameters(model) if value in optimizer.state}
    found = {key: state[optimizer_key] for key, state in states.items() if state.get(optimizer_key) is not None}
    if not found:
        raise StateError(_no_state(optimizer, states.values(), optimizer_key))
    name = name or f"{_class(model)}_{optimizer_key}"
    return _finished(StateDict(found), pattern, clone, device, dtype, name, unwrap)


def from_together(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    optimizer_keys: Sequence[str] | None = None,
    pattern: Pattern | None = None,
    *,
    clone: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
    unwrap: bool = False,
) -> tuple[StateDict, StateDict, list[StateDict]]:
    """Weights, gradients, and the optimizer's states of these keys, at once.

    >>> weight, grad, (m, v) = astray.from_together(model, optimizer, ["exp_avg", "exp_avg_sq"])

    After `zero_grad()` there are no gradients: then theirs is an empty state, and a warning says so.
    """
    keys = [optimizer_keys] if isinstance(optimizer_keys, str) else (optimizer_keys or [])
    given: dict[str, Any] = {"clone": clone, "device": device, "dtype": dtype, "unwrap": unwrap}
    states = [from_optimizer_state(model, optimizer, key, pattern, **given) for key in keys]
    return from_weight(model, pattern, **given), from_grad(model, pattern, **given), states


def _finished(
    state: StateDict,
    pattern: Pattern | None,
    clone: bool,
    device: Any,
    dtype: torch.dtype | None,
    name: str | None,
    unwrap: bool,
) -> StateDict:
    """What every source does with what it found."""
    if unwrap:
        state = state.unwrap()
    if pattern is not None:
        state = state.filter(pattern)
    if clone:
        state = state.clone(device, dtype)
    elif device is not None or dtype is not None:
        state.to(device, dtype)
    return state if name is None else state.set_name(name)


def _tell_of_missing(wanted: Sequence[str], found: Mapping[str, Any]) -> None:
    missing = [key for key in wanted if key not in found]
    if not missing:
        return
    if not found:
        warn(
            f"None of {counted(len(wanted), 'parameter')} has a gradient: before the first backward(), and after "
            "zero_grad(), there are none. The state of gradients is empty; take it between backward() and zero_grad()."
        )
        return
    told = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    warn(f"{len(missing)} of {counted(len(wanted), 'parameter')} have no gradient and were left out: {told}.")


def _no_state(optimizer: torch.optim.Optimizer, states: Iterable[Mapping[Any, Any]], key: str | None) -> str:
    """Why there is nothing under a key."""
    kind = type(optimizer).__name__
    if not optimizer.state:
        return f"{kind} has no state yet: it has it after the first step()."
    keys = list(dict.fromkeys(str(each) for state in states for each in state))
    if not keys:
        return f"{kind} has states, but for none of this model's parameters. Is it the model that it trains?"
    asked = "Say which state" if key is None else f"{kind} keeps no {key!r} for this model's parameters"
    return f"{asked}: it keeps {', '.join(keys)}."


def _class(model: nn.Module) -> str:
    return type(model).__name__


def _named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if not isinstance(model, torch.nn.Module):
        raise StateError(
            f"A {type(model).__name__} was given, which has no parameters. Give a torch.nn.Module; "
            "from_state_dict takes a mapping of tensors."
        )
    return model.named_parameters()
