"""Records the gradients of forward calls when the backward pass reaches them: natively, or in plain Python.

What is seen and how is told in `watching`, the reference. The native part does the same in a fraction of the time;
`ASTRAY_TAPS=python` in the environment does without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch._C._autograd import _get_sequence_nr
from torch.compiler import is_compiling

from astray.capture.pytorch.backward import watching
from astray.capture.pytorch.calls.hooks import Hook, watch_compilers
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.shards import add_up
from astray.capture.pytorch.tensors import PLAIN

if TYPE_CHECKING:
    from astray.capture.pytorch.backward.watching import InputEdges, LiveGradients

__all__ = ["InputEdges", "LiveGradients", "native"]


@never_compiled
def _call_tensor_hook(self: Any, gradient: Any) -> None:
    """What dynamo finds a native hook to do, and sees that compiled code has no part in it."""
    if not is_compiling():
        self.run(gradient)


@never_compiled
def _call_node_hook(self: Any, computed: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
    if not is_compiling():
        self.run(computed, arrived)


class _Registering:
    """Has torch put our hooks on nodes natively while recordings run; it makes a handle in Python for each otherwise.

    There is one function that torch asks for that, by its name. Hooks of others go on to the one that was there.
    """

    def __init__(self, native: Any) -> None:
        self._holder: Any = getattr(torch.autograd.function, "_HookMixin", None)
        self._original = None if self._holder is None else vars(self._holder).get("_register_hook")
        self._native = native
        self._recordings = 0

    @property
    def original(self) -> Any:
        """What torch asks otherwise; None when this one has another way."""
        return getattr(self._original, "__func__", None)

    def __call__(self, on: bool) -> None:
        """A recording has started, or stopped."""
        self._recordings += 1 if on else -1
        if self.original is not None:
            was, becomes = self._original, self._native
            if not self._recordings:
                was, becomes = becomes, was
            if vars(self._holder).get("_register_hook") is was:  # else somebody else has put theirs there
                self._holder._register_hook = becomes


def _some_result() -> torch.Tensor:
    """A tensor with a node, whatever is on around us."""
    with torch.inference_mode(False), torch.enable_grad(), DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True).view(0)


def _prepared() -> Any:
    """The native part, told what it needs to know; None when it is not wanted, was not built or cannot do its work."""
    if os.environ.get("ASTRAY_TAPS") == "python":
        return None
    try:
        from astray.capture.pytorch.backward import _gradients

        registering = _Registering(_gradients.register_hook)
        _gradients.use(
            sequence_nr=_get_sequence_nr,
            depth=torch._C._len_torch_function_stack,
            dispatch_depth=torch._C._len_torch_dispatch_stack,
            grad_enabled=torch.is_grad_enabled,
            disable=torch._C.DisableTorchFunction,
            plain=tuple(PLAIN),
            ordered=OrderedDict,
            edges=watching.InputEdges,
            live=watching.LiveGradients,
            add_up=add_up,
            untouched=watching.leaves_gradients_alone,
            own=watching.OWN,
            registering=registering,
            registered=registering.original,
            dicts_track_themselves=sys.version_info < (3, 14),
        )
        with contextlib.suppress(RuntimeError):  # then more is left to the garbage collector, and that is all
            _gradients.look_at(_some_result())
        lasting = (_gradients.AccumulatedHook, _gradients.ArrivingHook)
        for of_tensor in (_gradients.ArrivalHook, _gradients.CompletionHook, *lasting):
            _gradients.shown_as(of_tensor, _call_tensor_hook)
        for of_node in (_gradients.NodeGradients, _gradients.SendingHook):
            _gradients.shown_as(of_node, _call_node_hook)
        for hook in lasting:
            setattr(hook, "__reduce__", Hook.__reduce__)  # noqa: B010 - the types know of no such attribute
            setattr(hook, "__torch_unserializable__", Hook.__torch_unserializable__)  # noqa: B010
        watch_compilers(_gradients)
    except (ImportError, AttributeError):  # not built, or a torch that has other names
        return None
    return _gradients


native = _prepared()
"""The native part, if it is in use."""

if not TYPE_CHECKING:
    InputEdges = (native or watching).InputEdges
    LiveGradients = (native or watching).LiveGradients
