"""Sees through what wraps a module, so that a site is called the same with and without torch.compile, DDP or FSDP.

Used by `modules` when it names sites and when a model changes under it. A wrapper is recognised by its class, never by
the name of its child alone: a module of the user's own may have a child called `module`. `GatheredParameters` follows
what `fully_shard`, which wraps nothing, does to the parameters of a model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentityMap, IdentitySet, same
from astray.capture.pytorch.native.core import Site
from astray.capture.sites import site_name, walk
from astray.records import Role

_OPTIMIZED = "torch._dynamo.eval_frame.OptimizedModule"
_FULLY_SHARDED = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_WRAPPERS = {
    _OPTIMIZED: "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    _FULLY_SHARDED: "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
}
"""Under which name each kind of wrapper holds what it wraps. As texts, so that none of these has to be imported."""

_DISGUISES = ("FSDP", "Replicate", "DDP", "Parametrized")
"""Prefixes of the classes that torch puts in the place of a module's own: `FSDPLinear`, `ParametrizedLinear`."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is to be called with instead, by position and by name."""


class Chain(NamedTuple):
    """A module with all that wraps it, outermost first. Together they are one site."""

    name: str  # as torch would call the module if nothing were wrapped; empty for the outermost
    modules: tuple[nn.Module, ...]

    @property
    def inner(self) -> nn.Module:
        """The module itself."""
        return self.modules[-1]

    @property
    def recorder(self) -> nn.Module:
        """The one whose calls are recorded: the outermost that is compiled, since calls inside it may not be seen."""
        return next(filter(is_compiled, self.modules), self.inner)


def chains(module: nn.Module, seen: dict[int, nn.Module] | None = None, name: str = "") -> Iterator[Chain]:
    """Every module in `module`, itself first, in torch's order. What is in `seen` already is left out."""
    walked = walk(module, {} if seen is None else seen, name, unwrapped, lambda link: link._modules)
    return (Chain(*named) for named in walked)


def unwrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    attribute = _wrapping(type(module))[1]
    return None if attribute is None else module._modules.get(attribute)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs this module, as a wrapper around it or in place."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    context = module.__dict__.get("dynamo_ctx")  # asked first, for it is the cheaper question
    if context is None or _wrapping(type(module))[0] != _OPTIMIZED:
        return False
    return type(context).__name__ != "DisableContext"  # torch.compiler.disable makes the same wrapper, to another end


def hides_gradients(module: nn.Module) -> bool:
    """Whether the parameters in this wrapper only look like ones, with their gradients going to a flat tensor."""
    return _wrapping(type(module))[0] == _FULLY_SHARDED and bool(getattr(module, "_use_orig_params", False))


def type_name(module: nn.Module) -> str:
    """The name of the class that the user knows the module by."""
    while (wrapped := unwrapped(module)) is not None:
        module = wrapped
    kind = type(module)
    if issubclass(kind, LazyModuleMixin):  # turns into it at its first call
        return (kind.cls_to_become or kind).__name__
    while kind.__module__.startswith("torch."):
        own = kind.__bases__[-1]
        if kind.__name__ not in {prefix + own.__name__ for prefix in _DISGUISES}:
            break
        kind = own
    return kind.__name__


