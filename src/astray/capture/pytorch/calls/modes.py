"""Pushes the modes that see functions and ops onto torch's stacks, and removes them again: `InferenceFastPaths` also
where torch would leave a fast path for inference because of them.

A mode is on for the thread that started the recording, and on any other thread while a recorded module runs there.
Other modes may have been pushed on top in the meantime, and are popped from the top: so ours are inserted and removed
at their original depth, and the order of the others is kept.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from astray.capture.pytorch.calls.wrappers import chains
from astray.capture.pytorch.compiled.dynamo import CompileWarningFilter, never_compiled
from astray.capture.pytorch.native.core import OpenCall


class Modes:
    """The modes of one recording."""

    def __init__(self) -> None:
        self._modes: list[TorchFunctionMode | TorchDispatchMode] = []
        self._on = False
        self._thread = threading.get_ident()
        self._depth = _len_torch_function_stack()
        self._local = threading.local()

    def use(self, modes: list[TorchFunctionMode | TorchDispatchMode]) -> None:
        """Changes which modes there are: the function mode, the op mode, both or none."""
        was_on = self._on
        self.switch(False)
        self._modes = modes
        self.switch(was_on)

    def switch(self, on: bool) -> None:
        """On while a step is recorded, off otherwise: a mode that records nothing still costs a Python call."""
        if on == self._on or threading.get_ident() != self._thread:
            return
        self._on = on
        for mode in self._modes:
            if on and isinstance(mode, TorchDispatchMode):
                mode.__enter__()  # type: ignore[no-untyped-call]
            elif on:
                insert_mode(mode, self._depth)
            else:
                remove_mode(mode)

    def enter_thread(self, call: OpenCall) -> None:
        """A module call starts, perhaps on a thread where no mode is on yet."""
        if not self._modes or not self._on or threading.get_ident() == self._thread:
            return
        if getattr(self._local, "call", None) is None and not any(map(is_mode_on, self._modes)):
            self._local.call = call
            for mode in self._modes:
                mode.__enter__()  # type: ignore[no-untyped-call]

    def leave_thread(self, call: OpenCall) -> None:
        """A module call ends, perhaps the one that put the modes on."""
        if self._modes and getattr(self._local, "call", None) is call:
            self._local.call = None
            for mode in reversed(self._modes):
                remove_mode(mode)

    def suspend(self, holder: object, *, ops: bool = False) -> None:
        """Takes the function mode off until `holder` resumes it. With `ops`, the op mode too."""
        suspended = self._local.__dict__.setdefault("suspended", [])
        modes = [mode for mode in self._modes if (ops or isinstance(mode, TorchFunctionMode)) and is_mode_on(mode)]
        suspended.append((holder, [(mode, remove_mode(mode)) for mode in modes]))

    def resume(self, holder: object) -> None:
        """Ends what `holder` has suspended, and what an exception has left suspended inside."""
        suspended: list[tuple[object, list[tuple[TorchFunctionMode | TorchDispatchMode, int]]]]
        suspended = getattr(self._local, "suspended", [])
        if not any(each is holder for each, _ in suspended):
            return
        latest: object = None
        while latest is not holder:
            latest, modes = suspended[-1]
            for mode, depth in modes:
                if (
                    self._on and mode in self._modes and not is_mode_on(mode)
                ):  # they may have been switched off meanwhile
                    insert_mode(mode, depth)
            suspended.pop()  # last: what an interrupt leaves undone is done at the next call


def insert_mode(mode: TorchFunctionMode | TorchDispatchMode, depth: int) -> None:
    """Pushes a mode below those that were pushed at `depth` or later, but above those that lie below all recordings."""
    if isinstance(mode, TorchDispatchMode):
        stack = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
        _insert_dispatch(mode, max(depth, _below_recordings(stack)))
        return
    depth = max(depth, _below_recordings(map(_get_function_stack_at, range(_len_torch_function_stack()))))
    above = []
    while _len_torch_function_stack() > depth:
        above.append(_pop_torch_function_stack())
    _push_on_torch_function_stack(mode)
    for other in reversed(above):
        _push_on_torch_function_stack(other)


def remove_mode(mode: TorchFunctionMode | TorchDispatchMode) -> int:
    """Removes a mode from its stack, at any depth, and returns that depth."""
    if not is_mode_on(mode):
        return _len_torch_function_stack()  # taken off by other code, whose own mode is still there
    if isinstance(mode, TorchDispatchMode):
        return _remove_dispatch(mode)
    above: list[Any] = []
    while (top := _pop_torch_function_stack()) is not mode:
        above.append(top)
    depth = _len_torch_function_stack()
    for other in reversed(above):
        _push_on_torch_function_stack(other)
    return depth


def _below_recordings(stack: Iterable[Any]) -> int:
    """How many modes at the bottom of a stack are there to change what is recorded, such as those of a swap."""
    return sum(1 for _ in itertools.takewhile(lambda mode: getattr(mode, "lies_below_recordings", False), stack))


def _insert_dispatch(mode: TorchDispatchMode, depth: int) -> None:
    above: list[Any] = []
    while (length := torch._C._len_torch_dispatch_stack()) > depth:
        above.append(torch._C._get_dispatch_stack_at(length - 1))
        above[-1].__exit__(None, None, None)
    mode.__enter__()  # type: ignore[no-untyped-call]
    for other in reversed(above):
        other.__enter__()


def _remove_dispatch(mode: TorchDispatchMode) -> int:
    above: list[Any] = []
    while (top := torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)) is not mode:
        top.__exit__(None, None, None)
        above.append(top)
    mode.__exit__(None, None, None)
    depth: int = torch._C._len_torch_dispatch_stack()
    for other in reversed(above):
        other.__enter__()
    return depth


def is_mode_on(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    if isinstance(mode, TorchDispatchMode):
        return any(torch._C._get_dispatch_stack_at(i) is mode for i in range(torch._C._len_torch_dispatch_stack()))
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))


# -- fast paths for inference ------------------------------------------------------------------------------------------

_WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)


def takes_fast_path(module: nn.Module) -> bool:
    """Whether a call of it now would leave a fast path for inference because a function mode is on."""
    return isinstance(module, _WITH_FAST_PATH) and not module.training and not torch.is_grad_enabled()


class InferenceFastPaths:
    """Keeps torch on its fast paths for inference, which round differently from the slow ones.

    A `TransformerEncoderLayer` in eval mode leaves its fast path when any module inside it has a hook; it, its encoder
    and `MultiheadAttention` also leave theirs when a function mode is on. Recording must not change a bit, so there the
    hooks are taken off and the mode is suspended, and the run lists what was not seen.

    `add_hooks` and `remove_hooks` are for the hooks of one module; `missed` reports what was not seen.
    """

    def __init__(
        self,
        modes: Modes,
        add_hooks: Callable[[nn.Module], None],
        remove_hooks: Callable[[nn.Module], None],
        missed: Callable[[nn.Module], None],
    ) -> None:
        self._modes = modes
        self._add_hooks = add_hooks
        self._remove_hooks = remove_hooks
        self._missed = missed
        self._layers: list[tuple[weakref.ref[nn.Module], bool]] = []  # whether the hooks are in place
        self._handles: list[Any] = []

    def add(self, module: nn.Module) -> None:
        """A module has been attached. Its hooks are in place."""
        if isinstance(module, nn.TransformerEncoderLayer):
            self._layers.append((weakref.ref(module), True))
        if isinstance(module, _WITH_FAST_PATH) and not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
                CompileWarningFilter(),
            ]

    def check(self) -> None:
        """Removes the hooks of layers that are in eval mode now, and adds them again for training."""
        for index, (reference, hooked) in enumerate(self._layers):
            layer = reference()
            if layer is None or layer.training == hooked:
                continue
            self._layers[index] = (reference, layer.training)
            for module in (link for chain in chains(layer) for link in chain.modules):
                (self._add_hooks if layer.training else self._remove_hooks)(module)
            if not layer.training:
                self._missed(layer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()

    @never_compiled
    def _before(self, module: nn.Module, _args: Any) -> None:
        if not is_compiling() and takes_fast_path(module):
            self._modes.suspend(module)

    @never_compiled
    def _after(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if not is_compiling() and isinstance(module, _WITH_FAST_PATH):
            self._modes.resume(module)
