"""Follows what `fully_shard` does to a model, as far as a recording must know of it.

FSDP keeps only a shard of each parameter, and for the time of a call puts the whole parameter in its place: always the
same tensor, whose memory it frees and fills again without telling the version counter. Used by `modules`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentitySet

Source = tuple[int, ...]


class Gathered(NamedTuple):
    """A parameter gathered for a call: the module that owns it, its name there, its shard and the whole."""

    owner: nn.Module
    name: str
    shard: nn.Parameter
    whole: nn.Parameter


class Gatherings:
    """Knows which parameters are gathered ones, and which of them were filled with other numbers than before.

    `put_hooks` and `take_hooks` are for a module that was sharded while it had hooks already; `filled` is called for
    each parameter that was gathered for the first time, or from a shard that has changed since the last time.
    """

    def __init__(
        self,
        engine: Engine,
        put_hooks: Callable[[nn.Module], None],
        take_hooks: Callable[[nn.Module], None],
        filled: Callable[[Gathered], None],
    ) -> None:
        self._engine = engine
        self._put_hooks = put_hooks
        self._take_hooks = take_hooks
        self._filled = filled
        self._whole: set[type[nn.Module]] = set()  # classes whose modules are not sharded
        self._met: IdentitySet[nn.Module] = IdentitySet()
        self._sources: dict[int, tuple[weakref.ref[nn.Parameter], Source]] = {}

    def __bool__(self) -> bool:
        """Whether any parameter has ever been gathered."""
        return bool(self._sources)

    def source(self, parameter: torch.Tensor) -> Source | None:
        """What a gathered parameter was made of. Its numbers are the same for as long as this is; None for others."""
        known = self._sources.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def is_gathered(self, parameter: torch.Tensor) -> bool:
        """Whether it is a whole parameter in the place of its shard, which is where its gradient will go."""
        return self.source(parameter) is not None

    def check(self, module: nn.Module) -> None:
        """A module is called, and FSDP's own hooks have run."""
        kind = type(module)
        if kind in self._whole:
            return
        if not is_sharded(module):
            self._whole.add(kind)  # `fully_shard` gives a module another class
            return
        if module not in self._met:
            self._met.add(module)
            self._take_hooks(module)  # to come after those of FSDP, which changes the result in one
            self._put_hooks(module)
        try:
            for gathered in _gathered(module):
                self._look_at(gathered)
        except AttributeError as error:  # these are torch's private parts
            self._engine.missed("which parameters FSDP has gathered", f"this torch keeps them elsewhere ({error})")

    def _look_at(self, gathered: Gathered) -> None:
        shard: Any = gathered.shard
        local = shard._local_tensor
        # Optimizers write to a shard without any version counter knowing.
        source = (shard._version, local._version, local.data_ptr(), self._engine.tensors.forgotten)
        if self.source(gathered.whole) != source:
            self._sources[id(gathered.whole)] = (weakref.ref(gathered.whole), source)
            self._filled(gathered)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to this very module, rather than to one around it."""
    return hasattr(type(module), "_get_fsdp_state")


def _gathered(module: Any) -> Iterator[Gathered]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # in older versions of torch, which have one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)  # not before the first gathering
            if whole is not None:
                info = parameter._module_info
                yield Gathered(info.module, info.param_name, parameter.sharded_param, whole)
