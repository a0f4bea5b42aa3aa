"""The limits to which gradients were clipped since their last step; each framework's functions that clip say them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

CLIPPING_SETTINGS = ("clip_grad_norm", "clip_grad_value")
OFF = "off"


class ClippingLimits:
    """What gradients were clipped to, to be noted as settings of the optimizer that steps with them next.

    Adam divides by the size of its gradients, so clipping leaves hardly a trace in the weights of a few steps. No
    tensor is read: the functions that clip are given their limit as a number.
    """

    def __init__(self) -> None:
        self._limits: dict[str, tuple[float | str, set[int]]] = {}  # the limit, and the ids of parameters clipped to it

    def clear(self) -> None:
        self._limits.clear()

    def note(self, name: str, parameters: Iterable[Any], limit: Any) -> None:
        """Gradients are about to be clipped. `name` is one of `CLIPPING_SETTINGS`."""
        is_number = isinstance(limit, (int, float))
        self._limits[name] = float(limit) if is_number else "<a tensor>", set(map(id, parameters))

    def of(self, parameters: list[Any]) -> dict[str, Any]:
        """What the gradients of these parameters were clipped to since the last call with them."""
        if not self._limits:
            return dict.fromkeys(CLIPPING_SETTINGS, OFF)
        limits: dict[str, Any] = {}
        for name in CLIPPING_SETTINGS:
            limit, clipped = self._limits.get(name, (math.inf, set()))
            is_on = limit != math.inf and any(id(parameter) in clipped for parameter in parameters)
            limits[name] = limit if is_on else OFF
            clipped.difference_update(map(id, parameters))
        return limits
