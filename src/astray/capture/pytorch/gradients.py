"""Records the gradients of a forward call when the backward pass reaches it.

What arrives at the call's outputs is seen by a hook at each of them. What the call sends to an input is its own
contribution, not the sum over everybody who used that input: it is read from the autograd nodes that were born inside
the call and lead to the input. Most functions make one node: then one hook on it sees both. Nothing is wrapped and no
node is added, so the graph, the order of its sums and therefore every bit of the result stay as they are.

All of that is C++ (`native/`), which is built when this module is first imported. Here is what it has done in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import eval_frame as dynamo
from torch.compiler import is_compiling

from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.hooks import Hook
from astray.capture.pytorch.native.build import load
from astray.capture.pytorch.shards import add_up

if TYPE_CHECKING:
    from astray.capture.pytorch import _torch
    from astray.capture.pytorch._torch import (
        AccumulatedHook,
        ArrivingHook,
        InputEdges,
        LeafHook,
        LiveGradients,
        Origins,
    )
else:
    _torch = load()
    AccumulatedHook, ArrivingHook = _torch.AccumulatedHook, _torch.ArrivingHook
    InputEdges, LeafHook, LiveGradients = _torch.InputEdges, _torch.LeafHook, _torch.LiveGradients
    Origins = _torch.Origins

__all__ = ["AccumulatedHook", "ArrivingHook", "InputEdges", "LiveGradients", "Origins", "living"]

living = _torch.living


@never_compiled
def _call_tensor_hook(self: Any, gradient: Any) -> None:
    """What dynamo finds a hook on a tensor to do, and sees that compiled code has no part in it."""
    if not is_compiling():
        self.run(gradient)


@never_compiled
def _call_node_hook(work: Callable[[], None]) -> None:
    """Does what a hook on a node does, where dynamo would compile every function that starts."""
    if not is_compiling():
        work()


def _put_on_leaf(leaf: torch.Tensor, hook: LeafHook) -> Any:
    """Puts a hook on a leaf, and gives back the handle. What a call has sent here comes before what arrives here.

    torch calls hooks in the order they were put into their dict, which taking out and putting back changes.
    """
    handle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = leaf._backward_hooks
    if not hook.arrives and hooks is not None:
        for key in [key for key, other in hooks.items() if isinstance(other, LeafHook) and other.arrives]:
            hooks[key] = hooks.pop(key)
    return handle


def _prepare() -> None:
    """Tells the native part what is done here, and how to ask whether a compiler is at work.

    Its hooks need not go through Python then where there is none. They always do where torch has other names for it.
    """
    callback = getattr(dynamo, "get_eval_frame_callback", None)
    flags = vars(torch.compiler) if hasattr(torch.compiler, "_is_compiling_flag") else None
    _torch.use(add_up, _call_node_hook, _put_on_leaf, flags, callback)
    for hook in (LeafHook, AccumulatedHook, ArrivingHook):
        _torch.shown_as(hook, _call_tensor_hook)
        setattr(hook, "__reduce__", Hook.__reduce__)  # noqa: B010 - the types know of no such attribute
        setattr(hook, "__torch_unserializable__", Hook.__torch_unserializable__)  # noqa: B010


_prepare()
