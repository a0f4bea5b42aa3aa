"""Records the gradients of forward calls when the backward pass reaches them: natively, or in plain Python.

What is seen and how is told in `watching`, the reference. The native part does the same in a fraction of the time;
`ASTRAY_TAPS=python` in the environment does without it.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.compiler import is_compiling

from astray.capture.pytorch.backward import watching
from astray.capture.pytorch.calls.hooks import Hook
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.shards import add_up
from astray.capture.pytorch.tensors import PLAIN

if TYPE_CHECKING:
    from astray.capture.pytorch.backward.watching import InputEdges, LiveGradients

__all__ = ["InputEdges", "LiveGradients", "native"]


@never_compiled
def _call_tensor_hook(self: Any, gradient: Any) -> None:
    """How torch calls a native hook: by way of Python, where dynamo sees that compiled code has no part in it."""
    if not is_compiling():
        self.run(gradient)


@never_compiled
def _call_node_hook(self: Any, computed: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
    if not is_compiling():
        self.run(computed, arrived)


def _prepared() -> Any:
    """The native part, told what it needs to know; None when it is not wanted, was not built or cannot do its work."""
    if os.environ.get("ASTRAY_TAPS") == "python":
        return None
    try:
        from astray.capture.pytorch.backward import _gradients

        _gradients.use(
            sequence_nr=_get_sequence_nr,
            depth=torch._C._len_torch_function_stack,
            disable=torch._C.DisableTorchFunction,
            plain=tuple(PLAIN),
            ordered=OrderedDict,
            edges=watching.InputEdges,
            live=watching.LiveGradients,
            add_up=add_up,
            untouched=watching.leaves_gradients_alone,
            own=watching.OWN,
            dicts_track_themselves=sys.version_info < (3, 14),
        )
        for of_node in (_gradients.NodeGradients, _gradients.SendingHook):
            setattr(of_node, "__call__", _call_node_hook)  # noqa: B010 - the types know of no such attribute
        for passing in (_gradients.ArrivalHook, _gradients.CompletionHook):
            setattr(passing, "__call__", _call_tensor_hook)  # noqa: B010
        for lasting in (_gradients.AccumulatedHook, _gradients.ArrivingHook):
            setattr(lasting, "__call__", _call_tensor_hook)  # noqa: B010
            setattr(lasting, "__reduce__", Hook.__reduce__)  # noqa: B010
            setattr(lasting, "__torch_unserializable__", Hook.__torch_unserializable__)  # noqa: B010
    except (ImportError, AttributeError):  # not built, or a torch that has other names
        return None
    return _gradients


native = _prepared()
"""The native part, if it is in use."""

if not TYPE_CHECKING:
    InputEdges = (native or watching).InputEdges
    LiveGradients = (native or watching).LiveGradients
