"""Pushes the modes that see functions and ops onto torch's stacks, and removes them again.

A mode is on for the thread that started the recording, and on any other thread while a recorded module runs there.
Other modes may have been pushed on top in the meantime, and are popped from the top: so ours are inserted and removed
at their original depth, and the order of the others is kept.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from astray.capture.engine import OpenCall


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
                _insert(mode, self._depth)
            else:
                _remove(mode)

    def enter_thread(self, call: OpenCall) -> None:
        """A module call starts, perhaps on a thread where no mode is on yet."""
        if not self._modes or not self._on or threading.get_ident() == self._thread:
            return
        if getattr(self._local, "call", None) is None and not any(map(_is_on, self._modes)):
            self._local.call = call
            for mode in self._modes:
                mode.__enter__()  # type: ignore[no-untyped-call]

    def leave_thread(self, call: OpenCall) -> None:
        """A module call ends, perhaps the one that put the modes on."""
        if self._modes and getattr(self._local, "call", None) is call:
            self._local.call = None
            for mode in reversed(self._modes):
                _remove(mode)

    def suspend(self, holder: object, *, ops: bool = False) -> None:
        """Takes the function mode off until `holder` resumes it. With `ops`, the op mode too."""
        suspended = self._local.__dict__.setdefault("suspended", [])
        modes = [mode for mode in self._modes if (ops or isinstance(mode, TorchFunctionMode)) and _is_on(mode)]
        suspended.append((holder, [(mode, _remove(mode)) for mode in modes]))

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
                if self._on and mode in self._modes and not _is_on(mode):  # they may have been switched off meanwhile
                    _insert(mode, depth)
            suspended.pop()  # last: what an interrupt leaves undone is done at the next call


def _insert(mode: TorchFunctionMode | TorchDispatchMode, depth: int) -> None:
    if isinstance(mode, TorchDispatchMode):
        _insert_dispatch(mode, depth)
        return
    above = []
    while _len_torch_function_stack() > depth:
        above.append(_pop_torch_function_stack())
    _push_on_torch_function_stack(mode)
    for other in reversed(above):
        _push_on_torch_function_stack(other)


def _remove(mode: TorchFunctionMode | TorchDispatchMode) -> int:
    """Removes a mode from its stack, at any depth, and returns that depth."""
    if not _is_on(mode):
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


def _is_on(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    if isinstance(mode, TorchDispatchMode):
        return any(torch._C._get_dispatch_stack_at(i) is mode for i in range(torch._C._len_torch_dispatch_stack()))
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))
