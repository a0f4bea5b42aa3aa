"""Records the gradients of parameters, each time a backward pass has brought them one.

A row `grad` holds what has accumulated so far. Where there was a gradient already, a row `added` holds what this
backward pass alone brought. Also keeps the names of parameters, for whoever meets them elsewhere, such as in an
optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from astray.capture.engine import Engine, Site
from astray.capture.pytorch.gradients import AccumulatedHook, ArrivingHook


class ParameterCapture:
    """Watches the parameters of the recorded modules."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: dict[int, _Watched] = {}
        # Those that have their hooks, by their ids: to watch one of these again does nothing. Read natively too.
        self.hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._listening = True

    def watch(self, parameter: torch.Tensor, name: str, module: str, root: str) -> None:
        """Sees the gradients of a parameter from now on, unless it does already or it has no numbers yet.

        `module` is the name of the one that owns it, `root` of the outermost one.
        """
        key = id(parameter)
        known = self._watched.get(key)
        if (known is not None and known.parameter() is parameter) or is_lazy(parameter):
            if known is not None and self._listening:
                self._put(key, known)  # it may have been frozen so far
            return
        self._watched[key] = watched = _Watched(parameter, Site(name, "Parameter", root, "parameter", module))
        self.hooked.pop(key, None)
        if self._listening:
            self._put(key, watched)

    def _put(self, key: int, watched: _Watched) -> None:
        if watched.put(self._engine):
            self.hooked[key] = watched.parameter

    def forget(self, parameter: torch.Tensor | None) -> None:
        """It has left the module that it was known by."""
        self.hooked.pop(id(parameter), None)
        watched = self._watched.pop(id(parameter), None)
        if watched is not None:
            watched.take()

    def site(self, parameter: torch.Tensor) -> Site | None:
        """Where the gradients of a parameter are recorded; None when it belongs to no recorded module."""
        known = self._watched.get(id(parameter))
        return known.site if known is not None and known.parameter() is parameter else None

    def writes(self, parameter: torch.Tensor) -> int | None:
        """How often its gradient was written to since the backward pass left it, −1 if it was replaced by another.

        None where there is no gradient, or none was seen.
        """
        gradient, known = parameter.grad, self._watched.get(id(parameter))
        if gradient is None or known is None or known.accumulated is None or known.parameter() is not parameter:
            return None
        return known.accumulated.writes(gradient)

    def listen(self, on: bool) -> None:
        """Puts the hooks in place, or takes them off for steps that are not recorded."""
        self._listening = on
        if on:
            for key in [key for key in self._watched if key not in self.hooked]:
                self._put(key, self._watched[key])
            return
        self.hooked.clear()
        for watched in list(self._watched.values()):
            watched.take()

    def remove(self) -> None:
        self.listen(False)
        self._watched.clear()


class _Watched:
    """A parameter, where it is recorded, and the hooks on it."""

    __slots__ = ("_handles", "accumulated", "parameter", "site")

    def __init__(self, parameter: torch.Tensor, site: Site) -> None:
        self.parameter = weakref.ref(parameter)
        self.site = site
        self.accumulated: AccumulatedHook | None = None
        self._handles: list[Any] = []

    def put(self, engine: Engine) -> bool:
        """Puts the hooks in place where there is something to see; says whether they are."""
        if self._handles:
            return True
        parameter = self.parameter()
        if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
            return False
        hook = self.accumulated = AccumulatedHook(engine, self.site)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles.append(parameter.register_hook(ArrivingHook(hook, self.parameter)))  # type: ignore[no-untyped-call]
        return True

    def take(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.accumulated = None
