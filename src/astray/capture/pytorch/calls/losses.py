"""Records the labels of losses that are computed outside of all modules, where only modules are recorded.

A loss is mostly a function between the model's call and the backward pass. Labels in another order change the gradients
of all layers, and hardly one of their statistics. They are integers, so they are either equal or wrong.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling

from astray.capture.engine import Engine, Site
from astray.capture.pytorch.hooks import PatchedFunction

LABELLED = {
    "cross_entropy": "target", "nll_loss": "target", "multi_margin_loss": "target", "multilabel_margin_loss": "target",
    "ctc_loss": "targets",
}  # fmt: skip
"""The losses of torch that take labels, and by which argument."""


class Losses:
    """Sees the labels of losses, until `remove`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sites = {name: Site(f"/{name}", f"torch.nn.functional.{name}", "", "custom") for name in LABELLED}
        self._covers = [PatchedFunction(F, name, functools.partial(_covering, self)) for name in LABELLED]

    def remove(self) -> None:
        for cover in self._covers:
            cover.remove()

    def labelled(self, name: str, labels: Any, frame: FrameType | None) -> None:
        """A loss is about to be computed with these labels. `frame` calls it."""
        engine = self._engine
        if not engine.recording or not engine.belongs_here() or "function" in engine.settings.level:
            return
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or engine.is_in_a_module:
            return
        try:
            with (
                DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
            ):  # what is done here is not part of the program
                call = engine.enter(self._sites[name], frame)
                try:
                    if call.recorded:
                        engine.begin(call, None)
                        engine.tensors.observe(call.seq, "input", LABELLED[name], labels)
                finally:
                    engine.leave(call)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the labels of {name}", error)


def _covering(losses: Losses, loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that tells `losses` before it runs.

    torch.jit.script reads the source of what a cover wraps, and looks up its names in the cover's own globals: so these
    are the loss's, and what the cover needs itself is around it.
    """
    name = loss.__name__
    argument = LABELLED[name]
    place = list(inspect.signature(loss).parameters).index(argument)
    labelled, caller, compiling = losses.labelled, sys._getframe, is_compiling

    def covered(*args: Any, **kwargs: Any) -> Any:
        if not compiling():
            labelled(name, args[place] if len(args) > place else kwargs.get(argument), caller(1))
        return loss(*args, **kwargs)

    placed = FunctionType(covered.__code__, loss.__globals__, name, None, covered.__closure__)
    return functools.wraps(loss)(placed)
