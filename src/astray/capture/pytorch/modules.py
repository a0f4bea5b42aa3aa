"""Puts hooks on the modules of a model and turns their calls into records.

Feeds the engine; uses `gradients` for the backward. A hook does nothing while torch.compile traces it, so a compiled
region runs as it would without astray, and the run says that the calls inside it were not seen.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from astray.capture.engine import Engine, Site
from astray.capture.pytorch.gradients import InputEdges, LiveGradients
from astray.capture.structure import Flattener
from astray.record import ROOT, Role


class ModuleCapture:
    """Records every call of the modules it is attached to, until `detach`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flat = Flattener(lambda value: isinstance(value, torch.Tensor))
        self._gradients = LiveGradients()
        self._handles: list[Any] = []
        self._sites: weakref.WeakKeyDictionary[nn.Module, Site] = weakref.WeakKeyDictionary()
        self._parameters: set[int] = set()
        self._states: dict[str, tuple[int, ...]] = {}

    def attach(self, root: nn.Module, label: str = "") -> None:
        """Puts hooks on `root` and everything in it; sites carry `label` in front when there is one."""
        prefix = f"{label}." if label else ""
        for name, module in root.named_modules():
            if module not in self._sites:
                self._attach_module(module, Site(prefix + name if name else label or ROOT, _type(module), label))
        for name, parameter in root.named_parameters():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._parameters:
                self._parameters.add(id(parameter))
                hook = _GradientHook(self._engine, Site(prefix + name, "Parameter", label, kind="parameter"))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _attach_module(self, module: nn.Module, site: Site) -> None:
        self._sites[module] = site
        self._handles.append(
            module.register_forward_pre_hook(_CallHook(self._engine, self._before, site), with_kwargs=True)
        )
        self._handles.append(
            module.register_forward_hook(_CallHook(self._engine, self._after, site), with_kwargs=True, always_call=True)
        )
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_torchdynamo_orig_callable"):
            self._engine.missed(f"calls inside {site.name}", "torch.compile runs them as one graph")

    def site(self, module: nn.Module) -> Site | None:
        """Where calls of `module` are recorded; None when it is not known yet."""
        return self._sites.get(module)

    def next_step(self) -> None:
        """Ends the step: gradients that are still being summed are written as they are."""
        self._gradients.finish()
        self._states.clear()

    def detach(self) -> None:
        """Removes every hook, from modules, parameters and whatever graphs still live."""
        self._gradients.finish()
        self._gradients.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sites.clear()
        self._parameters.clear()

    # -- what the hooks do ---------------------------------------------------------------------------------------

    def _before(self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine.recording:
            # Above this frame are the hook object and then torch's own function that goes on to call `forward`.
            self.enter(site, module, args, kwargs, sys._getframe(2))

    def enter(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        """A module is about to run."""
        engine = self._engine
        inputs, skeleton = self._flat.arguments(args, kwargs)
        recompute = torch._C._current_graph_task_id() >= 0  # a forward inside a backward: checkpointing
        call = engine.enter(site, frame, skeleton, recompute=recompute)
        for path, tensor in inputs:
            engine.observe(call.seq, "input", path, tensor)
        self._observe_state(site, module, call.seq)
        if torch.is_grad_enabled():
            call.adapter = InputEdges(inputs)

    def _observe_state(self, site: Site, module: nn.Module, seq: int) -> None:
        """The module's own parameters and buffers, at its first call of a step and whenever they have changed."""
        if not (module._parameters or module._buffers):
            return
        state: list[tuple[Role, str, torch.Tensor]] = []
        state += [("parameter", name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        state += [("state", name, tensor) for name, tensor in module._buffers.items() if tensor is not None]
        versions = tuple(-1 if tensor.is_inference() else tensor._version for _, _, tensor in state)
        if self._states.get(site.name) != versions:
            self._states[site.name] = versions
            for role, name, tensor in state:
                self._engine.observe(seq, role, name, tensor)

    def _after(self, site: Site, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        call = self._engine.leave(site)
        if call is None:
            return
        edges, call.adapter = call.adapter, None
        raised = sys.exc_info()[0] if result is None else None
        if raised is not None and not call.recompute:  # checkpointing stops work done again by an exception of its own
            self._engine.missed(f"the output of {site.name}", f"it raised {raised.__name__}")
        outputs = self._flat.result(result)
        for path, tensor in outputs:
            self._engine.observe(call.seq, "output", path, tensor)
        if edges is not None:
            self._gradients.watch(self._engine, call, edges, outputs)


class _Hook:
    """A hook that copies and pickles as one that does nothing, in words of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _CallHook(_Hook):
    """Sits on a module."""

    __slots__ = ("action", "engine", "site")

    def __init__(self, engine: Engine, action: Callable[..., None], site: Site) -> None:
        self.engine = engine
        self.action = action
        self.site = site

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *result: Any) -> None:
        if is_compiling() or not self.engine.belongs_here():
            return
        try:
            self.action(self.site, module, args, kwargs, *result)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self.engine.failed(f"the call of {self.site.name}", error)


class _GradientHook(_Hook):
    """Sits on a parameter and sees its gradient each time something was added to it."""

    __slots__ = ("engine", "site")

    def __init__(self, engine: Engine, site: Site) -> None:
        self.engine = engine
        self.site = site

    def __call__(self, parameter: torch.Tensor) -> None:
        engine = self.engine
        if not engine.recording or is_compiling() or not engine.belongs_here():
            return
        try:
            if parameter.grad is not None:
                engine.observe(engine.event(self.site, "backward"), "gradient", "grad", parameter.grad)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the gradient of {self.site.name}", error)


def _type(module: nn.Module) -> str:
    return type(module).__name__
