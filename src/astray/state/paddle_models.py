"""Paddle's layers and optimizers, as `models` reads them; their tensors as tensors of torch that share memory.

Nothing is copied: a tensor is handed over by DLPack, bfloat16 too. Paddle's optimizers write in place, and so does
`set_value`, so what was handed over follows the training. `clear_grad()` writes zeros into gradients unless it is told
to drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from astray.capture.optimizer_sites import inner_optimizer
from astray.errors import StateError
from astray.state.models import Handle, is_of_paddle

if TYPE_CHECKING:
    from torch import Tensor

MASTER = "master_weight"
"""The name here of the float32 copy of a weight that `multi_precision` keeps beside the states."""


class PaddleModels:
    """Those of Paddle. The statistics of a normalisation are parameters there that are not trained."""

    def parameters(self, model: Any) -> Iterator[tuple[str, Any]]:
        return iter(model.named_parameters())

    def is_trained(self, parameter: Any) -> bool:
        return not parameter.stop_gradient

    def tensor(self, name: str, value: Any) -> Tensor:
        return shared(name, value)

    def gradient(self, parameter: Any) -> Any:
        main = getattr(parameter, "main_grad", None)  # what mixed precision of fleet keeps, in float32
        return parameter.grad if main is None else main

    def states(self, optimizer: Any, parameter: Any) -> Mapping[str, Any] | None:
        return states_of(inner_optimizer(optimizer), parameter) or None

    def has_states(self, optimizer: Any) -> bool:
        plain = inner_optimizer(optimizer)
        return any(plain._accumulators.values()) or bool(plain._master_weights)

    def given_to(self, optimizer: Any) -> list[Any]:
        return [parameter for group in groups_of(inner_optimizer(optimizer)) for parameter in group["params"]]

    def modules(self, model: Any) -> Iterator[tuple[str, Any]]:
        return iter(model.named_sublayers(include_self=True))

    def before_forward(self, module: Any, hook: Callable[..., None]) -> Handle:
        return module.register_forward_pre_hook(hook)  # type: ignore[no-any-return]

    def after_forward(self, module: Any, hook: Callable[[Any, Any, Any], None], *, failed: bool = False) -> Handle:  # noqa: ARG002
        return module.register_forward_post_hook(hook)  # type: ignore[no-any-return]

    def recomputing(self) -> bool:
        from astray.capture.paddle.native.core import _paddle  # built on first use

        return _paddle.in_backward()

    def is_tensor(self, value: Any) -> bool:
        return is_of_paddle(value, "Tensor")

    def on_gradient(self, tensor: Any, arrived: Callable[[Any], None]) -> None:
        if not tensor.stop_gradient:
            tensor.register_hook(arrived)


def shared(name: str, value: Any) -> Tensor:
    """A tensor of torch over the memory of one of Paddle. Raises StateError where that is impossible."""
    from torch.utils.dlpack import from_dlpack  # a Monitor needs no torch

    reason = None
    if not value._is_initialized():
        reason = "it has no memory (freed, or never filled)"
    elif value.is_dist():
        reason = "it is distributed over processes by auto parallel; take its local part"
    elif value.is_selected_rows() or value.is_sparse():
        reason = "it is sparse; convert it with to_dense()"
    else:
        try:
            return from_dlpack(value.detach())
        except (BufferError, RuntimeError, AttributeError, TypeError) as error:
            reason = str(error).partition("\n")[0].strip().rstrip(".")
    raise StateError(f"The numbers of {name!r} cannot be read: {reason}. Leave it out with a pattern.")


def groups_of(optimizer: Any) -> list[Mapping[str, Any]]:
    """The groups of an optimizer's parameters; one of all of them where it was given no groups."""
    groups = optimizer._param_groups
    return groups if groups and isinstance(groups[0], dict) else [{"params": groups}]


def states_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, by the names it has for them: `moment1`, `beta1_pow_acc`.

    States of a weight with a float32 copy are filed under the name of the copy.
    """
    master = optimizer._master_weights.get(parameter.name)
    prefix = f"{optimizer._name}_" if optimizer._name is not None else ""
    found = {} if master is None else {MASTER: master}
    for name, by_parameter in optimizer._accumulators.items():
        for owner in (parameter, master):
            if owner is not None and owner.name in by_parameter:
                found[name.removeprefix(prefix)] = by_parameter[owner.name]
    return found
