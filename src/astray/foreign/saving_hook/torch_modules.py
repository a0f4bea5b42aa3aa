"""PyTorch's modules, as `hook` needs them. In files they are called as in `named_modules()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from astray.capture.adapters import Adapter, adapter_for
from astray.capture.pytorch.calls.wrappers import Chain, can_be_called, chains, type_name
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.hooks import TransparentHook

PARAMETRIZED = "parametrizations"


class TorchModules:
    """Those of PyTorch."""

    def chains(self, model: nn.Module) -> Iterator[Chain]:
        return chains(model)

    def type_name(self, module: nn.Module) -> str:
        return type_name(module)

    def is_leaf(self, chain: Chain) -> bool:
        """The modules of torch's parametrizations do not count, and are not layers."""
        children = [name for name, child in chain.inner._modules.items() if child is not None]
        is_leaf = children in ([], [PARAMETRIZED]) and PARAMETRIZED not in chain.name.split(".")
        return is_leaf and can_be_called(chain.inner)

    def layer_name(self, _module: nn.Module) -> None:
        return None

    def parameter_name(self, _parameter: Any) -> None:
        return None

    def adapter(self, model: nn.Module) -> Adapter:
        return adapter_for(model)

    def on_forward(
        self, model: nn.Module, is_due: Callable[[], bool], work: Callable[[], None]
    ) -> contextlib.ExitStack:
        handles = contextlib.ExitStack()
        handles.callback(model.register_forward_pre_hook(_ForwardHook(is_due, work)).remove)
        return handles


class _ForwardHook(TransparentHook):
    __slots__ = ("is_due", "work")

    def __init__(self, is_due: Callable[[], bool], work: Callable[[], None]) -> None:
        self.is_due, self.work = is_due, work

    @never_compiled
    def __call__(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not is_compiling() and self.is_due():
            self.work()
