"""Activations and their gradients, as they pass: a state that hooks on the model's modules fill.

The hooks are there until `remove()`, or the end of a `with`. What they saw stays after that. A forward of the whole
model begins anew; a module that it calls several times has each result, as `relu`, `relu#1`, `relu#2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from astray.state.naming import Pattern, matching
from astray.state.state_dict import StateDict

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = "<root>"
"""What the model itself is called, whose own name is empty."""


class Activations(StateDict):
    """The outputs of a model's modules, in the order they were made; empty until the model has run.

    root: the key of the model itself.
    """

    _holds = "activations"

    def __init__(
        self, model: nn.Module, pattern: Pattern | None, clone: bool, name: str | None, root: str = ROOT
    ) -> None:
        super().__init__(name=name or f"{type(model).__name__}_{self._holds}")
        self._clone = clone
        self._calls: dict[str, int] | None = None
        modules = {module_name or root: module for module_name, module in model.named_modules()}
        self._handles = [model.register_forward_pre_hook(self._begin)]
        for module_name in matching(modules, pattern):
            self._handles.append(modules[module_name].register_forward_hook(self._seen(module_name)))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Take the hooks off the model. What was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, *_: Any) -> None:
        if not recomputing():
            self.clear()
            self._calls = {}

    def _end(self, *_: Any) -> None:
        if not recomputing():
            self._calls = None

    def _seen(self, module_name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if recomputing():  # activation checkpointing runs it again, and that is nothing new
                return
            for path, tensor in tensors_in(self._numbered(module_name), output):
                self._take(path, tensor)

        return hook

    def _numbered(self, module_name: str) -> str:
        """The name of this call; calls are counted within a forward of the whole model."""
        if self._calls is None:
            return module_name
        number = self._calls.get(module_name, 0)
        self._calls[module_name] = number + 1
        return f"{module_name}#{number}" if number else module_name

    def _take(self, path: str, tensor: torch.Tensor) -> None:
        self[path] = tensor.detach().clone() if self._clone else tensor.detach()


class ActivationGradients(Activations):
    """The gradients that arrive at the outputs of a model's modules, in the order of the forward pass."""

    _holds = "activation_grads"

    def __init__(
        self, model: nn.Module, pattern: Pattern | None, clone: bool, name: str | None, root: str = ROOT
    ) -> None:
        self._order: dict[str, int] = {}
        super().__init__(model, pattern, clone, name, root)

    def clear(self) -> None:
        super().clear()
        self._order = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values, key=self._order.__getitem__))  # they arrive from the last to the first

    def _take(self, path: str, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        order = self._order
        order[path] = len(order)

        def arrived(gradient: torch.Tensor) -> None:
            if order is self._order and self._handles:  # neither of an earlier forward, nor after `remove`
                self[path] = gradient.detach().clone() if self._clone else gradient.detach()

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]


def from_activation(
    model: nn.Module, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> Activations:
    """A state of what the modules of a model give, filled by each forward pass until it is removed.

    >>> with astray.from_activation(model) as acts:
    ...     model(batch)
    >>> acts.describe(lw=True)

    Tuples, dicts and dataclasses are taken apart: `encoder.0`, `head.logits`. The model itself is `<root>`.

    pattern: only modules whose names this regular expression matches, from the first character on.
    clone: copy each output at once; otherwise an operation in place that follows changes what is seen.
    """
    return Activations(model, pattern, clone, name)


def from_activation_grad(
    model: nn.Module, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> ActivationGradients:
    """A state of the gradients of what `from_activation` sees, filled by each backward pass until it is removed.

    >>> with astray.from_activation_grad(model) as grads:
    ...     loss(model(batch)).backward()
    >>> grads.norm2(lw=True)
    """
    return ActivationGradients(model, pattern, clone, name)


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested containers, each with the path to it."""
    if isinstance(value, torch.Tensor):
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
        yield from tensors_in(f"{path}.{key}", member)


def recomputing() -> bool:
    """Whether this forward runs inside of a backward pass."""
    return torch._C._current_graph_task_id() >= 0
