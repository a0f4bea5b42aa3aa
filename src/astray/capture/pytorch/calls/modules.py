"""Puts hooks on the modules of a model and turns their calls into records.

Feeds the engine; uses `gradients` for the backward. A hook does nothing while torch.compile traces it, so a compiled
region runs as it would without astray, and the run says that the calls inside it were not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentityMap
from astray.capture.nonfinite_values import ObservedTensor
from astray.capture.pytorch.calls.call_capture import Tensors, flattener
from astray.capture.pytorch.calls.catalogue import RUNNING_STATISTICS
from astray.capture.pytorch.calls.modes import InferenceFastPaths, Modes
from astray.capture.pytorch.calls.wrappers import (
    Arguments,
    Chain,
    ChildModules,
    DoubleCallFilter,
    GatheredParameter,
    GatheredParameters,
    can_be_called,
    chains,
    hides_gradients,
    is_compiled,
    is_scripted,
    type_name,
)
from astray.capture.pytorch.calls.wrappers import state as state_of
from astray.capture.pytorch.compiled.dynamo import BuiltinForwards, CompiledCodeWatch, never_compiled
from astray.capture.pytorch.gradients import InputEdges, LiveGradients, NodeOrigins, ParameterCapture
from astray.capture.pytorch.hooks import HookFreeCopies, TransparentHook
from astray.capture.pytorch.native.core import OpenCall, Site, _torch
from astray.capture.pytorch.setup_capture import SetupCapture
from astray.capture.pytorch.shards import is_distributed
from astray.capture.sites import ModuleTree, Sites
from astray.capture.structure import DEEPEST_ATTRIBUTE, MOST_TENSORS, ObjectFlattener
from astray.interrupts import pass_interrupt
from astray.records import ROOT

if TYPE_CHECKING:
    from astray.capture.pytorch._torch import WatchedModule
    from astray.capture.pytorch.compiled.taps import Taps


class ModuleCapture:
    """Records every call of the modules it is attached to, until `detach`."""

    def __init__(self, engine: Engine, gradients: LiveGradients, modes: Modes, origins: NodeOrigins) -> None:
        self._engine = engine
        self._flat = flattener(ObjectFlattener(_torch, epoch=self._epoch), self._note_too_large)
        self._gradients = gradients
        self._modes = modes
        self._origins = origins
        self._sites = Sites(_torch, ModuleTree(chains, type_name), self._leave_out)
        self._watched: IdentityMap[nn.Module, WatchedModule] = IdentityMap()
        self._forwards = BuiltinForwards()
        tapped = "modules" in engine.settings.compiled
        self._taps = self._make_taps() if tapped else None
        self._compiled = CompiledCodeWatch(engine, self._sites.of, tapped=tapped)
        self._hooks: IdentityMap[nn.Module, list[Any]] = IdentityMap()
        self.parameters = ParameterCapture(engine)
        self._states: dict[str, list[Any]] = {}
        self._updated_statistics: set[str] = set()  # sites whose running statistics their last call has moved
        self._fast_paths = InferenceFastPaths(modes, self._add_hooks, self._remove_hooks, self._note_fast_path)
        self._gathered = GatheredParameters(engine, self._add_hooks, self._remove_hooks, self._filled)
        self.setup = SetupCapture(engine, self._sites.chains, self._sites.of, self.parameters.writes)
        self._any_called = False
        self._native = _torch.ModuleCalls(
            engine, self, self._flat.native, gradients, InputEdges, modes, origins, self._fast_paths, self._gathered,
            self.parameters, nn.Parameter,
        )  # fmt: skip
        self.enter: Callable[[Site, nn.Module, tuple[Any, ...], dict[str, Any], FrameType], Arguments | None]
        self.enter = self._native.enter
        """A module is about to run. Returns what it is to be given instead, if grafts replace that."""
        self._double_calls = DoubleCallFilter(engine, self.enter, self._native.leave)
        self._listening = True
        self._compiled.start()
        self._copies = HookFreeCopies()

    def attach(self, root: nn.Module, label: str = "") -> None:
        """Puts hooks on `root` and everything in it; sites carry `label` in front when there is one."""
        added = self._sites.add(root, label)
        self._watch_chains(added)
        self._watch_parameters(added)
        self.setup.modules_changed()

    def _resync(self, module: nn.Module) -> Site | None:
        """Updates names and hooks after a model has changed: layers were added, replaced or wrapped.

        Returns the site of `module`, at whose call the change was found.
        """
        removed, added = self._sites.renew()
        for gone in removed:
            self._remove_hooks(gone)
            self._watched.pop(gone, None)
            for parameter in gone._parameters.values():
                self.parameters.forget(parameter)
        self._watch_chains(added)
        self._watch_parameters(self._sites.chains())
        for known, watched in list(self._watched.items()):
            watched.children = ChildModules(known)
        self.setup.modules_changed()
        return self._sites.of(module)

    def _watch_chains(self, chains: list[Chain]) -> None:
        self._forwards.skip(chain.inner for chain in chains if chain.inner not in self._watched)
        for chain in chains:
            try:
                self._watch_chain(chain)
            except Exception as error:  # noqa: BLE001, PERF203 - the others can be watched all the same
                self._leave_out(chain, error)
        self._fast_paths.check()

    def _watch_chain(self, chain: Chain) -> None:
        inner, recorder = chain.inner, chain.recorder
        if recorder is not inner:
            self._remove_hooks(inner)
            self._watched[recorder] = _torch.WatchedModule(
                self._double_calls.before_wrapper, None, ChildModules(recorder)
            )
            self._watched[inner] = _torch.WatchedModule(
                self._double_calls.before_inner, self._double_calls.after_inner, ChildModules(inner)
            )
        elif inner not in self._watched:
            self._watched[inner] = _torch.WatchedModule(None, None, ChildModules(inner))
        self._add_hooks(recorder)
        self._add_hooks(inner)
        self._fast_paths.add(inner)
        self._compiled.add_module(inner)
        self._note_hidden_gradients(chain)

    def _leave_out(self, chain: Chain, error: Exception) -> None:
        """A module cannot be watched: its own code raised while its hooks were put in place."""
        pass_interrupt(error)
        for module in chain.modules:
            self._remove_hooks(module)
            self._watched.pop(module)
        site = self._sites.of(chain.inner)
        name = (chain.name or ROOT) if site is None else site.name
        self._engine.missed(f"calls of {name}", f"it cannot be watched ({type(error).__name__}: {error})")

    def _note_hidden_gradients(self, chain: Chain) -> None:
        site = self._sites.of(chain.inner)
        if site is not None and any(map(hides_gradients, chain.modules)):
            why = "FullyShardedDataParallel has them in a flat tensor of its own; fully_shard has not"
            self._engine.missed(f"the gradients of the parameters in {site.name}", why)

    def _watch_parameters(self, chains: list[Chain]) -> None:
        for module in (module for chain in chains for module in chain.modules):
            site = self._sites.of(module)
            if site is not None:
                prefix = "" if site.name == ROOT else f"{site.name}."
                for name, parameter in module._parameters.items():
                    if parameter is not None and not self._gathered.is_gathered(parameter):
                        self._watch_parameter(parameter, prefix + name, site.name, site.root)

    def _watch_parameter(self, parameter: torch.Tensor, name: str, module: str, root: str) -> None:
        """Watches the gradients of a parameter. One that accepts no hooks does not affect the others."""
        try:
            self.parameters.watch(parameter, name, module, root)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            pass_interrupt(error)
            self._engine.missed(f"the gradient of {name}", f"it takes no hooks ({type(error).__name__}: {error})")

    def _add_hooks(self, module: nn.Module) -> None:
        site, watched = self._sites.of(module), self._watched.get(module)
        if site is None or watched is None or module in self._hooks or not (self._listening or self._taps):
            return
        before = _BeforeHook(self._native, site, watched, watched.before, self._resync)
        after = _AfterHook(self._native, site, watched, watched.after, self._resync)
        self._hooks[module] = handles = []  # stored before it is filled, in case one of these raises
        # By torch's own methods: a class may override them with ones that raise, or take fewer arguments.
        handles.append(nn.Module.register_forward_pre_hook(module, before, with_kwargs=True))
        handles.append(nn.Module.register_forward_hook(module, after, with_kwargs=True, always_call=True))
        if self._taps is not None:
            handles += self._taps.put(module, site.name)

    def _remove_hooks(self, module: nn.Module) -> None:
        for handle in self._hooks.pop(module, ()):
            handle.remove()

    def _epoch(self) -> tuple[int, int]:
        """When it changes, tensors inside objects are recorded again."""
        return self._engine.step, self._engine.latest_micro

    def _note_too_large(self, kind: str) -> None:
        self._engine.missed(
            f"tensors inside a {kind}",
            f"of one object {MOST_TENSORS} tensors are taken, {DEEPEST_ATTRIBUTE} levels deep",
        )

    def _note_fast_path(self, layer: nn.Module) -> None:
        site = self._sites.of(layer)
        if site is not None:
            why = "in eval mode torch computes it in one piece, unless there are hooks"
            self._engine.missed(f"calls of {site.name} and inside it", why)

    def site(self, module: nn.Module) -> Site | None:
        """The site of `module`; None when it is not attached yet."""
        return self._sites.of(module)

    def graft(self, grafts: Any) -> None:
        """From now on `grafts`, a `Grafts`, replaces what calls are given and return; None ends that."""
        self._native.graft(grafts)

    def enter_running_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Arguments | None:
        """A module is about to run that was attached only after torch had collected the hooks of this call."""
        site, watched = self._sites.of(module), self._watched.get(module)
        if site is None or watched is None:  # what it wraps is recorded, and has its hooks in time
            return None
        watched.called = True
        instead = self.enter(site, module, args, kwargs, frame)
        if watched.before == self._double_calls.before_wrapper:
            self._double_calls.wrapper_entered(site)
        return instead

    def set_listening(self, on: bool) -> None:
        """Adds the hooks, or removes them: a step that is not recorded should cost nothing."""
        self.parameters.set_listening(on)
        if on != self._listening:
            self._listening = on
            for module in list(self._watched):
                if on:
                    self._add_hooks(module)
                elif self._taps is None:  # else code compiled without hooks would be used again when they are back
                    self._remove_hooks(module)
            self._fast_paths.check()

    def first_call(self, site: Site) -> None:
        """A module runs for the first time; called by a native hook."""
        self.setup.first_call(site)

    def next_step(self) -> None:
        """Ends the step."""
        self._states.clear()
        self._native.next_step()
        self._compiled.look_back(self._listening)
        if self._taps is not None:
            self._taps.next_step()
        self._fast_paths.check()

    def detach(self) -> None:
        """Removes every hook, from modules and parameters."""
        self._copies.remove()
        self._fast_paths.remove()
        for module in list(self._hooks):
            self._remove_hooks(module)
        self.parameters.remove()
        self._forwards.remove()
        self._compiled.stop(self._listening)
        if self._taps is not None:
            self._taps.remove()
        self._note_compiled()
        if not self._any_called:
            why = "none was made while recording; compiled code, for one, runs without hooks"
            self._engine.missed("any call of a module", why)
        self._watched.clear()
        self._sites.clear()

    def _make_taps(self) -> Taps:
        from astray.capture.pytorch.compiled.taps import (
            Taps,  # which takes more of torch's private parts than others need
        )

        return Taps(self._engine, self._tapped, self._observe_state)

    def _tapped(self, name: str) -> tuple[Site, nn.Module] | None:
        """The module of that name is called inside compiled code."""
        named = self._sites.named(name)
        watched = None if named is None else self._watched.get(named[1])
        if watched is not None:
            self._any_called = watched.called = True
        return named

    def _note_compiled(self) -> None:
        """Reports what compiled code has hidden, or may have."""
        never = scripted = "\n"  # no name starts with it
        for module, watched in self._watched.items():
            site = self._sites.of(module)
            if site is None:
                continue
            if watched.called and is_scripted(module) and not site.name.startswith(scripted):
                scripted = f"{site.name}."
                if module._modules or "function" in self._engine.settings.level:
                    self._engine.missed(f"calls inside {site.name}", "TorchScript makes them, past all hooks")
            if watched.called and is_compiled(module):
                self._compiled.was_called(site)
            elif not watched.called and self._any_called and can_be_called(module) and not site.name.startswith(never):
                self._compiled.was_not_called(site)
                never = f"{site.name}."

    # -- what native hooks leave to Python -----------------------------------------------------------------------

    def _filled(self, gathered: GatheredParameter) -> None:
        """FSDP has gathered a whole parameter, in memory for which older measurements may be cached."""
        self._engine.tensors.changed(gathered.whole)
        site = self._sites.of(gathered.owner)
        if site is not None:
            name = gathered.name if site.name == ROOT else f"{site.name}.{gathered.name}"
            self._watch_parameter(gathered.shard, name, site.name, site.root)

    def _observe_state(self, site: Site, module: nn.Module, seq: int) -> None:
        """The module's own parameters and buffers, at its first call of a step and whenever they have changed."""
        state = state_of(module, self._taps is not None)
        moved = self._statistics_moved(site, module)
        now = [(id(tensor), self._key(tensor)) for _, _, tensor in state]
        if not moved and self._states.get(site.name) == now and all(key is not None for _, key in now):
            return
        self._states[site.name] = now
        prefix = "" if site.name == ROOT else f"{site.name}."
        for role, name, tensor in state:
            self._engine.tensors.observe(seq, role, name, tensor)
            # It may have been made, replaced or unfrozen since the start.
            if role == "parameter" and not self._gathered.is_gathered(tensor):
                full_name = prefix + name
                self._watch_parameter(tensor, full_name, full_name.rpartition(".")[0] or ROOT, site.root)

    def _statistics_moved(self, site: Site, module: nn.Module) -> bool:
        """Whether its last call has updated running statistics, which does not change their version counters."""
        running = [module._buffers[name] for name in RUNNING_STATISTICS if name in module._buffers]
        moved = bool(running) and site.name in self._updated_statistics
        if moved:
            self._updated_statistics.discard(site.name)
            for tensor in running:
                if tensor is not None:
                    self._engine.tensors.changed(tensor)
        if running and module.training:
            self._updated_statistics.add(site.name)
        return moved

    def _key(self, tensor: torch.Tensor) -> Hashable:
        """A key that changes when a tensor does, and does not keep its memory alive; None when there is none."""
        if type(tensor) is nn.Parameter and not self._gathered:
            try:
                return tensor._version, tensor.data_ptr(), tensor.numel()
            except RuntimeError as error:  # made in inference mode, or not dense
                pass_interrupt(error)
                return None
        source = self._gathered.source(tensor)
        if source is not None:  # the memory may be another each time
            return source
        identity = self._engine.tensors.reader.identity(tensor)
        if identity is None or not is_distributed(tensor):
            return None if identity is None else identity.key
        # Optimizers write to it without its version counter knowing.
        return identity.key, self._engine.tensors.forget_count

    def on_nonfinite(self, call: OpenCall, outputs: Tensors) -> None:
        """A call has returned NaN or infinities, and a guard keeps such calls. torch's frame has its arguments."""
        given = call.frame.f_locals if call.frame is not None else {}
        module, args, kwargs = (given.get(name) for name in ("self", "args", "kwargs"))
        if not isinstance(module, nn.Module) or not isinstance(args, tuple):
            return  # it was called in another way, of which nothing is kept
        inputs, skeleton = self._flat.arguments(args, kwargs or {})
        tensors: list[ObservedTensor] = [("input", *named) for named in inputs]
        tensors += [("output", *named) for named in outputs]
        tensors += state_of(module, self._taps is not None)
        self._engine.tensors.on_nonfinite(call.seq, tensors, skeleton)

    def _note_exception(self, site: Site, frame: FrameType | None) -> None:
        self._engine.note_exception(site, frame)


