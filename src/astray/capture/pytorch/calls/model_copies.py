"""Copies and pickles of a model that is being recorded: they have the program's hooks, and none of ours.

Used by `modules`. `nn.Module` gets a `__reduce_ex__` while recordings run, which is what copying and pickling ask. A
class with one of its own, that does not ask `nn.Module`, takes our hooks along as ones that do nothing
(`capture/pytorch/hooks.py`).
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

from torch import nn

from astray.capture.pytorch.hooks import TransparentHook

_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where torch keeps hooks by their numbers, and what it notes of them elsewhere."""


class HookFreeCopies:
    """Has copies made without our hooks until `remove`."""

    _needed = 0  # over all recordings

    def __init__(self) -> None:
        if not HookFreeCopies._needed:
            nn.Module.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]
        HookFreeCopies._needed += 1
        self._here = True

    def remove(self) -> None:
        """Twice does no harm."""
        if not self._here:
            return
        self._here = False
        HookFreeCopies._needed -= 1
        if not HookFreeCopies._needed and vars(nn.Module).get("__reduce_ex__") is _reduce_ex:
            del nn.Module.__reduce_ex__


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    found = super(nn.Module, self).__reduce_ex__(protocol)
    if sys._getframe(1).f_code is copy.copy.__code__:  # a shallow copy shares its hooks with the module, ours included
        return found
    if not isinstance(found, tuple) or len(found) < 3:
        return found
    return (*found[:2], _cleaned(found[2]), *found[3:])


def _cleaned(state: Any) -> Any:
    """The state of a module without our hooks. What is in it stays what it is."""
    if isinstance(state, tuple) and len(state) == 2:  # of a class that has slots too
        return (_cleaned(state[0]), state[1])
    if type(state) is not dict:
        return state
    cleaned = state
    for name, noted in _HOOKS.items():
        hooks = state.get(name)
        ours = (
            {number for number, hook in hooks.items() if isinstance(hook, TransparentHook)}
            if isinstance(hooks, dict)
            else set()
        )
        if ours:
            kept = {one: _without(state[one], ours) for one in (name, *noted) if isinstance(state.get(one), dict)}
            cleaned = {**cleaned, **kept}
    return cleaned


def _without(hooks: dict[int, Any], ours: set[int]) -> dict[int, Any]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if number not in ours)
