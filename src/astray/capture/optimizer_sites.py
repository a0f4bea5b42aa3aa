"""The sites of optimizers, and of their updates of parameters."""

from __future__ import annotations

import weakref
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astray.capture.native.core import Site


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
