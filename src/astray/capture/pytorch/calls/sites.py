"""The sites of torch's functions and ops, which may be one and the same call."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from astray.capture import sites
from astray.capture.engine import Engine
from astray.capture.pytorch.gradients import NodeOrigins
from astray.capture.pytorch.native.core import _torch


class FunctionSites(sites.FunctionSites):
    """Names the sites of functions and ops, and knows which op is about to run, so that one call is not two."""

    def __init__(self, engine: Engine, origins: NodeOrigins) -> None:
        super().__init__(engine, _torch)
        self.origins = origins
        self._local = threading.local()
        self.sees_functions = self.sees_ops = False  # with both, one call must not become two

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


def is_overriding(kind: type) -> bool:
    """Whether a class of tensors has a `__torch_function__` that is called: its own, or the one of `torch.Tensor`."""
    if not issubclass(kind, torch.Tensor) or kind is torch.Tensor:
        return False
    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl


def _overrides(given: Iterable[Any]) -> bool:
    """Whether one of these arguments, or of the lists among them, is a tensor of such a class."""
    return any(_overrides(arg) if type(arg) in (tuple, list) else is_overriding(type(arg)) for arg in given)
