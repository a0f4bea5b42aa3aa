"""Where in the program a function or op is called.

Used by the function and op levels, and natively by `Taking`. In the forward pass the enclosing module is the innermost
call that is open; in the backward pass it is the one whose forward made the autograd node that is running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch

from astray.capture.engine import Engine, OpenCall, Site
from astray.capture.pytorch.gradients import Origins
from astray.records import Kind
from astray.registry import WeakRegistry


class Named(Protocol):
    """A function, op or collective, as its call is to be named."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def kind(self) -> Kind: ...


class Places:
    """Names the sites of functions and ops: `layers.3.attn/softmax`, or `/softmax` outside of modules."""

    _all: ClassVar[WeakRegistry[Places]] = WeakRegistry()  # of all recordings, to tell whose module a call is in

    def __init__(self, engine: Engine, origins: Origins) -> None:
        self._engine = engine
        self.origins = origins
        self.outside: dict[Named, Site] = {}  # of what is called outside of every module
        self._local = threading.local()
        self.sees_functions = self.sees_ops = False  # with both, one call must not be taken for two
        self._all.add(self)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that a dispatch mode was told of, as it runs where there is none.

        It is not recorded as a function too. And classes of tensors are not asked again what they make of it: from
        Python an op would ask them, which the backward pass, running it natively, has not done. They would get calls
        that are not the program's, and give gradients their own type.
        """
        if self.sees_functions:
            self._local.op = op
        if not _overrides((*args, *kwargs.values())):
            return op(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **kwargs)

    def is_running(self, func: Any) -> bool:
        """Whether a function is the op that is about to run. Asked once of each: it is about to run no more then."""
        if getattr(self._local, "op", None) is not func:
            return False
        self._local.op = None
        return True

    def _site(self, outer: OpenCall | None, callee: Named) -> Site:
        known = self.outside if outer is None else outer.site.inside
        site = known.get(callee)
        if site is None:
            module, root = ("", "") if outer is None else (outer.site.module, outer.site.root)
            site = known[callee] = Site(f"{module}/{callee.name}", callee.type, root, callee.kind, module)
            if outer is not None and outer.site.kind == "optimizer" and not outer.inside:  # no closure of the program's
                self._engine.in_optimizers.add(site)
        return site

    def _is_elsewhere(self) -> bool:
        """Whether another recording has a module open here, so that what it does is none of ours."""
        return any(other._engine.is_in_a_module for other in self._all if other is not self)


def is_overriding(kind: type) -> bool:
    """Whether a class of tensors has a `__torch_function__` that is called: its own, or the one of `torch.Tensor`."""
    if not issubclass(kind, torch.Tensor) or kind is torch.Tensor:
        return False
    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl


def _overrides(given: Iterable[Any]) -> bool:
    """Whether one of these arguments, or of the lists among them, is a tensor of such a class."""
    return any(_overrides(one) if type(one) in (tuple, list) else is_overriding(type(one)) for one in given)
