"""What the check of updates needs of a framework's optimizer: its parameters, and what a step begins and ends with.

Tensors are torch's; those of another framework share their memory. torch's own optimizers are in `torch_steps`,
Paddle's in `paddle_steps`, which is imported when one of them is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from astray.capture.optimizer_sites import unwrapped
from astray.errors import UsageError
from astray.state.models import Handle, is_of_paddle
from astray.state.updates.rules import Rule


class OptimizerSteps(Protocol):
    """The steps of one optimizer.

    A parameter is whatever the framework has for one. `weight`, `states` and `begun_with` are asked for when a step
    begins, and everything when it has ended.
    """

    kind: str
    """The name of the optimizer's class."""

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Its parameters, each with a name by its group and its place there."""

    def names(self, model: Any) -> dict[Any, str]:
        """The names of a model's parameters."""

    def watch(self, begin: Callable[[], None], end: Callable[[], None]) -> list[Handle]:
        """Calls `begin` before each step and `end` after it."""

    def weight(self, parameter: Any) -> Tensor:
        """What the step writes to: the local part of a sharded parameter, or the float32 copy of a rounded one.

        Raises StateError where its numbers cannot be read.
        """

    def states(self, parameter: Any) -> Mapping[str, Any]:
        """What the optimizer keeps for a parameter, element by element and in numbers."""

    def begun_with(self, parameter: Any) -> Tensor | None:
        """The gradient that a step begins with; None where the step makes it itself."""

    def gradient(self, parameter: Any) -> Tensor | None:
        """The gradient that the step has used, where it began with none. Raises NoRuleError where that is not known."""

    def unscaled(self, gradient: Tensor) -> Tensor:
        """A gradient as the step uses it. Raises NoRuleError for one that is not recomputed with."""

    def lr(self, parameter: Any) -> Any:
        """The learning rate of a parameter: a number, or a tensor that is one."""

    def settings(self, parameter: Any) -> Mapping[str, Any]:
        """The settings that the step has for a parameter, as its rule reads them: `lr` among them."""

    def rounded(self, parameter: Any) -> Tensor | None:
        """The parameter itself, where `weight` is a copy of it of more precision."""

    def skipped(self) -> str | None:
        """Why the step has left out every update; None where it has not."""

    def rule(self, own: Mapping[Any, Rule]) -> Rule:
        """The rule: the user's own or a known one. Raises NoRuleError where there is none."""


def steps_of(optimizer: Any) -> OptimizerSteps:
    """The steps of an optimizer of torch or Paddle."""
    if any(is_of_paddle(one, "optimizer.Optimizer") for one in unwrapped(optimizer)):
        from astray.state.updates.paddle_steps import PaddleSteps

        return PaddleSteps(optimizer)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            f"A {type(optimizer).__name__} was given, whose steps cannot be watched. Give a torch.optim.Optimizer or a "
            "paddle.optimizer.Optimizer."
        )
    from astray.state.updates.torch_steps import TorchSteps

    return TorchSteps(optimizer)
