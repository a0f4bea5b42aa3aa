"""Which site each module has, as long as it is part of a model that is recorded.

Used by `modules`. A model may change while it is recorded: layers are replaced, wrapped or added. Then names are given
anew, as if recording had only started now, and a name keeps its site, so that its calls are counted on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from astray.capture.engine import Site
from astray.capture.identity_map import IdentityMap
from astray.capture.pytorch.calls.wrappers import Chain, chains, site_name, type_name
from astray.errors import RecordError


class Sites:
    """The sites of all models of one recording. `left_out` is told of a module that could not be given one, and why."""

    def __init__(self, left_out: Callable[[Chain, Exception], None]) -> None:
        self._left_out = left_out
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._of: IdentityMap[nn.Module, Site] = IdentityMap()
        self._holders: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._by_name: dict[str, Site] = {}

    def of(self, module: nn.Module) -> Site | None:
        """Where calls of `module` are recorded; None when it is in none of the models."""
        return self._of.get(module)

    def named(self, name: str) -> tuple[Site, nn.Module] | None:
        """The site of that name with its module; None when there is none, or no longer."""
        site, module = self._by_name.get(name), self._holders.get(name)
        return None if site is None or module is None else (site, module)

    def add(self, root: nn.Module, label: str) -> list[Chain]:
        """Gives sites to a model. Returns those of its modules that had none."""
        self._roots[label] = weakref.ref(root)
        return self._settle([(label, chain) for chain in chains(root)])

    def renew(self) -> tuple[list[nn.Module], list[Chain]]:
        """Goes through all models again. Returns the modules that have left their place, and those that came."""
        now = self._walk()
        there = {id(module) for _, chain in now for module in chain.modules}
        left = [module for module in self._of if id(module) not in there]
        names: dict[int, str] = {}
        for label, chain in now:
            name = names.setdefault(id(chain.inner), site_name(label, chain.name))
            site = self._of.get(chain.inner)
            if site is not None and site.name != name:
                left += chain.modules
        for module in left:
            site = self._of.pop(module, None)
            if site is not None and self._holders.get(site.name) is module:
                del self._holders[site.name]
        return left, self._settle(now)

    def chains(self) -> list[Chain]:
        """All modules of all models as they are now."""
        return [chain for _, chain in self._walk()]

    def clear(self) -> None:
        self.__init__(self._left_out)  # type: ignore[misc]

    def _walk(self) -> list[tuple[str, Chain]]:
        seen: dict[int, nn.Module] = {}
        roots = [(label, reference()) for label, reference in self._roots.items()]
        return [(label, chain) for label, root in roots if root is not None for chain in chains(root, seen)]

    def _settle(self, found: list[tuple[str, Chain]]) -> list[Chain]:
        settled = []
        for label, chain in found:
            if all(module in self._of for module in chain.modules):
                continue
            try:
                # One that is known may only have got a wrapper.
                site = self._of.get(chain.inner) or self._claim(site_name(label, chain.name), chain.inner, label)
            except RecordError:
                raise
            except Exception as error:  # noqa: BLE001 - the others can be watched all the same
                self._left_out(chain, error)
                continue
            for module in chain.modules:
                self._of[module] = site
            settled.append(chain)
        return settled

    def _claim(self, name: str, module: nn.Module, label: str) -> Site:
        if name in self._holders:
            raise RecordError(f"Two modules would both be recorded as {name!r}. Give the models other names.")
        self._holders[name] = module
        site = self._by_name.get(name)
        if site is None:
            site = self._by_name[name] = Site(name, type_name(module), label)
        else:
            site.type, site.root, site.judge = type_name(module), label, None
        return site
