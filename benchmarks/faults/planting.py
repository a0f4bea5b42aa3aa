"""What a fault can do to a training before it runs: replace one method of one module, or act at a moment of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

Moment = Literal["begin", "gradients", "update"]
"""Of a step: before anything, when the gradients are there, and when they are clipped and given to the optimizer."""


class Plantable:
    """A training that faults can be planted in. `now` is its current step."""

    model: nn.Module

    def __init__(self) -> None:
        self.now = 0
        self._actions: dict[tuple[int, Moment], list[Callable[[], object]]] = defaultdict(list)

    def at(self, step: int, moment: Moment, action: Callable[[], object]) -> None:
        """Let something happen once, without gradients."""
        self._actions[step, moment].append(torch.no_grad()(action))

    def module(self, site: str) -> Any:
        """The module at a site. Untyped, because faults set the attributes of all kinds of modules."""
        return self.model.get_submodule(site)

    def override(self, site: str, method: str, replacement: Callable[..., Any]) -> None:
        """Let a method of one module be `replacement(original, *arguments)`."""
        module = self.module(site)
        original = getattr(module, method)
        setattr(module, method, lambda *arguments, **named: replacement(original, *arguments, **named))

    def _happens(self, moment: Moment) -> None:
        for action in self._actions[self.now, moment]:
            action()


def modules(training: Plantable, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Sequence[str]:
    """The sites of all modules of a class."""
    return [site for site, module in training.model.named_modules() if isinstance(module, kind)]
