"""Finds the outermost modules and the steps of a program that knows nothing of astray.

A module that nobody has attached yet is outermost when it is first called. The first one with parameters is the model,
and its sites carry plain names; any other (a loss, a second network) is named by its class: `CrossEntropyLoss`, then
`CrossEntropyLoss#2`. The first optimizer that steps sets the pace: each of its steps ends a step. Where several take
turns in one iteration, what runs after it belongs to the next step, in every run alike.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from astray.capture.engine import Engine
from astray.capture.pytorch.modules import ModuleCapture


class Discovery:
    """Attaches `capture` to every outermost module as it is first called, and calls `end_step` as steps end."""

    def __init__(self, engine: Engine, capture: ModuleCapture, end_step: Callable[[], None]) -> None:
        self._engine = engine
        self._capture = capture
        self._end_step = end_step
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._leader: weakref.ref[Any] | None = None
        self._handles = [
            register_module_forward_pre_hook(self._before_any_module),
            register_optimizer_step_post_hook(self._after_any_optimizer),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_any_module(self, module: nn.Module, args: Any) -> None:
        if is_compiling() or self._capture.site(module) is not None or not self._engine.belongs_here():
            return
        try:
            label = self._label(module)
            self._roots[label] = weakref.ref(module)
            self._capture.attach(module, label)
            site = self._capture.site(module)
            if site is not None and self._engine.recording:
                # torch has collected the hooks of this call already, so the new one has to be called by hand. A global
                # hook is not given the keyword arguments: they are read from the frame of torch's that calls it.
                frame = sys._getframe(1)
                self._capture.enter(site, module, args, frame.f_locals.get("kwargs") or {}, frame)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the first call of {type(module).__name__}", error)

    def _label(self, module: nn.Module) -> str:
        """A name that the same module gets again in the next run. The place of one that is gone is taken anew."""
        if "" not in self._roots and next(module.parameters(), None) is not None:
            return ""
        name = type(module).__name__
        for number in range(1, len(self._roots) + 2):
            label = name if number == 1 else f"{name}#{number}"
            if label not in self._roots or self._roots[label]() is None:
                return label
        return name

    def _after_any_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._engine.belongs_here():
            return
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._end_step()  # which guards itself
