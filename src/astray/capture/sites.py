"""The sites of modules (`Sites`), and of the functions that are called inside them (`FunctionSites`).

A model may change while it is recorded: layers are replaced, wrapped or added. Then names are assigned again, as if
recording had just started, and a name keeps its site, so that the numbering of its calls continues.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentityMap
from astray.errors import RecordError
from astray.process import WeakRegistry
from astray.records import ROOT, Kind

if TYPE_CHECKING:
    from astray.capture.native.core import OpenCall, Site


class Named(Protocol):
    """A module with all that wraps it, outermost first. Together they are one site."""

    @property
    def name(self) -> str:
        """As the framework would call the module if nothing were wrapped; empty for the outermost."""

    @property
    def modules(self) -> tuple[Any, ...]: ...

    @property
    def inner(self) -> Any:
        """The module itself."""


Chain = TypeVar("Chain", bound=Named)


class ModuleTree(NamedTuple, Generic[Chain]):
    """What a framework knows of its modules.

    `chains` walks a model: itself first, in the framework's order, without what is in the dict of those met before.
    `type_name` is the class that the user knows a module by.
    """

    chains: Callable[[Any, dict[int, Any]], Iterable[Chain]]
    type_name: Callable[[Any], str]


def walk(
    module: Any,
    seen: dict[int, Any],
    name: str,
    unwrapped: Callable[[Any], Any],
    children: Callable[[Any], Mapping[str, Any]],
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every module in `module`, itself first, with its name and all that wraps it, outermost first.

    `unwrapped` returns what a wrapper wraps, and None for any other module. What is in `seen` already is left out.
    """
    links = [module]
    while (wrapped := unwrapped(links[-1])) is not None:
        links.append(wrapped)
    if all(id(link) in seen for link in links):
        return
    seen.update({id(link): link for link in links})  # which holds them, so that their ids stay their own
    yield name, tuple(links)
    for link in links:
        for child_name, child in children(link).items():
            if child is not None and not any(child is one for one in links):
                yield from walk(child, seen, f"{name}.{child_name}" if name else child_name, unwrapped, children)


class Sites(Generic[Chain]):
    """The sites of all models of one recording. `left_out` is called with a module that gets no site, and the error.

    `native` is the compiled module of the adapter.
    """

    def __init__(
        self, native: ModuleType, tree: ModuleTree[Chain], left_out: Callable[[Chain, Exception], None]
    ) -> None:
        self._native = native
        self._tree = tree
        self._left_out = left_out
        self._roots: dict[str, weakref.ref[Any]] = {}
        self._of: IdentityMap[Any, Site] = IdentityMap()
        self._modules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._by_name: dict[str, Site] = {}

    def of(self, module: Any) -> Site | None:
        """The site of `module`; None when it is in none of the models."""
        return self._of.get(module)

    def named(self, name: str) -> tuple[Site, Any] | None:
        """The site of that name with its module; None when there is none, or no longer."""
        site, module = self._by_name.get(name), self._modules.get(name)
        return None if site is None or module is None else (site, module)

    def add(self, root: Any, label: str) -> list[Chain]:
        """Assigns sites to the modules of a model. Returns those that had none."""
        self._roots[label] = weakref.ref(root)
        return self._assign([(label, chain) for chain in self._tree.chains(root, {})])

    def renew(self) -> tuple[list[Any], list[Chain]]:
        """Walks all models again. Returns the modules that have lost their site, and the chains that got one."""
        now = self._walk()
        present = {id(module) for _, chain in now for module in chain.modules}
        removed = [module for module in self._of if id(module) not in present]
        names: dict[int, str] = {}
        for label, chain in now:
            name = names.setdefault(id(chain.inner), site_name(label, chain.name))
            site = self._of.get(chain.inner)
            if site is not None and site.name != name:
                removed += chain.modules
        for module in removed:
            site = self._of.pop(module, None)
            if site is not None and self._modules.get(site.name) is module:
                del self._modules[site.name]
        return removed, self._assign(now)

    def chains(self) -> list[Chain]:
        """All modules of all models as they are now."""
        return [chain for _, chain in self._walk()]

    def clear(self) -> None:
        self.__init__(self._native, self._tree, self._left_out)  # type: ignore[misc]

    def _walk(self) -> list[tuple[str, Chain]]:
        seen: dict[int, Any] = {}
        roots = [(label, reference()) for label, reference in self._roots.items()]
        return [(label, chain) for label, root in roots if root is not None for chain in self._tree.chains(root, seen)]

    def _assign(self, walked: list[tuple[str, Chain]]) -> list[Chain]:
        assigned = []
        for label, chain in walked:
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
            assigned.append(chain)
        return assigned

    def _claim(self, name: str, module: Any, label: str) -> Site:
        if name in self._modules:
            raise RecordError(f"Two modules would both be recorded as {name!r}. Give the models other names.")
        self._modules[name] = module
        site = self._by_name.get(name)
        if site is None:
            site = self._by_name[name] = self._native.Site(name, self._tree.type_name(module), label)
        else:
            site.type, site.root, site.decided_by = self._tree.type_name(module), label, None
        return site


def site_name(label: str, name: str) -> str:
    """The site of the module that is called `name` in the model with this label."""
    return f"{label}.{name}" if label and name else label or name or ROOT


class CallName(Protocol):
    """A function, op or collective, as its call is to be named."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def kind(self) -> Kind: ...


class FunctionSites:
    """Names the sites of functions and ops: `layers.3.attn/softmax`, or `/softmax` outside of modules.

    In the forward pass the enclosing module is the innermost call that is open; in the backward pass it is the one
    whose forward made what is running, where the framework tells that.
    """

    _all: ClassVar[WeakRegistry[FunctionSites]] = (
        WeakRegistry()
    )  # of all recordings, to find the one whose module is running

    def __init__(self, engine: Engine, native: ModuleType) -> None:
        self._engine = engine
        self._native = native
        self.outside_modules: dict[CallName, Site] = {}  # of what is called outside of every module
        self._all.add(self)

    def of(self, outer: OpenCall | None, callee: CallName) -> Site:
        """The site of a function that is called inside this call, or outside of all."""
        known = self.outside_modules if outer is None else outer.site.inner_sites
        return known.get(callee) or self._make_site(outer, callee)

    def _make_site(self, outer: OpenCall | None, callee: CallName) -> Site:
        known = self.outside_modules if outer is None else outer.site.inner_sites
        site: Site | None = known.get(callee)
        if site is None:
            module, root = ("", "") if outer is None else (outer.site.module, outer.site.root)
            site = self._native.Site(f"{module}/{callee.name}", callee.type, root, callee.kind, module)
            known[callee] = site
            if (
                outer is not None and outer.site.kind == "optimizer" and not outer.runs_inner
            ):  # no closure of the program's
                self._engine.optimizer_sites.add(site)
        return site

    def _is_in_other_recording(self) -> bool:
        """Whether a module of another recording is running on this thread: its calls belong to that recording."""
        return any(other._engine.is_in_module for other in self._all if other is not self)
