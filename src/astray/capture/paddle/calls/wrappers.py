"""Sees through what wraps a layer or an optimizer, so that a site is called the same with and without DataParallel.

A wrapper is recognised by its class, never by the name of its child alone: a layer of the user's own may have a child
called `_layers`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from paddle import nn

from astray.capture.identity_map import IdentityMap, same
from astray.capture.sites import site_name, walk

_WRAPPERS = {
    "paddle.distributed.parallel.DataParallel": "_layers",
    "paddle.distributed.fleet.meta_parallel.meta_parallel_base.MetaParallelBase": "_layers",
    "paddle.distributed.fleet.utils.mix_precision_utils.MixPrecisionLayer": "_layers",
    "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2.GroupShardedStage2": "_layer",
    "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3.GroupShardedStage3": "_layer",
}
"""Under which name each kind of wrapper holds what it wraps. As texts, so that none of these has to be imported."""


class Chain(NamedTuple):
    """A layer with all that wraps it, outermost first. Together they are one site."""

    name: str  # as Paddle would call the layer if nothing were wrapped; empty for the outermost
    modules: tuple[nn.Layer, ...]

    @property
    def inner(self) -> nn.Layer:
        """The layer itself, whose calls are recorded."""
        return self.modules[-1]


def chains(layer: nn.Layer, seen: dict[int, nn.Layer] | None = None, name: str = "") -> Iterator[Chain]:
    """Every layer in `layer`, itself first, in Paddle's order. What is in `seen` already is left out."""
    walked = walk(layer, {} if seen is None else seen, name, unwrapped, lambda link: link._sub_layers)
    return (Chain(*named) for named in walked)


def unwrapped(layer: nn.Layer) -> nn.Layer | None:
    """What a wrapper wraps; None for any other layer."""
    kind = type(layer)
    if kind not in _ATTRIBUTES:
        bases = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
        _ATTRIBUTES[kind] = next((_WRAPPERS[base] for base in bases if base in _WRAPPERS), None)
    attribute = _ATTRIBUTES.get(kind)
    return None if attribute is None else layer._sub_layers.get(attribute)


_ATTRIBUTES: IdentityMap[type, str | None] = IdentityMap()


def type_name(layer: nn.Layer) -> str:
    """The name of the class that the user knows the layer by."""
    while (wrapped := unwrapped(layer)) is not None:
        layer = wrapped
    return type(layer).__name__


def raw_names(models: dict[str, nn.Layer]) -> dict[str, str]:
    """The sites of the layers whose names in Paddle are others, because something around them is a wrapper."""
    changed: dict[str, str] = {}
    for label, root in models.items():
        names = {id(layer): name for name, layer in root.named_sublayers(include_self=True)}
        for chain in chains(root):
            site, raw = site_name(label, chain.name), site_name(label, names.get(id(chain.inner), chain.name))
            if site != raw:
                changed[site] = raw
    return changed


def is_static(layer: nn.Layer) -> bool:
    """Whether `paddle.jit.to_static` runs this layer as one program. With hooks in it Paddle cannot trace it."""
    return type(vars(layer).get("forward")).__name__ in _STATIC_FUNCTIONS or type(layer).__name__ == "TranslatedLayer"


_STATIC_FUNCTIONS = frozenset({"StaticFunction", "SymbolicStaticFunction", "ASTStaticFunction"})


def can_be_called(layer: nn.Layer) -> bool:
    """Whether it has a `forward` at all. Lists and dicts of layers have none."""
    return "forward" in vars(layer) or type(layer).forward is not nn.Layer.forward


def has_parameters(layer: nn.Layer) -> bool:
    """Whether it holds any parameter. A program may override `parameters()`, so that is not called."""
    links = (link for chain in chains(layer) for link in chain.modules)
    return any(parameter is not None for link in links for parameter in link._parameters.values())


def children(layer: nn.Layer) -> list[Any]:
    """The layers right below one, and below lists and dicts of layers, which are never called themselves."""
    found: list[Any] = []
    for child in layer._sub_layers.values():
        found.append(child)
        if child is not None and not can_be_called(child):
            found += children(child)
    return found


def has_same_children(layer: nn.Layer, known: list[Any]) -> bool:
    """Whether no layer was added, replaced or removed since."""
    return same(known, children(layer))


# -- optimizers --------------------------------------------------------------------------------------------------------

_FLEET = "paddle.distributed.fleet"
_OPTIMIZER_WRAPPERS = (
    (f"{_FLEET}.utils.mix_precision_utils", "MixPrecisionOptimizer"),
    (f"{_FLEET}.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer", "DygraphShardingOptimizer"),
    (f"{_FLEET}.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer", "DygraphShardingOptimizerV2"),
)
"""What has a step of its own, in which it hands gradients to the optimizer that it wraps, whose step it never calls."""


def optimizer_wrappers() -> Iterator[type]:
    """The classes of wrappers that step in place of the optimizer, as far as they have been imported."""
    for module, name in _OPTIMIZER_WRAPPERS:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            yield found
