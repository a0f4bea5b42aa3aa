"""The sites of modules (`Sites`), and of the functions and ops that are called inside them (`FunctionSites`).

`modules` uses the first, the function and op levels the second, also natively. A model may change while it is recorded:
layers are replaced, wrapped or added. Then names are assigned again, as if recording had just started, and a name keeps
its site, so that the numbering of its calls continues.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentityMap
from astray.capture.pytorch.calls.wrappers import Chain, chains, site_name, type_name
from astray.capture.pytorch.gradients import NodeOrigins
from astray.capture.pytorch.native.core import OpenCall, Site
from astray.errors import RecordError
from astray.process import WeakRegistry
from astray.records import Kind


class Sites:
    """The sites of all models of one recording. `left_out` is called with a module that gets no site, and the error."""

    def __init__(self, left_out: Callable[[Chain, Exception], None]) -> None:
        self._left_out = left_out
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._of: IdentityMap[nn.Module, Site] = IdentityMap()
        self._modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._by_name: dict[str, Site] = {}

    def of(self, module: nn.Module) -> Site | None:
        """The site of `module`; None when it is in none of the models."""
        return self._of.get(module)

    def named(self, name: str) -> tuple[Site, nn.Module] | None:
        """The site of that name with its module; None when there is none, or no longer."""
        site, module = self._by_name.get(name), self._modules.get(name)
        return None if site is None or module is None else (site, module)

    def add(self, root: nn.Module, label: str) -> list[Chain]:
        """Assigns sites to the modules of a model. Returns those that had none."""
        self._roots[label] = weakref.ref(root)
        return self._assign([(label, chain) for chain in chains(root)])

    def renew(self) -> tuple[list[nn.Module], list[Chain]]:
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
        self.__init__(self._left_out)  # type: ignore[misc]

    def _walk(self) -> list[tuple[str, Chain]]:
        seen: dict[int, nn.Module] = {}
        roots = [(label, reference()) for label, reference in self._roots.items()]
        return [(label, chain) for label, root in roots if root is not None for chain in chains(root, seen)]

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

    def _claim(self, name: str, module: nn.Module, label: str) -> Site:
        if name in self._modules:
            raise RecordError(f"Two modules would both be recorded as {name!r}. Give the models other names.")
        self._modules[name] = module
        site = self._by_name.get(name)
        if site is None:
            site = self._by_name[name] = Site(name, type_name(module), label)
        else:
            site.type, site.root, site.decided_by = type_name(module), label, None
        return site


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
    whose forward made the autograd node that is running.
    """

    _all: ClassVar[WeakRegistry[FunctionSites]] = (
        WeakRegistry()
    )  # of all recordings, to find the one whose module is running

    def __init__(self, engine: Engine, origins: NodeOrigins) -> None:
        self._engine = engine
        self.origins = origins
        self.outside_modules: dict[CallName, Site] = {}  # of what is called outside of every module
        self._local = threading.local()
        self.sees_functions = self.sees_ops = False  # with both, one call must not become two
        self._all.add(self)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that a dispatch mode was called for, in the way it runs without one.

        It is not recorded as a function too. And `__torch_function__` of tensor classes is off: called from Python an
        op would go through it, which the backward pass, running it natively, has not done. Those classes would see
        calls that are not the program's, and give gradients their own type.
        """
        if self.sees_functions:
            self._local.op = op
        if not _overrides((*args, *kwargs.values())):
            return op(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **kwargs)

    def is_running(self, func: Any) -> bool:
        """Whether a function is the op that is about to run. True once for each op."""
        if getattr(self._local, "op", None) is not func:
            return False
        self._local.op = None
        return True

    def _make_site(self, outer: OpenCall | None, callee: CallName) -> Site:
        known = self.outside_modules if outer is None else outer.site.inner_sites
        site = known.get(callee)
        if site is None:
            module, root = ("", "") if outer is None else (outer.site.module, outer.site.root)
            site = known[callee] = Site(f"{module}/{callee.name}", callee.type, root, callee.kind, module)
            if (
                outer is not None and outer.site.kind == "optimizer" and not outer.runs_inner
            ):  # no closure of the program's
                self._engine.optimizer_sites.add(site)
        return site

    def _is_in_other_recording(self) -> bool:
        """Whether a module of another recording is running on this thread: its calls belong to that recording."""
        return any(other._engine.is_in_module for other in self._all if other is not self)


def is_overriding(kind: type) -> bool:
    """Whether a class of tensors has a `__torch_function__` that is called: its own, or the one of `torch.Tensor`."""
    if not issubclass(kind, torch.Tensor) or kind is torch.Tensor:
        return False
    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl


def _overrides(given: Iterable[Any]) -> bool:
    """Whether one of these arguments, or of the lists among them, is a tensor of such a class."""
    return any(_overrides(arg) if type(arg) in (tuple, list) else is_overriding(type(arg)) for arg in given)
