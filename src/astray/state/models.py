"""What a state needs of a framework's models and optimizers: a `ModelReader`; chooses it for a model.

A state holds tensors of torch, whatever the framework: those of another share their memory. Neither framework is
imported here, since a model of one cannot exist where it is not loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from astray.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor


class Handle(Protocol):
    """A hook that can be removed."""

    def remove(self) -> None: ...


class ModelReader(Protocol):
    """The parameters and modules of a framework's models, and what belongs to them."""

    def parameters(self, model: Any) -> Iterator[tuple[str, Any]]:
        """The parameters by name, as the framework has them; one that is used under several names once."""

    def is_trained(self, parameter: Any) -> bool: ...

    def tensor(self, name: str, value: Any) -> Tensor:
        """A parameter, gradient or state as a tensor of torch that shares its memory.

        Raises StateError where it has no numbers to share.
        """

    def gradient(self, parameter: Any) -> Any:
        """The gradient that a parameter has now; None where there is none."""

    def states(self, optimizer: Any, parameter: Any) -> Mapping[str, Any] | None:
        """What an optimizer keeps for a parameter; None where it keeps nothing."""

    def has_states(self, optimizer: Any) -> bool:
        """Whether an optimizer keeps anything for any parameter."""

    def given_to(self, optimizer: Any) -> list[Any]:
        """The parameters that an optimizer was given. Raises AttributeError for what is not one of this framework."""

    def modules(self, model: Any) -> Iterator[tuple[str, Any]]:
        """The modules of a model by name, itself too; one that is used under several names once."""

    def before_forward(self, module: Any, hook: Callable[..., None]) -> Handle:
        """Calls a hook before each forward of a module."""

    def after_forward(self, module: Any, hook: Callable[[Any, Any, Any], None], *, failed: bool = False) -> Handle:
        """Calls a hook with the module, its arguments and its result after each forward.

        failed: also after one that has failed, where the framework can.
        """

    def recomputing(self) -> bool:
        """Whether this forward runs inside of a backward pass."""

    def is_tensor(self, value: Any) -> bool: ...

    def on_gradient(self, tensor: Any, arrived: Callable[[Any], None]) -> None:
        """Calls a function with the gradient of a tensor, once that arrives; nothing where none will."""


def reader_of(model: Any) -> ModelReader:
    """What reads a model. Raises StateError for anything that is not one."""
    if _is_of("torch", model, "nn.Module"):
        from astray.state.torch_models import TorchModels

        return TorchModels()
    if is_of_paddle(model, "nn.Layer"):
        from astray.state.paddle_models import PaddleModels

        return PaddleModels()
    raise StateError(
        f"A {type(model).__name__} was given, which has no parameters. Give a torch.nn.Module or a paddle.nn.Layer; "
        "from_state_dict takes a mapping of tensors."
    )


def is_of_paddle(value: Any, what: str) -> bool:
    """Whether it is a Tensor, a nn.Layer or an optimizer.Optimizer of Paddle."""
    return _is_of("paddle", value, what)


def _is_of(framework: str, value: Any, what: str) -> bool:
    kind: Any = sys.modules.get(framework)
    for part in what.split("."):
        kind = getattr(kind, part, None)
    return isinstance(kind, type) and isinstance(value, kind)


def as_torch(name: str, value: Any) -> Any:
    """A tensor of Paddle as one of torch that shares its memory; any other value as it is."""
    if not is_of_paddle(value, "Tensor"):
        return value
    from astray.state.paddle_models import shared

    return shared(name, value)
