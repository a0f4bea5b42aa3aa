"""Records gradients in the backward pass: of forward calls, of parameters, and of the last nodes of functions.

Of a forward call, a hook at each output sees what arrives there. What the call sends to an input is its own
contribution, not the sum over all calls that used that input: it is read from the autograd nodes that were made inside
the call and lead to the input. Most functions make one node: then one hook on it sees both. Nothing is wrapped and no
node is added, so the graph, the order of its sums and therefore every bit of the result stay unchanged.

That part (`LiveGradients`) is C++ (`native/`), which is built when this module is first imported; the functions at the
end are its callbacks in Python. `ParameterCapture` records the gradients of parameters; `LastNodes` those that msprobe
has in its files.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch._C._dynamo import eval_frame as dynamo
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from astray.capture.engine import Engine
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.hooks import TransparentHook
from astray.capture.pytorch.native.core import OpenCall, Site, _torch
from astray.capture.pytorch.shards import add_up

if TYPE_CHECKING:
    from astray.capture.pytorch._torch import (
        AccumulatedHook,
        ArrivingHook,
        InputEdges,
        LeafHook,
        LiveGradients,
        NodeOrigins,
    )
else:
    AccumulatedHook, ArrivingHook = _torch.AccumulatedHook, _torch.ArrivingHook
    InputEdges, LeafHook, LiveGradients = _torch.InputEdges, _torch.LeafHook, _torch.LiveGradients
    NodeOrigins = _torch.NodeOrigins

__all__ = ["AccumulatedHook", "ArrivingHook", "InputEdges", "LiveGradients", "NodeOrigins", "living"]

living = _torch.living


Tensors = list[tuple[str, torch.Tensor]]

_HOOKS_BEFORE_SWEEP = 4096  # hooks that are remembered before the dead are looked for


class LastNodes:
    """Records the gradients of the last autograd node of each function call, as msprobe does; then those of the call.

    `node.0.2.1` is the first of two gradients that the node sends on, having received one. Where a function is one node
    these are the gradients of its arguments; otherwise of intermediate values. Only recordings for msprobe's files use
    this.
    """

    def __init__(self, live: LiveGradients) -> None:
        self._live = live
        self._hooks: list[tuple[Any, int]] = []  # a weak reference to the dict that a hook is in, and its key there
        self._sweep_above = _HOOKS_BEFORE_SWEEP
        self._lock = threading.Lock()

    def watch(self, engine: Engine, call: OpenCall, edges: InputEdges, outputs: Tensors) -> None:
        """Records the gradients of a call that has returned `outputs`, unless it made only leaves or set items."""
        if all(tensor.grad_fn is None for _, tensor in outputs) or call.site.type.endswith(".__setitem__"):
            return
        node = outputs[0][1].grad_fn
        if node is not None and outputs[0][1].requires_grad:
            arrives = {tensor.output_nr: path for path, tensor in reversed(outputs) if tensor.grad_fn is node}
            handle = node.register_hook(_LastNodeHook(engine, call, arrives))
            with self._lock:
                self._hooks.append((handle.hooks_dict_ref, handle.id))
            if len(self._hooks) > self._sweep_above:  # a program that never ends a step
                self.finish()
                self._sweep_above = max(_HOOKS_BEFORE_SWEEP, 2 * len(self._hooks))
        self._live.watch(engine, call, edges, outputs)  # after the node's hook: its rows come after those of the node

    def finish(self) -> None:
        """Forgets hooks whose graph is gone."""
        with self._lock:
            self._hooks = [hook for hook in self._hooks if hook[0]() is not None]

    def remove(self) -> None:
        """Removes every hook from the graphs."""
        with self._lock:
            hooks, self._hooks = self._hooks, []
        for reference, key in hooks:
            hooks_of_node = reference()
            if hooks_of_node is not None:
                hooks_of_node.pop(key, None)


class _LastNodeHook:
    """The hook on the node."""

    __slots__ = ("_arrives", "_call", "_engine")

    def __init__(self, engine: Engine, call: OpenCall, arrives: dict[int, str]) -> None:
        self._engine, self._call, self._arrives = engine, call, arrives

    @never_compiled
    def __call__(self, computed: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        engine = self._engine
        if is_compiling() or engine.paused or not engine.in_own_process:
            return
        try:
            with DisableTorchFunction():  # what is done here is not part of the program
                seq = engine.backward(self._call)
                observe = engine.tensors.observe
                for index, gradient in enumerate(arrived):
                    if gradient is not None:  # else an output that was not used
                        observe(seq, "input", self._arrives.get(index, f"out.{index}"), gradient)
                for index, gradient in enumerate(computed):
                    if gradient is not None:
                        observe(seq, "output", f"node.{index}.{len(computed)}.{len(arrived)}", gradient)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"a gradient of {self._call.site.name}", error)


class ParameterCapture:
    """Records the gradients of the parameters of recorded modules, each time a backward pass has brought them one.

    A row `grad` holds what has accumulated so far. Where there was a gradient already, a row `added` holds what this
    backward pass alone brought. Also keeps the sites of parameters, which `optimizer_steps` reads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: dict[int, _WatchedParameter] = {}
        # Parameters with hooks, by their ids: watching one of these again does nothing. Native code reads this dict
        # too.
        self.hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._listening = True

    def watch(self, parameter: torch.Tensor, name: str, module: str, root: str) -> None:
        """Watches the gradients of a parameter from now on, unless it does already or the parameter is not initialised
        yet.

        `module` is the name of the one that owns it, `root` of the outermost one.
        """
        key = id(parameter)
        known = self._watched.get(key)
        if (known is not None and known.parameter() is parameter) or is_lazy(parameter):
            if known is not None and self._listening:
                self._install(key, known)  # it may have been frozen so far
            return
        self._watched[key] = watched = _WatchedParameter(parameter, Site(name, "Parameter", root, "parameter", module))
        self.hooked.pop(key, None)
        if self._listening:
            self._install(key, watched)

    def _install(self, key: int, watched: _WatchedParameter) -> None:
        if watched.install(self._engine):
            self.hooked[key] = watched.parameter

    def forget(self, parameter: torch.Tensor | None) -> None:
        """Removes the hooks of a parameter that has left its module."""
        self.hooked.pop(id(parameter), None)
        watched = self._watched.pop(id(parameter), None)
        if watched is not None:
            watched.remove()

    def site(self, parameter: torch.Tensor) -> Site | None:
        """Where the gradients of a parameter are recorded; None when it belongs to no recorded module."""
        known = self._watched.get(id(parameter))
        return known.site if known is not None and known.parameter() is parameter else None

    def writes(self, parameter: torch.Tensor) -> int | None:
        """How often its gradient was written to since the backward pass, −1 if it was replaced by another tensor.

        None where there is no gradient, or none was seen.
        """
        gradient, known = parameter.grad, self._watched.get(id(parameter))
        if gradient is None or known is None or known.accumulated is None or known.parameter() is not parameter:
            return None
        return known.accumulated.writes(gradient)

    def set_listening(self, on: bool) -> None:
        """Adds the hooks, or removes them for steps that are not recorded."""
        self._listening = on
        if on:
            for key in [key for key in self._watched if key not in self.hooked]:
                self._install(key, self._watched[key])
            return
        self.hooked.clear()
        for watched in list(self._watched.values()):
            watched.remove()

    def remove(self) -> None:
        self.set_listening(False)
        self._watched.clear()


