"""torch's optimizers, as the check of updates needs them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from astray.capture.pytorch.parameter_update import closure_of, is_nested_step
from astray.state.models import Handle
from astray.state.updates.rules import RULES, NoRuleError, Rule, rule_of


class TorchSteps:
    """The steps of an optimizer of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._makes_gradients = False
        self._groups: dict[Any, Mapping[str, Any]] = {}
        self._scale: Tensor | None = None
        self._skipped = False

    def parameters(self) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"group{number}.{place}", parameter

    def names(self, model: Any) -> dict[Any, str]:
        return {parameter: name for name, parameter in model.named_parameters()}

    def watch(self, begin: Callable[[], None], end: Callable[[], None]) -> list[Handle]:
        def on_begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_nested_step(sys._getframe(1), optimizer):  # the step of a base class, called by the optimizer's own
                return
            self._makes_gradients = closure_of(args, kwargs) is not None
            self._groups = {each: group for group in optimizer.param_groups for each in group["params"]}
            # A fused step gets scaled gradients from a GradScaler, and learns of infinities only during the step.
            self._scale = getattr(optimizer, "grad_scale", None)
            found_inf = getattr(optimizer, "found_inf", None)
            self._skipped = found_inf is not None and bool(found_inf)
            begin()

        def on_end(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_nested_step(sys._getframe(1), optimizer):
                end()

        optimizer = self._optimizer
        return [optimizer.register_step_pre_hook(on_begin), optimizer.register_step_post_hook(on_end)]

    def weight(self, parameter: Any) -> Tensor:
        local: Tensor = _local(parameter)
        return local

    def states(self, parameter: Any) -> Mapping[str, Any]:
        return {name: _local(value) for name, value in self._optimizer.state.get(parameter, {}).items()}

    def begun_with(self, parameter: Any) -> Tensor | None:
        return None if self._makes_gradients else self.gradient(parameter)

    def gradient(self, parameter: Any) -> Tensor | None:
        return None if parameter.grad is None else _local(parameter.grad)

    def unscaled(self, gradient: Tensor) -> Tensor:
        if gradient.layout != torch.strided:
            raise NoRuleError(f"updates by {str(gradient.layout).removeprefix('torch.')} gradients are not recomputed")
        return gradient if self._scale is None else gradient.double() / self._scale

    def lr(self, parameter: Any) -> Any:
        return self._groups[parameter].get("lr", math.nan)

    def settings(self, parameter: Any) -> Mapping[str, Any]:
        return self._groups[parameter]

    def rounded(self, parameter: Any) -> Tensor | None:  # noqa: ARG002
        """None: torch's optimizers keep no copies."""
        return None

    def skipped(self) -> str | None:
        return "its GradScaler has left the step out" if self._skipped else None

    def rule(self, own: Mapping[Any, Rule]) -> Rule:
        return rule_of(self._optimizer, own, RULES)


def _local(value: Any) -> Any:
    """The local part of a sharded tensor: updates are made, and so checked, element by element."""
    return value.to_local() if hasattr(value, "to_local") else value.detach() if isinstance(value, Tensor) else value
