"""What the program does to gradients before a step: what they are clipped to, and which it has written to by itself.

Both are noted as settings of the optimizer that steps with them next. Adam divides by the size of its gradients, so
that either leaves hardly a trace in the weights of a few steps. No tensor is read: limits are given to the functions
that clip as numbers, and version counters count the writes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from astray.capture.engine import Engine
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.hooks import PatchedFunction
from astray.interrupts import pass_interrupt

NAMES = ("clip_grad_norm", "clip_grad_value")
OFF = "off"

_BEHIND = "_clip_grads_with_norm_"
"""What `clip_grad_norm_` calls by its name, however a program has imported that; older versions do not have it."""


class Clipping:
    """The limits to which gradients were clipped since their last step, until `remove`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits: dict[str, tuple[float | str, set[int]]] = {}
        norm, value = (functools.partial(_covering, self, name) for name in NAMES)
        places = [(clip_grad, _BEHIND, norm)] if hasattr(clip_grad, _BEHIND) else [
            (utils, "clip_grad_norm_", norm), (clip_grad, "clip_grad_norm_", norm),
        ]  # fmt: skip
        places += [(utils, "clip_grad_value_", value), (clip_grad, "clip_grad_value_", value)]
        self._covers = [PatchedFunction(owner, name, covering) for owner, name, covering in places]

    def remove(self) -> None:
        for cover in self._covers:
            cover.remove()
        self._limits.clear()

    @never_compiled
    def clipped(self, name: str, parameters: Any, limit: Any) -> None:
        """The gradients of one or some parameters are about to be clipped."""
        engine = self._engine
        try:
            if engine.listening and engine.belongs_here():
                is_number = isinstance(limit, (int, float))
                several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
                self._limits[name] = float(limit) if is_number else "<a tensor>", set(map(id, several))
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed("what gradients are clipped to", error)

    def of(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """What the gradients of these were clipped to since they were last asked for."""
        if not self._limits:
            return dict.fromkeys(NAMES, OFF)
        found: dict[str, Any] = {}
        for name in NAMES:
            limit, clipped = self._limits.get(name, (math.inf, set()))
            is_on = limit != math.inf and any(id(parameter) in clipped for parameter in parameters)
            found[name] = limit if is_on else OFF
            clipped.difference_update(map(id, parameters))
        return found


def _covering(clipping: Clipping, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    """A function that clips, after it has given the limit to `clipping`."""

    signature = inspect.signature(clip)
    of, limit, *_ = signature.parameters

    @functools.wraps(clip)
    def covered(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:  # torch raises it itself
            pass_interrupt(error)
            return clip(*args, **kwargs)
        if not isinstance(given.arguments[of], torch.Tensor):
            given.arguments[of] = list(given.arguments[of])  # it may be read only once
        clipping.clipped(name, given.arguments[of], given.arguments[limit])
        return clip(*given.args, **given.kwargs)

    return covered


NAME = "written_gradients"
"""The name of the setting that lists the parameters of `singled_out`."""


def singled_out(parameters: Sequence[torch.Tensor], writes: Callable[[torch.Tensor], int | None]) -> list[torch.Tensor]:
    """Those of some parameters whose gradients were written to more or less often than most, or replaced.

    Clipping and unscaling write to all of them alike; the others were written to by the program itself.
    """
    found = [(parameter, writes(parameter)) for parameter in parameters]
    counts = Counter(number for _, number in found if number is not None)
    if len(counts) < 2:
        return []
    usual = min(counts, key=lambda number: (-counts[number], number))
    return [parameter for parameter, number in found if number not in (None, usual)]
