"""Records the gradients of parameters, each time a backward pass has brought them one.

A row `grad` holds what has accumulated so far; it is read when the backward pass is over, since Paddle runs no hook
between. Where there was a gradient already, a row `added` holds what this backward pass alone brought. The gradients
of calls are recorded natively: native/live_gradients.h.
"""

from __future__ import annotations

import weakref
from typing import Any

import paddle

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.paddle.native.core import Site, _paddle
from astray.capture.paddle.unobserved import Unobserved

living = _paddle.living


class ParameterCapture:
    """Records the gradients of the parameters of recorded layers. Also keeps the sites of parameters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: dict[int, WatchedParameter] = {}
        self._waiting: list[WatchedParameter] = []  # that have got a gradient in the running backward pass
        self._listening = True

    def watch(self, parameter: paddle.Tensor, name: str, module: str, root: str) -> None:
        """Watches the gradients of a parameter from now on, unless it does already.

        `module` is the name of the layer that owns it, `root` of the outermost one.
        """
        key = id(parameter)
        known = self._watched.get(key)
        if known is None or known.parameter() is not parameter:
            known = WatchedParameter(self, parameter, Site(name, "Parameter", root, "parameter", module))
            self._watched[key] = known
        if self._listening:
            known.install()  # it may have been frozen so far

    def forget(self, parameter: paddle.Tensor | None) -> None:
        """Removes the hook of a parameter that has left its layer."""
        watched = self._watched.pop(id(parameter), None)
        if watched is not None:
            watched.remove()

    def site(self, parameter: paddle.Tensor) -> Site | None:
        """Where the gradients of a parameter are recorded; None when it belongs to no recorded layer."""
        known = self._watched.get(id(parameter))
        return known.site if known is not None and known.parameter() is parameter else None

    def set_listening(self, on: bool) -> None:
        """Adds the hooks, or removes them for steps that are not recorded."""
        self._listening = on
        for watched in list(self._watched.values()):
            if on:
                watched.install()
            else:
                watched.remove()

    def remove(self) -> None:
        self.set_listening(False)
        self._watched.clear()
        self._waiting.clear()

    # -- gradients -----------------------------------------------------------------------------------------------

    def arrived(self, watched: WatchedParameter, gradient: paddle.Tensor | None) -> None:
        """A gradient is about to be added to that of a parameter."""
        engine = self._engine
        if not engine.listening or not engine.in_own_process:
            return
        try:
            if not self._waiting:
                _paddle.after_backward(self._backward_ended)
            if watched not in self._waiting:
                self._waiting.append(watched)
            watched.seq = None  # left over from a pass that a signal handler's exception has ended
            parameter = watched.parameter()
            if gradient is not None and parameter is not None and parameter._grad_ivar() is not None:
                watched.seq = self._record(watched, "added", gradient)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the gradient of {watched.site.name}", error)

    def _backward_ended(self) -> None:
        """Everything has accumulated: by a backward pass, or by one inside it, such as of recompute."""
        waiting, self._waiting = self._waiting, []
        for watched in waiting:
            try:
                self._record_accumulated(watched)
            except Exception as error:  # noqa: BLE001, PERF203 - the user's training must not fail because we did
                self._engine.failed(f"the gradient of {watched.site.name}", error)

    def _record_accumulated(self, watched: WatchedParameter) -> None:
        parameter = watched.parameter()
        if parameter is None or not self._engine.listening:
            return
        gradient = accumulated_gradient(parameter)
        if gradient is None:
            self._engine.missed(f"the gradient of {watched.site.name}", "another hook took it away first")
        else:
            self._record(watched, "grad", gradient)
        watched.seq = None

    def _record(self, watched: WatchedParameter, path: str, gradient: paddle.Tensor) -> int:
        """Records a gradient of the parameter's event, which is a new one if there is none yet; returns its number."""
        engine = self._engine
        seq = engine.event(watched.site, "backward") if watched.seq is None else watched.seq
        if seq != NO_ROW:
            with Unobserved():
                engine.tensors.changed(gradient)  # sums are made in place, without raising its version
                engine.tensors.observe(seq, "gradient", path, gradient)
        return seq


def accumulated_gradient(parameter: paddle.Tensor) -> paddle.Tensor | None:
    """What has accumulated of a parameter: in `grad`, or in the `main_grad` that mixed precision keeps in float32."""
    gradient = parameter._grad_ivar()
    if gradient is not None and gradient._is_initialized():
        return gradient
    main: Any = getattr(parameter, "main_grad", None)
    return main if isinstance(main, paddle.Tensor) and main._is_initialized() else None


class WatchedParameter:
    """A parameter, where it is recorded, and the hook on it."""

    __slots__ = ("__weakref__", "_capture", "_hook", "parameter", "seq", "site")

    def __init__(self, capture: ParameterCapture, parameter: paddle.Tensor, site: Site) -> None:
        self._capture = capture
        self.parameter = weakref.ref(parameter)
        self.site = site
        self.seq: int | None = None  # of the current event
        self._hook: int | None = None

    def install(self) -> None:
        """Adds the hook if the parameter can get gradients."""
        parameter = self.parameter()
        if self._hook is None and parameter is not None and not parameter.stop_gradient and parameter.is_leaf:
            self._hook = _paddle.put_on_parameter(parameter, self._arrived)

    def remove(self) -> None:
        parameter, hook = self.parameter(), self._hook
        self._hook = None
        if parameter is not None and hook is not None:
            parameter._remove_grad_hook(hook)

    def _arrived(self, gradient: paddle.Tensor | None) -> None:
        self._capture.arrived(self, gradient)
