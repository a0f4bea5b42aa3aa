"""The base of our hooks, and what copies and pickles of a recorded model take of them: nothing.

`nn.Module` gets a `__reduce_ex__` while recordings run, which is what copying and pickling ask. A class with one of its
own, that does not call the one of `nn.Module`, takes our hooks along as ones that do nothing (`TransparentHook`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from typing import Any

from torch import nn


class TransparentHook:
    """A hook that copies and pickles as one that does nothing, by names of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn that a copied tensor loses it

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where a module keeps its hooks by their numbers, and the tables in which torch keeps their options."""


class HookFreeCopies:
    """Has copies of modules made without our hooks, until `remove`."""

    _active_recordings = 0

    def __init__(self) -> None:
        if not HookFreeCopies._active_recordings:
            nn.Module.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]
        HookFreeCopies._active_recordings += 1
        self._is_active = True

    def remove(self) -> None:
        """Calling it twice does no harm."""
        if not self._is_active:
            return
        self._is_active = False
        HookFreeCopies._active_recordings -= 1
        if not HookFreeCopies._active_recordings and vars(nn.Module).get("__reduce_ex__") is _reduce_ex:
            del nn.Module.__reduce_ex__


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    reduced = super(nn.Module, self).__reduce_ex__(protocol)
    if sys._getframe(1).f_code is copy.copy.__code__:  # a shallow copy shares its hooks with the module, ours included
        return reduced
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    return (*reduced[:2], _without_our_hooks(reduced[2]), *reduced[3:])


def _without_our_hooks(state: Any) -> Any:
    """The state of a module without our hooks. The values in it are not copied."""
    if isinstance(state, tuple) and len(state) == 2:  # of a class that has slots too
        return (_without_our_hooks(state[0]), state[1])
    if type(state) is not dict:
        return state
    cleaned = state
    for name, options in _HOOKS.items():
        hooks = state.get(name)
        if not isinstance(hooks, dict):
            continue
        ours = {number for number, hook in hooks.items() if isinstance(hook, TransparentHook)}
        if ours:
            tables = [(table, state[table]) for table in (name, *options) if isinstance(state.get(table), dict)]
            cleaned = {**cleaned, **{table: _without(entries, ours) for table, entries in tables}}
    return cleaned


def _without(entries: dict[int, Any], numbers: set[int]) -> dict[int, Any]:
    return OrderedDict((number, entry) for number, entry in entries.items() if number not in numbers)
