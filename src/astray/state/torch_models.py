"""torch's models and optimizers, as `models` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from astray.state.models import Handle


class TorchModels:
    """Those of torch."""

    def parameters(self, model: Any) -> Iterator[tuple[str, Any]]:
        return iter(model.named_parameters())

    def is_trained(self, parameter: Any) -> bool:
        return bool(parameter.requires_grad)

    def tensor(self, name: str, value: Any) -> torch.Tensor:  # noqa: ARG002
        """The tensor itself."""
        return value  # type: ignore[no-any-return]

    def gradient(self, parameter: Any) -> Any:
        return parameter.grad

    def states(self, optimizer: Any, parameter: Any) -> Mapping[str, Any] | None:
        return optimizer.state.get(parameter)  # type: ignore[no-any-return]

    def has_states(self, optimizer: Any) -> bool:
        return bool(optimizer.state)

    def given_to(self, optimizer: Any) -> list[Any]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def modules(self, model: Any) -> Iterator[tuple[str, Any]]:
        return iter(model.named_modules())

    def before_forward(self, module: Any, hook: Callable[..., None]) -> Handle:
        return module.register_forward_pre_hook(hook)  # type: ignore[no-any-return]

    def after_forward(self, module: Any, hook: Callable[[Any, Any, Any], None], *, failed: bool = False) -> Handle:
        return module.register_forward_hook(hook, always_call=failed)  # type: ignore[no-any-return]

    def recomputing(self) -> bool:
        return torch._C._current_graph_task_id() >= 0

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def on_gradient(self, tensor: Any, arrived: Callable[[Any], None]) -> None:
        if tensor.requires_grad:
            tensor.register_hook(arrived)
