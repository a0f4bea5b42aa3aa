"""Records the gradients of parameters, each time a backward pass has brought them one.

A row `grad` holds what has accumulated so far; it is read when the backward pass is over, since Paddle runs no hook
between. By then the ranks of a DataParallel have averaged theirs, so one of several ranks adds up its own as they
arrive. Where there was a gradient already, a row `added` holds what this backward pass alone brought. So it does where
mixed precision adds up in
`main_grad`, in float32: its hook clears the gradient, whose memory is kept until ours has read it (`ClearedGradients`).
The gradients of calls are recorded natively: native/live_gradients.h.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import paddle
from paddle import distributed
from paddle.base import core

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.paddle.native.core import Site, _paddle
from astray.capture.paddle.tensors import parts_of
from astray.capture.paddle.unobserved import Unobserved
from astray.capture.patched_function import PatchedFunction

living = _paddle.living


class ParameterCapture:
    """Records the gradients of the parameters of recorded layers. Also keeps the sites of parameters.

    `sums`: whether what has accumulated is recorded. Without, each gradient is recorded as it arrives, as `added`.
    """

    def __init__(self, engine: Engine) -> None:
        self.sums = True
        self._engine = engine
        self._cleared = ClearedGradients(engine)
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
        self._cleared.remove()
        self._watched.clear()
        self._waiting.clear()

    # -- gradients -----------------------------------------------------------------------------------------------

    def arrived(self, watched: WatchedParameter, gradient: paddle.Tensor | None) -> None:
        """A gradient is about to be added to that of a parameter; None if another hook has cleared it before."""
        engine = self._engine
        cleared = self._cleared.take(gradient)
        if not engine.listening or not engine.in_own_process or "backward" not in engine.settings.phases:
            return
        try:
            parameter = watched.parameter()
            if parameter is None:
                return
            watched.seq = None  # left over from a pass that a signal handler's exception has ended
            if gradient is None and cleared is not None and cleared.shape == parameter.shape:
                gradient = cleared
            has_main_gradient = hasattr(parameter, "main_grad")
            if gradient is None:
                if has_main_gradient:
                    self._engine.missed(
                        f"what a backward pass has added to the gradient of {watched.site.name}",
                        "a layer or another hook added it to main_grad where it cannot be seen",
                    )
            elif not self.sums or has_main_gradient or _has_gradient(parameter):
                watched.seq = self._record(watched, "added", gradient)
                own = self._own_sum(parameter, gradient) if self.sums and not has_main_gradient else None
                if own is not None:
                    self._record(watched, "grad", own)
                    watched.seq = None
                    return
            elif _is_rank():
                self._record(watched, "grad", gradient)
                return
            if self.sums:
                if not self._waiting:
                    _paddle.after_backward(self._backward_ended)
                if watched not in self._waiting:
                    self._waiting.append(watched)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the gradient of {watched.site.name}", error)

    def _own_sum(self, parameter: paddle.Tensor, gradient: paddle.Tensor) -> paddle.Tensor | None:
        """What this gradient makes of the one before, on one rank of several; None where Paddle's own sum is read."""
        before = accumulated_gradient(parameter)
        if not _is_rank() or before is None or before.is_selected_rows() or gradient.is_selected_rows():
            return None
        with Unobserved():
            return before + gradient

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
                for part_path, part in parts_of(path, gradient):
                    engine.tensors.changed(part)  # sums are made in place, without raising its version
                    engine.tensors.observe(seq, "gradient", part_path, part)
        return seq


class ClearedGradients:
    """The gradient that another hook on a parameter has just cleared, until `remove`.

    Mixed precision has a hook on each parameter, which adds the gradient to `main_grad` and clears it. What it has
    cleared comes to the next hook without memory, and this is where that is: Paddle runs all hooks on one parameter
    before it goes on to the next.
    """

    _active: ClassVar[list[ClearedGradients]] = []
    _patches: ClassVar[list[PatchedFunction]] = []  # one of each for all recordings, which may end in any order

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._latest: paddle.Tensor | None = None
        self._seen = 0  # the address of the last gradient that our hook got before another could clear it
        self._active.append(self)
        if not self._patches:
            self._patches.append(PatchedFunction(paddle.Tensor, "_clear_data", _keeping_memory))
            self._patches.append(PatchedFunction(core.eager, "run_backward", _counted))

    def take(self, arrived: paddle.Tensor | None) -> paddle.Tensor | None:
        """What was cleared before the hook that got `arrived`, if anything."""
        latest, self._latest = self._latest, None
        self._seen = 0 if arrived is None else _paddle.address(arrived)
        return latest

    def remove(self) -> None:
        """Calling it twice does no harm."""
        self._latest = None
        if self in self._active:
            self._active.remove(self)
            while self._patches and not self._active:
                self._patches.pop().remove()

    @classmethod
    def clearing(cls, gradient: paddle.Tensor) -> None:
        """A tensor is about to be cleared in a backward pass."""
        for cleared in cls._active:
            engine = cleared._engine
            if engine.listening and engine.in_own_process:
                try:
                    if not cleared._seen or _paddle.address(gradient) != cleared._seen:
                        # Another tensor with the same memory; `detach` would be cleared too.
                        cleared._latest = paddle.Tensor(gradient.get_tensor())
                except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
                    engine.failed("a gradient that was cleared", error)

    @classmethod
    def backward_ended(cls) -> None:
        """The outermost backward pass of a thread is over: no hook will come any more."""
        for cleared in cls._active:
            cleared.take(None)


def _keeping_memory(clear: Callable[[paddle.Tensor], None]) -> Callable[[paddle.Tensor], None]:
    @functools.wraps(clear)
    def wrapper(self: paddle.Tensor) -> None:
        if in_backward():
            ClearedGradients.clearing(self)
        clear(self)

    return wrapper


def in_backward() -> bool:
    """Whether a backward pass runs on this thread.

    Paddle itself says no from the end of one inside it on, such as that of a layer that is recomputed.
    """
    return getattr(_local, "passes", 0) > 0 or _paddle.in_backward()


_local = threading.local()


def _counted(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _local.passes = getattr(_local, "passes", 0) + 1
        try:
            return run(*args, **kwargs)
        finally:
            _local.passes -= 1
            if not _local.passes:
                ClearedGradients.backward_ended()

    return wrapper


def accumulated_gradient(parameter: paddle.Tensor) -> paddle.Tensor | None:
    """What has accumulated of a parameter: in `grad`, or in the `main_grad` that mixed precision keeps in float32."""
    gradient = parameter._grad_ivar()
    if gradient is not None and gradient._is_initialized():
        return gradient
    main: Any = getattr(parameter, "main_grad", None)
    return main if isinstance(main, paddle.Tensor) and main._is_initialized() else None


def _is_rank() -> bool:
    """Whether this process is one of several."""
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _has_gradient(parameter: paddle.Tensor) -> bool:
    """Whether there is a gradient to add to. `clear_grad` sets it to zero, unless it is told to drop it."""
    gradient = accumulated_gradient(parameter)
    return gradient is not None and not _paddle.is_zero(gradient)


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
