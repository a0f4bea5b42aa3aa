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
from torch.nn.parameter import is_lazy

from astray.capture.engine import Engine, Site
from astray.capture.pytorch.gradients import InputEdges, LiveGradients
from astray.capture.structure import Flattener
from astray.errors import RecordError
from astray.record import ROOT, Role


class ModuleCapture:
    """Records every call of the modules it is attached to, until `detach`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flat = Flattener(lambda value: isinstance(value, torch.Tensor))
        self._gradients = LiveGradients()
        self._sites: weakref.WeakKeyDictionary[nn.Module, Site] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._states: dict[str, list[Any]] = {}
        self._choosy: list[weakref.ref[nn.Module]] = []
        self._called = False

    def attach(self, root: nn.Module, label: str = "") -> None:
        """Puts hooks on `root` and everything in it; sites carry `label` in front when there is one."""
        prefix = f"{label}." if label else ""
        for name, module in root.named_modules():
            if module not in self._sites:
                site = Site(prefix + name if name else label or ROOT, _type(module), label)
                self._claim_name(site.name, module)
                self._sites[module] = site
                self._put_hooks(module)
                if isinstance(module, nn.TransformerEncoderLayer):
                    self._choosy.append(weakref.ref(module))
                if _is_compiled(module):
                    self._engine.missed(f"calls inside {site.name}", "torch.compile runs them as one graph")
        for name, parameter in root.named_parameters():
            self._watch_parameter(parameter, prefix + name, label)
        self._suit_the_choosy()

    def _claim_name(self, name: str, module: nn.Module) -> None:
        if name in self._names:
            raise RecordError(f"Two modules would both be recorded as {name!r}. Give the models other names.")
        self._names[name] = module

    def _put_hooks(self, module: nn.Module) -> None:
        site = self._sites[module]
        before, after = _BeforeHook(self._engine, self._before, site), _AfterHook(self._engine, self._after, site)
        self._hooks[module] = handles = []  # known before it is filled, should one of these fail
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _take_hooks(self, module: nn.Module) -> None:
        for handle in self._hooks.pop(module, ()):
            handle.remove()

    def _watch_parameter(self, parameter: torch.Tensor, name: str, label: str) -> None:
        """Sees the gradients of a parameter from now on, unless it does already or there will be none."""
        known = self._parameters.get(id(parameter))
        if (known is not None and known[0]() is parameter) or is_lazy(parameter):
            return
        if parameter.requires_grad and parameter.is_leaf:
            hook = _GradientHook(self._engine, Site(name, "Parameter", label, kind="parameter"))
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._parameters[id(parameter)] = (weakref.ref(parameter), handle)

    def _suit_the_choosy(self) -> None:
        """Takes hooks off transformer layers in eval mode, and puts them back for training.

        torch has a faster path for inference, with other roundings, and leaves it when any module inside has a hook.
        """
        for reference in self._choosy:
            layer = reference()
            if layer is None or layer.training == (layer in self._hooks):
                continue
            for module in layer.modules():
                if layer.training and module in self._sites:
                    self._put_hooks(module)
                else:
                    self._take_hooks(module)
            if not layer.training:
                why = "in eval mode torch computes it in one piece, unless there are hooks"
                self._engine.missed(f"calls of {self._sites[layer].name} and inside it", why)

    def site(self, module: nn.Module) -> Site | None:
        """Where calls of `module` are recorded; None when it is not known yet."""
        return self._sites.get(module)

    def next_step(self) -> None:
        """Ends the step: gradients that are still being summed are written as they are."""
        self._gradients.finish()
        self._states.clear()
        self._suit_the_choosy()

    def detach(self) -> None:
        """Removes every hook, from modules, parameters and whatever graphs still live."""
        for module in list(self._hooks):
            self._take_hooks(module)
        for _, handle in self._parameters.values():
            handle.remove()
        try:
            self._gradients.finish()
        finally:
            self._gradients.remove()
        if not self._called:
            why = "none was made while recording; compiled code, for one, runs without hooks"
            self._engine.missed("any call of a module", why)
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
        self._called = True
        if self._choosy:
            self._suit_the_choosy()
        inputs, skeleton = self._flat.arguments(args, kwargs)
        recompute = torch._C._current_graph_task_id() >= 0  # a forward inside a backward: checkpointing
        call = engine.enter(site, frame, skeleton, recompute=recompute)
        for path, tensor in inputs:
            engine.observe(call.seq, "input", path, tensor)
        if module._parameters or module._buffers:
            self._observe_state(site, module, call.seq)
        if torch.is_grad_enabled():
            call.adapter = InputEdges(inputs)

    def _observe_state(self, site: Site, module: nn.Module, seq: int) -> None:
        """The module's own parameters and buffers, at its first call of a step and whenever they have changed."""
        state: list[tuple[Role, str, torch.Tensor]] = []
        state += [("parameter", name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        state += [("state", name, tensor) for name, tensor in module._buffers.items() if tensor is not None]
        now = [(id(tensor), self._engine.reader.identity(tensor)) for _, _, tensor in state]
        if self._states.get(site.name) == now and all(identity is not None for _, identity in now):
            return
        self._states[site.name] = now
        prefix = "" if site.name == ROOT else f"{site.name}."
        for role, name, tensor in state:
            self._engine.observe(seq, role, name, tensor)
            if role == "parameter":  # it may have been made, replaced or unfrozen since the start
                self._watch_parameter(tensor, prefix + name, site.root)

    def _after(self, site: Site, result: Any) -> None:
        call = self._engine.leave(site)
        if call is None:
            return
        edges, call.adapter = call.adapter, None
        frame, call.frame = call.frame, None  # a frame holds everything its function does
        if result is None and not call.recompute:  # checkpointing stops work done again by an exception of its own
            self._note_exception(site, frame)
        outputs = self._flat.result(result)
        for path, tensor in outputs:
            self._engine.observe(call.seq, "output", path, tensor)
        if edges is not None:
            self._gradients.watch(self._engine, call, edges, outputs)

    def _note_exception(self, site: Site, frame: FrameType | None) -> None:
        """Says so when the call ended by an exception: one that is being handled, and came through the call."""
        error = sys.exc_info()[1]
        traceback = None if error is None else error.__traceback__
        while traceback is not None:
            if traceback.tb_frame is frame:
                self._engine.missed(f"the output of {site.name}", f"it raised {type(error).__name__}")
                return
            traceback = traceback.tb_next


class _Hook:
    """A hook that copies and pickles as one that does nothing, in words of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _CallHook(_Hook):
    """Sits on a module. Other tools may move a module's hooks and forget how they were to be called."""

    __slots__ = ("action", "engine", "site")

    def __init__(self, engine: Engine, action: Callable[..., None], site: Site) -> None:
        self.engine = engine
        self.action = action
        self.site = site

    def sleeps(self) -> bool:
        """Whether nothing may be done now: a compiler or tracer would take it for a part of the model."""
        if is_compiling():
            return True
        if not self.engine.recording and not self.engine.has_open_calls:
            return True
        return torch._C._get_tracing_state() is not None or not self.engine.belongs_here()


class _BeforeHook(_CallHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.sleeps():
            return
        try:
            self.action(self.site, module, args, kwargs or {})
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self.engine.failed(f"the call of {self.site.name}", error)


class _AfterHook(_CallHook):
    __slots__ = ()

    def __call__(self, _module: nn.Module, _args: Any, *rest: Any) -> None:
        if self.sleeps():
            return
        try:
            self.action(self.site, rest[-1])  # the result comes last, with and without keyword arguments before it
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
            if parameter.grad is None:
                engine.missed(f"the gradient of {self.site.name}", "another hook took it away first")
            else:
                engine.observe(engine.event(self.site, "backward"), "gradient", "grad", parameter.grad)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"the gradient of {self.site.name}", error)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_torchdynamo_orig_callable")


def _type(module: nn.Module) -> str:
    return type(module).__name__
