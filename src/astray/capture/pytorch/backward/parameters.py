"""Records the gradients of parameters, each time a backward pass has brought them one.

A row `grad` holds what has accumulated so far. Where there was a gradient already, a row `added` holds what this
backward pass alone brought. Also keeps the names of parameters, for whoever meets them elsewhere, such as in an
optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from astray.capture.engine import Engine, Site
from astray.capture.pytorch.backward.gradients import native
from astray.capture.pytorch.calls.hooks import Hook
from astray.capture.pytorch.compiled.code import never_compiled


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
        return int(known.accumulated.writes(gradient))

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
        self.accumulated: Any = None
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


class _ArrivingHook(Hook):
    """Sees a gradient just before it is added to the one that is there already."""

    __slots__ = ("accumulated", "parameter")

    def __init__(self, accumulated: _AccumulatedHook, parameter: weakref.ref[torch.Tensor]) -> None:
        self.accumulated = accumulated
        self.parameter = parameter

    @never_compiled
    def __call__(self, gradient: torch.Tensor | None) -> None:
        if is_compiling():
            return
        parameter = self.parameter()
        self.accumulated.arrived = gradient is not None
        self.accumulated.seq = None  # of one that a signal handler's exception has cut short
        if gradient is not None and parameter is not None and parameter.grad is not None:
            self.accumulated.see("added", gradient)


class _AccumulatedHook(Hook):
    """Sees the gradient of a parameter each time something was added to it."""

    __slots__ = ("_left", "arrived", "engine", "seq", "site")

    def __init__(self, engine: Engine, site: Site) -> None:
        self.engine = engine
        self.site = site
        self.seq: int | None = None
        self.arrived = False
        self._left = 0, -1  # the id and the version of the gradient that it saw last

    def writes(self, gradient: torch.Tensor) -> int:
        """How often a gradient was written to since it was seen; −1 when it is another one, or not known."""
        seen, version = self._left
        return gradient._version - version if id(gradient) == seen and version >= 0 else -1

    @never_compiled
    def __call__(self, parameter: torch.Tensor) -> None:
        if is_compiling():
            return
        arrived, self.arrived = self.arrived, False
        if parameter.grad is None and not arrived:
            return  # compiled code calls here for parameters that it has no gradient for
        if parameter.grad is None:
            self.engine.missed(f"the gradient of {self.site.name}", "another hook took it away first")
        else:
            try:
                self.see("grad", parameter.grad)
                known = not parameter.grad.is_inference()
                self._left = id(parameter.grad), parameter.grad._version if known else -1
            finally:
                self.seq = None

    def see(self, path: str, gradient: torch.Tensor) -> None:
        engine = self.engine
        if not engine.listening or not engine.is_here:
            return
        try:
            with DisableTorchFunction():  # what is done here is no part of the program
                if self.seq is None:
                    self.seq = engine.event(self.site, "backward")
                engine.tensors.observe(self.seq, "gradient", path, gradient)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the gradient of {self.site.name}", error)


AccumulatedHook: Any = _AccumulatedHook if native is None else native.AccumulatedHook
ArrivingHook: Any = _ArrivingHook if native is None else native.ArrivingHook
