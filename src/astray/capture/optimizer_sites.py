"""The sites of optimizers, and of their updates of parameters; optimizers within what wraps them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astray.capture.native.core import Site


def unwrapped(optimizer: Any) -> Iterator[Any]:
    """An optimizer, then that which it wraps, as those of `paddle.distributed.fleet` do, and so on."""
    yield optimizer
    while "_inner_opt" in getattr(optimizer, "__dict__", ()):
        optimizer = optimizer._inner_opt
        yield optimizer


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, within all that is wrapped around it."""
    *_, innermost = unwrapped(optimizer)
    return innermost


class OptimizerSites:
    """Names optimizers by their classes, in the order of their first steps: `AdamW`, then `AdamW#2`.

    `native` is the compiled module of the adapter.
    """

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._labels: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._counts: Counter[str] = Counter()
        self._sites: dict[tuple[str, str], Site] = {}

    def of(self, name: str, kind: str, owner: Site | None = None) -> Site:
        """The site of an optimizer, or of its updates of a parameter, whose gradients are at the site `owner`."""
        site = self._sites.get((name, kind))
        if site is None:
            root, module = ("", None) if owner is None else (owner.root, owner.module)
            site = self._sites[name, kind] = self._native.Site(name, kind, root, "optimizer", module)
        return site

    def label(self, optimizer: Any) -> str:
        """The name of this optimizer, which it gets at the first call."""
        known = self._labels.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            kind = type(optimizer).__name__
            self._counts[kind] += 1
            number = self._counts[kind]
            known = weakref.ref(optimizer), kind if number == 1 else f"{kind}#{number}"
            self._labels[id(optimizer)] = known
        return known[1]