def raw_names(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """The sites of the modules whose names in torch are others, because something around them is a wrapper."""
    changed: dict[str, str] = {}
    for label, root in models.items():
        names = {module: name for name, module in root.named_modules()}
        for chain in chains(root):
            site, raw = site_name(label, chain.name), site_name(label, names.get(chain.inner, chain.name))
            if site != raw:
                changed[site] = raw
    return changed


def state(module: nn.Module, inside: bool) -> list[tuple[Role, str, torch.Tensor]]:
    """The state that a call of `module` reads besides its inputs: its own parameters and buffers.

    For a compiled module also those of everything in it, unless the calls `inside` are seen.
    """
    if not is_compiled(module):
        return _own_state(module, "")
    tensors: list[tuple[Role, str, torch.Tensor]] = []
    for chain in chains(module):
        for link in chain.modules:
            tensors += _own_state(link, f"{chain.name}." if chain.name else "")
        if inside:
            break
    return tensors


def _own_state(module: nn.Module, prefix: str) -> list[tuple[Role, str, torch.Tensor]]:
    tensors: list[tuple[Role, str, torch.Tensor]] = []
    tensors += [
        ("parameter", prefix + name, tensor) for name, tensor in module._parameters.items() if tensor is not None
    ]
    tensors += [("state", prefix + name, tensor) for name, tensor in module._buffers.items() if tensor is not None]
    return tensors


def can_be_called(module: nn.Module) -> bool:
    """Whether it has a `forward` at all. Lists and dicts of modules have none."""
    return "forward" in vars(module) or forward_of(type(module)) is not nn.Module.forward


def forward_of(kind: type[nn.Module]) -> Any:
    """The `forward` that a class defines. Read by `getattr`, that of TorchScript raises."""
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs this module, and all modules in it, past every hook of theirs."""
    return isinstance(module, torch.jit.ScriptModule)


def has_parameters(module: nn.Module) -> bool:
    """Whether it holds any parameter. A program may override `parameters()`, so that is not called."""
    links = (link for chain in chains(module) for link in chain.modules)
    return any(parameter is not None for link in links for parameter in link._parameters.values())


def _wrapping(kind: type[nn.Module]) -> tuple[str, str | None]:
    """The kind of wrapper that a class is, and the attribute that holds the wrapped module."""
    known = _KINDS.get(kind)
    if known is None:
        bases = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
        name = next(filter(_WRAPPERS.__contains__, bases), "")
        known = _KINDS[kind] = name, _WRAPPERS.get(name)
    return known


_KINDS: IdentityMap[type[nn.Module], tuple[str, str | None]] = IdentityMap()


class ChildModules:
    """The modules right below one, looking through lists and dicts of modules, which are never called themselves.

    Held themselves, not by their ids, which may be reused. The module itself is not held, since its hooks hold this.
    """

    __slots__ = ("_direct", "_lists")

    def __init__(self, module: nn.Module) -> None:
        self._direct = tuple(module._modules.values())
        self._lists = [(parent, tuple(parent._modules.values())) for parent in _lists(module)]

    def of(self, module: nn.Module) -> bool:
        """Whether they still are the children of `module`: none was added, replaced or removed since."""
        if not same(self._direct, module._modules.values()):
            return False
        return not self._lists or all(same(known, parent._modules.values()) for parent, known in self._lists)


def _lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module._modules.values():
        if child is not None and not can_be_called(child):
            yield child
            yield from _lists(child)


class DoubleCallFilter:
    """Makes one call of what a compiled wrapper and the module in it would both report.

    The module's own hooks do not run while it is compiled. They do run when torch.compile falls back to eager
    execution, and when the program calls the module without its wrapper.
    """

    def __init__(
        self,
        engine: Engine,
        enter: Callable[[Site, nn.Module, tuple[Any, ...], dict[str, Any], FrameType], Arguments | None],
        leave: Callable[[Site, Any], Any],
    ) -> None:
        self._engine = engine
        self._enter = enter
        self._leave = leave

    def before_wrapper(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not self._engine.recording:
            return None
        instead = self._enter(site, module, args, kwargs, sys._getframe(2))
        self.wrapper_entered(site)
        return instead

    def wrapper_entered(self, site: Site) -> None:
        """The call of a wrapper has just been recorded."""
        call = self._engine.innermost(site)
        if call is not None:
            call.runs_inner = False

    def before_inner(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        call = self._engine.innermost(site)
        if call is not None and call.runs_inner is False:
            call.runs_inner = True  # should it call itself from there, that is a call of its own
        elif self._engine.recording:
            return self._enter(site, module, args, kwargs, sys._getframe(2))
        return None

    def after_inner(self, site: Site, result: Any) -> Any:
        call = self._engine.innermost(site)
        if call is not None and call.runs_inner:
            call.runs_inner = False
            return result
        return self._leave(site, result)


Source = tuple[int, ...]
"""Versions and address of the shard that a parameter was gathered from."""


class GatheredParameter(NamedTuple):
    """A parameter gathered for a call: the module that owns it, its name there, its shard and the whole."""

    owner: nn.Module
    name: str
    shard: nn.Parameter
    whole: nn.Parameter


class GatheredParameters:
    """Knows which parameters FSDP has gathered, and which of them were filled with other numbers than before.

    FSDP keeps only a shard of each parameter, and for the time of a call puts the whole parameter in its place: always
    the same tensor, whose memory it frees and fills again without changing its version counter.

    `add_hooks` and `remove_hooks` are for a module that was sharded while it had hooks already; `filled` is called for
    each parameter that was gathered for the first time, or from a shard that has changed since the last time.
    """

    def __init__(
        self,
        engine: Engine,
        add_hooks: Callable[[nn.Module], None],
        remove_hooks: Callable[[nn.Module], None],
        filled: Callable[[GatheredParameter], None],
    ) -> None:
        self._engine = engine
        self._add_hooks = add_hooks
        self._remove_hooks = remove_hooks
        self._filled = filled
        self._unsharded_types: set[type[nn.Module]] = set()  # classes whose modules are not sharded
        self._met: IdentitySet[nn.Module] = IdentitySet()
        self._sources: dict[int, tuple[weakref.ref[nn.Parameter], Source]] = {}

    def __bool__(self) -> bool:
        """Whether any parameter has ever been gathered."""
        return bool(self._sources)

    def source(self, parameter: torch.Tensor) -> Source | None:
        """The state of the shard that a gathered parameter was made from; None for other parameters."""
        known = self._sources.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def is_gathered(self, parameter: torch.Tensor) -> bool:
        """Whether it is a whole parameter in place of its shard, which will receive its gradient."""
        return self.source(parameter) is not None

    def check(self, module: nn.Module) -> None:
        """A module is called, and FSDP's own hooks have run."""
        kind = type(module)
        if kind in self._unsharded_types:
            return
        if not is_sharded(module):
            self._unsharded_types.add(kind)  # `fully_shard` gives a module another class
            return
        if module not in self._met:
            self._met.add(module)
            self._remove_hooks(module)  # to come after those of FSDP, which changes the result in one
            self._add_hooks(module)
        try:
            for gathered in _gathered(module):
                self._look_at(gathered)
        except AttributeError as error:  # these are torch's private parts
            self._engine.missed("which parameters FSDP has gathered", f"this torch keeps them elsewhere ({error})")

    def _look_at(self, gathered: GatheredParameter) -> None:
        shard: Any = gathered.shard
        local = shard._local_tensor
        # Optimizers write to a shard without changing any version counter.
        source = (shard._version, local._version, local.data_ptr(), self._engine.tensors.forget_count)
        if self.source(gathered.whole) != source:
            self._sources[id(gathered.whole)] = (weakref.ref(gathered.whole), source)
            self._filled(gathered)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to this very module, rather than to one around it."""
    return hasattr(type(module), "_get_fsdp_state")


def _gathered(module: Any) -> Iterator[GatheredParameter]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # in older versions of torch, which have one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)  # not before the first gathering
            if whole is not None:
                info = parameter._module_info
                yield GatheredParameter(info.module, info.param_name, parameter.sharded_param, whole)