class _WatchedParameter:
    """A parameter, where it is recorded, and the hooks on it."""

    __slots__ = ("_handles", "accumulated", "parameter", "site")

    def __init__(self, parameter: torch.Tensor, site: Site) -> None:
        self.parameter = weakref.ref(parameter)
        self.site = site
        self.accumulated: AccumulatedHook | None = None
        self._handles: list[Any] = []

    def install(self, engine: Engine) -> bool:
        """Adds the hooks if the parameter can get gradients. Returns whether they are in place."""
        if self._handles:
            return True
        parameter = self.parameter()
        if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
            return False
        hook = self.accumulated = AccumulatedHook(engine, self.site)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles.append(parameter.register_hook(ArrivingHook(hook, self.parameter)))  # type: ignore[no-untyped-call]
        return True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.accumulated = None


@never_compiled
def _call_tensor_hook(self: Any, gradient: Any) -> None:
    """What a hook on a tensor does, as dynamo sees it: nothing while code is compiled."""
    if not is_compiling():
        self.run(gradient)


@never_compiled
def _call_node_hook(work: Callable[[], None]) -> None:
    """What a hook on a node does, where dynamo would compile every function that starts."""
    if not is_compiling():
        work()


def _put_on_leaf(leaf: torch.Tensor, hook: LeafHook) -> Any:
    """Puts a hook on a leaf, and returns its handle. Hooks for what calls send run before hooks for what arrives.

    torch calls hooks in the order of their dict, which removing and adding an entry again changes.
    """
    handle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = leaf._backward_hooks
    if not hook.arrives and hooks is not None:
        for key in [key for key, other in hooks.items() if isinstance(other, LeafHook) and other.arrives]:
            hooks[key] = hooks.pop(key)
    return handle


def _set_callbacks() -> None:
    """Gives the native code the functions above, and the flags that say whether a compiler is active.

    Where none is, its hooks do not call Python. They always do in versions of torch that have other names for these
    flags.
    """
    callback = getattr(dynamo, "get_eval_frame_callback", None)
    flags = vars(torch.compiler) if hasattr(torch.compiler, "_is_compiling_flag") else None
    _torch.set_callbacks(add_up, _call_node_hook, _put_on_leaf, flags, callback)
    for hook in (LeafHook, AccumulatedHook, ArrivingHook):
        _torch.set_python_call(hook, _call_tensor_hook)
        setattr(hook, "__reduce__", TransparentHook.__reduce__)  # noqa: B010 - the types know of no such attribute
        setattr(hook, "__torch_unserializable__", TransparentHook.__torch_unserializable__)  # noqa: B010


_set_callbacks()