class _ModuleHook(TransparentHook):
    """The base of the hooks on modules. Other tools may move a module's hooks and lose their options."""

    __slots__ = ()
    engine: Engine
    site: Site

    @property
    def __name__(self) -> str:
        """torch.jit.script reads this of a hook in order to compile it, and cannot be made to skip one."""
        if Path(sys._getframe(1).f_code.co_filename).parent.name == "jit":
            self.engine.missed(f"torch.jit.script of {self.site.name}", "it cannot compile our hooks")
        raise AttributeError(
            f"astray is recording {self.site.name}, and torch.jit.script cannot compile its hooks. Script the model "
            "before the recording starts, or after it has stopped."
        )


class _BeforeHook(_torch.BeforeHook, _ModuleHook):  # type: ignore[misc]
    __slots__ = ()


class _AfterHook(_torch.AfterHook, _ModuleHook):  # type: ignore[misc]
    __slots__ = ()


@never_compiled
def _call_before(self: Any, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    """The `__call__` of a native hook that dynamo sees. Without a compiler the hook calls `run` natively."""
    return None if is_compiling() else self.run(module, args, kwargs)


@never_compiled
def _call_after(self: Any, _module: nn.Module, _args: Any, *rest: Any) -> Any:
    return None if is_compiling() else self.run(rest[-1])


_torch.set_python_call(_BeforeHook, _call_before)
_torch.set_python_call(_AfterHook, _call_after)
