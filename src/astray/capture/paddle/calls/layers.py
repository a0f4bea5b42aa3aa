"""Puts hooks on the layers of a model and turns their calls into records.

Feeds the engine; the backward is seen by native hooks on the autograd graph. Of a layer that `paddle.jit.to_static`
runs as one program the call is recorded, and nothing in it: see `static_programs`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import paddle
from paddle import nn

from astray.capture.copies import HookFreeCopies, TransparentHook
from astray.capture.engine import Engine
from astray.capture.identity_map import IdentityMap
from astray.capture.nonfinite_values import ObservedTensor
from astray.capture.observer import NO_ROW
from astray.capture.paddle.calls.flattening import Tensors, flattener
from astray.capture.paddle.calls.wrappers import (
    Chain,
    chains,
    children,
    has_same_children,
    is_static,
    type_name,
)
from astray.capture.paddle.gradients import ParameterCapture, in_backward
from astray.capture.paddle.native.core import OpenCall, Site, _paddle
from astray.capture.paddle.setup_capture import SetupCapture
from astray.capture.sites import ModuleTree, Sites
from astray.capture.structure import DEEPEST_ATTRIBUTE, MOST_TENSORS, ObjectFlattener
from astray.interrupts import pass_interrupt
from astray.records import ROOT, Role

_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs_flag",),
    "_forward_post_hooks": ("_forward_post_hooks_with_kwargs_flag", "_forward_post_hooks_always_called"),
}
"""Where a layer keeps its hooks by their numbers, and the tables in which Paddle keeps their options."""


class _WatchedLayer:
    """How one layer is watched, whether or not its hooks are on."""

    __slots__ = ("called", "children", "handles")

    def __init__(self, layer: nn.Layer) -> None:
        self.children = children(layer)
        self.called = False
        self.handles: list[Any] = []


class LayerCapture:
    """Records every call of the layers it is attached to, until `detach`.

    `writes` returns how often tensors were written to past their version counters.
    """

    def __init__(self, engine: Engine, gradients: Any, writes: Callable[[], int]) -> None:
        self._engine = engine
        self._writes = writes
        self._gradients = gradients
        self._flat = flattener(ObjectFlattener(_paddle, epoch=self._epoch), self._note_too_large)
        self._sites: Sites[Chain] = Sites(_paddle, ModuleTree(chains, type_name), self._leave_out)
        self._watched: IdentityMap[nn.Layer, _WatchedLayer] = IdentityMap()
        self._states: dict[str, list[Any]] = {}
        self._any_called = False
        self._listening = True
        self._static: IdentityMap[nn.Layer, str] = IdentityMap()  # layers inside a static program, with its site
        self._copies = HookFreeCopies(nn.Layer, _HOOKS)
        self.parameters = ParameterCapture(engine)
        self.setup = SetupCapture(engine, self._sites.chains, self._sites.of)

    # -- names and hooks -----------------------------------------------------------------------------------------

    def attach(self, root: nn.Layer, label: str = "") -> None:
        """Puts hooks on `root` and everything in it; sites carry `label` in front when there is one."""
        added = self._sites.add(root, label)
        self._watch(added)
        self._watch_parameters(added)
        self.setup.modules_changed()

    def site(self, layer: nn.Layer) -> Site | None:
        """The site of `layer`; None when it is not attached yet."""
        return self._sites.of(layer)

    def _resync(self, layer: nn.Layer) -> Site | None:
        """Updates names and hooks after a model has changed: layers were added, replaced or wrapped."""
        removed, added = self._sites.renew()
        for gone in removed:
            self._remove_hooks(gone)
            self._watched.pop(gone, None)
            for parameter in gone._parameters.values():
                self.parameters.forget(parameter)
        self._watch(added)
        self._watch_parameters(self._sites.chains())
        for known, watched in self._watched.items():
            watched.children = children(known)
        self.setup.modules_changed()
        return self._sites.of(layer)

    def _watch(self, added: list[Chain]) -> None:
        for chain in added:
            try:
                if is_static(chain.inner):
                    self._leave_alone_inside(chain.inner)
                if chain.inner not in self._watched:
                    self._watched[chain.inner] = _WatchedLayer(chain.inner)
                self._add_hooks(chain.inner)
            except Exception as error:  # noqa: BLE001, PERF203 - the others can be watched all the same
                self._leave_out(chain, error)

    def _leave_alone_inside(self, layer: nn.Layer) -> None:
        """Takes the hooks off all layers in one that runs as a static program."""
        site = self._sites.of(layer)
        if layer in self._static or site is None:
            return
        for inner in layer.sublayers():
            if inner not in self._static:
                self._static[inner] = site.name
                self._remove_hooks(inner)

    def _leave_out(self, chain: Chain, error: Exception) -> None:
        """A layer cannot be watched: its own code raised while its hooks were put in place."""
        pass_interrupt(error)
        self._remove_hooks(chain.inner)
        self._watched.pop(chain.inner)
        site = self._sites.of(chain.inner)
        name = (chain.name or ROOT) if site is None else site.name
        self._engine.missed(f"calls of {name}", f"it cannot be watched ({type(error).__name__}: {error})")

    def _add_hooks(self, layer: nn.Layer) -> None:
        site, watched = self._sites.of(layer), self._watched.get(layer)
        if site is None or watched is None or watched.handles or not self._listening or layer in self._static:
            return
        # By Paddle's own methods: a class may override them.
        handles = watched.handles
        handles.append(nn.Layer.register_forward_pre_hook(layer, _BeforeHook(self, site), with_kwargs=True))
        handles.append(nn.Layer.register_forward_post_hook(layer, _AfterHook(self, site), always_call=True))

    def _remove_hooks(self, layer: nn.Layer) -> None:
        watched = self._watched.get(layer)
        if watched is not None:
            for handle in watched.handles:
                handle.remove()
            watched.handles.clear()

    def _watch_parameters(self, added: list[Chain]) -> None:
        for layer in (layer for chain in added for layer in chain.modules):
            site = self._sites.of(layer)
            if site is not None:
                for name, parameter in layer._parameters.items():
                    if parameter is not None:
                        self._watch_parameter(parameter, name, site)

    def _watch_parameter(self, parameter: paddle.Tensor, name: str, site: Site) -> None:
        full_name = name if site.name == ROOT else f"{site.name}.{name}"
        try:
            self.parameters.watch(parameter, full_name, site.name, site.root)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            pass_interrupt(error)
            self._engine.missed(f"the gradient of {full_name}", f"it takes no hooks ({type(error).__name__}: {error})")

    def set_listening(self, on: bool) -> None:
        """Adds the hooks, or removes them: a step that is not recorded should cost nothing."""
        self.parameters.set_listening(on)
        if on != self._listening:
            self._listening = on
            for layer in list(self._watched):
                if on:
                    self._add_hooks(layer)
                else:
                    self._remove_hooks(layer)

    def next_step(self) -> None:
        self._states.clear()

    def detach(self) -> None:
        """Removes every hook, from layers and parameters."""
        self._copies.remove()
        for layer in list(self._watched):
            self._remove_hooks(layer)
        self.parameters.remove()
        self._note_unseen()
        self._watched.clear()
        self._static.clear()
        self._sites.clear()

    def _note_unseen(self) -> None:
        """Reports the layers whose calls could not be seen."""
        if not self._any_called:
            why = "none was made while recording"
            self._engine.missed("any call of a layer", why)
        for site in dict.fromkeys(site for _, site in self._static.items()):
            self._engine.missed(f"calls inside {site}", "paddle.jit.to_static runs it as one program")

    # -- calls ---------------------------------------------------------------------------------------------------

    def before(self, site: Site, layer: nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> None:
        """A layer is about to run."""
        watched = self._watched.get(layer)
        if watched is None:
            return
        if is_static(layer):  # since a while ago, or from now on
            self._leave_alone_inside(layer)
        if not has_same_children(layer, watched.children):
            site = self._resync(layer) or site
        if self._engine.recording:
            self.enter(site, layer, args, kwargs, frame)
        if not watched.called:
            watched.called = True
            self.setup.first_call(site)

    def enter(
        self, site: Site, layer: nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        self._any_called = True
        engine = self._engine
        call = engine.enter(site, frame, recompute=in_backward())  # inside a backward: recompute
        if not call.recorded:
            return
        inputs, skeleton = self._flat.arguments(args, kwargs)
        seq = call.seq
        if seq != NO_ROW:
            engine.begin(call, skeleton)
            observe = engine.tensors.observe
            for path, tensor in inputs:
                observe(seq, "input", path, tensor)
            self._observe_state(site, layer, seq)
        if engine.follows_gradients(call) and paddle.is_grad_enabled():
            call.input_edges = self._gradients.edges(inputs)

    def after(self, site: Site, layer: nn.Layer, result: Any) -> None:
        """A layer has run; `result` is None when it has raised."""
        engine = self._engine
        call = engine.innermost(site)
        if call is None:
            return
        try:
            if call.recorded:
                if result is None and not call.recompute:  # recompute ends early, by an exception, in some versions
                    self._engine.note_exception(site, call.frame)
                outputs = self._flat.result(result)
                is_bad = False
                if call.seq != NO_ROW:
                    for path, tensor in outputs:
                        is_bad = bool(engine.tensors.observe(call.seq, "output", path, tensor)) or is_bad
                if is_bad:
                    self._on_nonfinite(call, layer, outputs)
                if call.input_edges is not None:
                    self._gradients.watch(call, call.input_edges, outputs)
        finally:
            call.input_edges = None
            engine.leave(call)

    def _observe_state(self, site: Site, layer: nn.Layer, seq: int) -> None:
        """The layer's own parameters and buffers, at its first call of a step and whenever they have changed."""
        state = own_state(layer)
        if not state:
            return
        # Buffers hold running statistics, which kernels update without raising their version.
        is_moving = layer.training and any(role == "state" for role, _, _ in state)
        now: list[Any] = [(id(tensor), tensor.inplace_version) for _, _, tensor in state]
        now.append((self._engine.tensors.forget_count, self._writes()))
        if self._states.get(site.name) == now and not is_moving:
            return
        self._states[site.name] = now
        for role, name, tensor in state:
            if is_moving:
                self._engine.tensors.changed(tensor)
            self._engine.tensors.observe(seq, role, name, tensor)
            if role == "parameter":  # it may have been made, replaced or unfrozen since the start
                self._watch_parameter(tensor, name, site)

    def _on_nonfinite(self, call: OpenCall, layer: nn.Layer, outputs: Tensors) -> None:
        """A call has returned NaN or infinities, and a guard keeps such calls. Paddle's frame has its arguments."""
        given = call.frame.f_locals if call.frame is not None else {}
        args, kwargs = given.get("inputs"), given.get("kwargs")
        if not isinstance(args, tuple):
            return
        inputs, skeleton = self._flat.arguments(args, kwargs or {})
        tensors: list[ObservedTensor] = [("input", *named) for named in inputs]
        tensors += [("output", *named) for named in outputs]
        tensors += own_state(layer)
        self._engine.tensors.on_nonfinite(call.seq, tensors, skeleton)

    def _epoch(self) -> tuple[int, int]:
        """When it changes, tensors inside objects are recorded again."""
        return self._engine.step, self._engine.latest_micro

    def _note_too_large(self, kind: str) -> None:
        self._engine.missed(
            f"tensors inside a {kind}",
            f"of one object {MOST_TENSORS} tensors are taken, {DEEPEST_ATTRIBUTE} levels deep",
        )


