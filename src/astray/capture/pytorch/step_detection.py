"""Finds out when a step ends in a program that does not say so. Used by `model_discovery` and the adapter.

The first optimizer that steps sets the pace: each of its steps ends a step, however many forwards came before it
(gradient accumulation) or ran inside it (the closure of LBFGS). Where several take turns in one iteration, what runs
after the first belongs to the next step, in every run alike. A program without an optimizer is one long step, and
its forwards are micro steps; so is one whose optimizer is compiled, which runs without hooks.

A GradScaler that finds infinities skips the optimizer, and torch has no hook there, so its `step` is patched on the
class while this is in place: an iteration whose update is skipped ends a step too. So is `scale`, after which gradients
may overflow. Scalers themselves are not changed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from astray.capture.engine import Engine
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.hooks import PatchedFunction
from astray.capture.pytorch.parameter_update import is_inner
from astray.capture.pytorch.setup.setup_capture import note_scaler
from astray.records import SKIPPED_UPDATE


class StepDetector:
    """Calls `end_step` as steps end, until `remove`."""

    def __init__(self, engine: Engine, end_step: Callable[[], None]) -> None:
        self._engine = engine
        self._end_step = end_step
        self._leader: weakref.ref[Any] | None = None
        self._local = threading.local()  # how many steps of any optimizer this thread has seen
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._covers = [PatchedFunction(GradScaler, "step", functools.partial(_covering_step, self))]
        kinds: list[type] = [GradScaler, *GradScaler.__subclasses__()]
        for kind in kinds:
            if "scale" in vars(kind):
                self._covers.append(PatchedFunction(kind, "scale", functools.partial(_covering_scale, self)))

    def let_program_pace(self) -> None:
        """The program says by itself where steps end."""
        self._end_step = _nothing

    def remove(self) -> None:
        self._handle.remove()
        for cover in self._covers:
            cover.remove()
        self._leader = None
        self._end_step = _nothing

    @property
    def seen(self) -> int:
        return getattr(self._local, "seen", 0)

    @never_compiled
    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        self._local.seen = self.seen + 1
        if not is_inner(sys._getframe(1), optimizer):
            self.stepped(optimizer)

    def scaled(self, scaler: GradScaler) -> None:
        """A loss has been scaled."""
        if self._engine.belongs_here():
            self._engine.scaled = True
            if self._engine.listening:
                note_scaler(self._engine, scaler)

    def skipped(self, optimizer: Any) -> None:
        """An optimizer would have stepped, had not gradients overflowed."""
        if self._engine.belongs_here() and self._engine.listening:
            self._engine.note(SKIPPED_UPDATE, {"optimizer": type(optimizer).__name__})
        self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or would have."""
        if not self._engine.belongs_here():
            return
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._end_step()  # which guards itself


def _covering_step(pace: StepDetector, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step`, which tells `pace` when no optimizer has stepped in it."""

    @functools.wraps(scaler_step)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = pace.seen
        result = scaler_step(self, optimizer, *args, **kwargs)
        if pace.seen == before:
            pace.skipped(getattr(optimizer, "optimizer", optimizer))  # one that wraps another is not the one that steps
        return result

    return step


def _covering_scale(pace: StepDetector, scale: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.scale`, which tells `pace` first."""

    @functools.wraps(scale)
    def covered(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            pace.scaled(self)
        return scale(self, *args, **kwargs)

    return covered


def _nothing() -> None:
    """Ends no step."""
