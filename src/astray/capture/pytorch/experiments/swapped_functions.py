"""Swaps functions of torch and ops, by modes: `h.2.attn/softmax`, `/log_softmax` outside of modules, `h.2/aten.mm`.

The modes lie below those of a recording, which sees the tensors of the program. The module that a call belongs to is
read from the frames: the innermost one that has a site. Functions inside modules have their mode on while such a module
runs; those outside of modules, and ops, as long as they are swapped, on the thread that began it. Where torch would
leave a fast path for inference because of a mode, and round differently, the mode is off.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from astray.capture.identity_map import IdentityMap
from astray.capture.pytorch.calls.catalogue import full_name, short_name
from astray.capture.pytorch.calls.functions import BACKWARDS, backward_roots
from astray.capture.pytorch.calls.modes import insert_mode, is_mode_on, remove_mode, takes_fast_path
from astray.capture.pytorch.compiled.dynamo import CompileWarningFilter, never_compiled
from astray.capture.pytorch.experiments.swapped_calls import Layer, Use

ModuleSites = IdentityMap[nn.Module, str]
"""The sites of all modules, as `record` writes them."""

_CALL = nn.Module._call_impl.__code__
_MOST_NODES = 100_000  # swapped ops whose backward may still come; a training step of a large model makes ten thousand


class FunctionChoice:
    """Which calls of a function or op are swapped. `modules`: the sites they are swapped in; "" is outside of all.

    `sites` are those of all modules; None where no model was given, and every module is inside.
    """

    def __init__(self, use: Use, name: str, sites: ModuleSites | None, modules: set[str]) -> None:
        self.use = use
        self.name = name
        self._sites = sites
        self.modules = modules
        self._known: dict[Any, str | None] = {}  # the names of functions that fit

    def site(self, func: Any, frame: FrameType | None) -> str | None:
        """The site of a call that is swapped, which this frame makes; None for any other."""
        if func not in self._known:
            name = _name(func)
            self._known[func] = name if name is not None and re.fullmatch(self.name, name) else None
        name = self._known[func]
        if name is None:
            return None
        module = _innermost(self._sites, frame)
        return f"{module}/{name}" if module in self.modules else None


def _name(func: Any) -> str | None:
    """What a function or op is called in a site."""
    if isinstance(func, OpOverload):
        return str(func).rpartition(".")[0]
    if getattr(func, "__name__", "__get__") in ("__get__", "__set__", "__delete__"):
        return None
    return short_name(full_name(func))


def _innermost(sites: ModuleSites | None, frame: FrameType | None) -> str | None:
    """The site of the innermost module that runs and has one; empty outside of all."""
    while frame is not None:
        if frame.f_code is _CALL:
            if sites is None:
                return None
            site = sites.get(frame.f_locals["self"])
            if site is not None:
                return site
        frame = frame.f_back
    return ""


class SwappedFunctions(TorchFunctionMode):
    """Runs the chosen calls of functions at the destination."""

    lies_below_recordings = True

    def __init__(self, choice: FunctionChoice) -> None:
        super().__init__()
        self._choice = choice

    @never_compiled
    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        if func in BACKWARDS and (roots := backward_roots(*args, **kwargs)) is not None:
            with self:  # a checkpoint calls functions of the program there
                return torch.autograd.backward(*roots)
        site = self._choice.site(func, sys._getframe(1))
        if site is None:
            return func(*args, **kwargs)
        self._choice.use.called(site)
        return self._choice.use.destination.run(func, args, kwargs, None)


class SwappedOps(TorchDispatchMode):
    """Runs the chosen ops at the destination, and those that compute their gradients."""

    lies_below_recordings = True

    def __init__(self, choice: FunctionChoice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice = choice
        self._nodes: OrderedDict[int, None] = OrderedDict()  # the autograd nodes of what was swapped, by their numbers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @never_compiled
    def __torch_dispatch__(
        self, func: OpOverload[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        with torch._C.DisableTorchFunction():  # called from Python, an op would be a function too
            if node is not None:
                is_swapped = node._sequence_nr() in self._nodes and not _is_view(func)
            else:
                is_swapped = self._is_swapped(func, args, sys._getframe(1))
            if not is_swapped:
                return func(*args, **kwargs)
            return self._choice.use.destination.run(func, args, kwargs, None)

    def _is_swapped(self, func: OpOverload[..., Any], args: tuple[Any, ...], frame: FrameType | None) -> bool:
        """Whether an op of the forward is swapped. Its autograd node, if it has one, was the last to be numbered."""
        site = self._choice.site(func, frame)
        if site is None:
            return False
        self._choice.use.called(site)
        if torch.is_grad_enabled() and any(_requires_grad(arg) for arg in args):
            self._nodes[torch._C._autograd._get_sequence_nr() - 1] = None
            if len(self._nodes) > _MOST_NODES:
                self._nodes.popitem(last=False)
        return True


def _requires_grad(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return any(map(_requires_grad, arg))
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _is_view(func: OpOverload[..., Any]) -> bool:
    arguments = func._schema.arguments
    return bool(arguments and arguments[0].alias_info and not arguments[0].alias_info.is_write)


class ModeLayer(Layer):
    """Turns a mode on while a module runs."""

    def __init__(self, use: Use, site: str, mode: SwappedFunctions, module: nn.Module) -> None:
        super().__init__(use, site)
        self._mode = mode
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_mode_on(self._mode) or takes_fast_path(self._module):
            return self.original(*args, **kwargs)
        with ModeBelow(self._mode):
            return self.original(*args, **kwargs)


class ModeBelow:
    """A mode that is on inside a block, below all others."""

    def __init__(self, mode: TorchFunctionMode | TorchDispatchMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        insert_mode(self._mode, 0)

    def __exit__(self, *_: object) -> None:
        remove_mode(self._mode)


class FastPathsKept:
    """Takes a function mode off while a module runs that would leave its fast path for inference because of it."""

    def __init__(self, mode: SwappedFunctions) -> None:
        self._mode = mode
        self._local = threading.local()  # the module that runs without the mode
        self._handles: list[Any] = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            CompileWarningFilter(),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @never_compiled
    def _before(self, module: nn.Module, _args: Any) -> None:
        if not is_compiling() and takes_fast_path(module) and is_mode_on(self._mode):
            remove_mode(self._mode)
            self._local.module = module

    @never_compiled
    def _after(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if not is_compiling() and getattr(self._local, "module", None) is module:
            self._local.module = None
            insert_mode(self._mode, 0)