RUNNING_STATISTICS = frozenset({"_mean", "_variance"})
"""What Paddle's normalisations keep from call to call, as parameters that are not trained."""


def own_state(layer: nn.Layer) -> list[tuple[Role, str, paddle.Tensor]]:
    """The layer's own parameters and buffers: what a call reads besides its inputs."""
    found: list[tuple[Role, str, paddle.Tensor]] = []
    for name, tensor in layer._parameters.items():
        if tensor is not None:
            is_state = name in RUNNING_STATISTICS and tensor.stop_gradient
            found.append(("state" if is_state else "parameter", name, tensor))
    found += [("state", name, tensor) for name, tensor in layer._buffers.items() if tensor is not None]
    return found


class _Hook(TransparentHook):
    """A hook on a layer."""

    __slots__ = ("_capture", "_site")

    def __init__(self, capture: LayerCapture, site: Site) -> None:
        self._capture = capture
        self._site = site

    def _is_active(self) -> bool:
        engine = self._capture._engine
        return engine.in_own_process and (engine.recording or engine.has_open_calls)

    def _failed(self, error: Exception) -> None:
        self._capture._engine.failed(f"the call of {self._site.name}", error)


class _BeforeHook(_Hook):
    __slots__ = ()

    def __call__(self, layer: nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_active():
            try:
                # Paddle calls its hooks in a function inside the one that makes the call.
                self._capture.before(self._site, layer, args, kwargs, sys._getframe(1))
            except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
                self._failed(error)


class _AfterHook(_Hook):
    __slots__ = ()

    def __call__(self, layer: nn.Layer, _args: tuple[Any, ...], result: Any) -> None:
        if self._is_active():
            try:
                self._capture.after(self._site, layer, result)
            except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
                self._failed(error)
