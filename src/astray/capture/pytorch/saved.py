"""Records what a program hands over by `rec.save`: any value, nested or not, and the gradients of its tensors.

Numbers and numpy arrays are taken as tensors too, so that they are compared like everything else.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import numpy as np
import torch

from astray.capture.engine import Engine, Site
from astray.capture.objects import Objects
from astray.capture.pytorch.gradients import InputEdges, LiveGradients
from astray.capture.structure import Flattener
from astray.interrupts import pass_interrupt

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class SavedValues:
    """The sites that a program has named itself."""

    def __init__(self, engine: Engine, gradients: LiveGradients) -> None:
        self._engine = engine
        self._gradients = gradients
        self._flat = Flattener(_has_numbers, Objects(_is_array))
        self._sites: dict[str, Site] = {}

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        """Records `value` at the site `name`, as the output of a call that does nothing."""
        engine = self._engine
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = Site(name, type(value).__name__, "", "custom")
        call = engine.enter(site, frame)
        try:
            if not call.recorded:
                return
            outputs = [(path, _tensor(found)) for path, found in self._flat.result(value)]
            engine.begin(call, self._flat.arguments((value,), {})[1])
            for path, tensor in outputs:
                engine.tensors.observe(call.seq, "output", path, tensor)
            if gradient and any(tensor.requires_grad for _, tensor in outputs):
                self._gradients.watch(engine, call, InputEdges([]), outputs)
        finally:
            engine.leave(call)


def _has_numbers(value: Any) -> bool:
    return _is_array(value) or type(value) in _NUMBERS


def _is_array(value: Any) -> bool:
    """What is taken of an object: its plain numbers may be anything, such as a count of its own uses."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, torch.Tensor)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))  # a copy: the program may go on writing into its own
    try:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    except (OverflowError, RuntimeError, ValueError) as error:  # an integer of more than 64 bits
        pass_interrupt(error)
        return torch.tensor(float(value), dtype=torch.float64)
