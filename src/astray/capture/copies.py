"""What copies and pickles of a recorded model take of our hooks: nothing.

The framework's class of models gets a `__reduce_ex__` while recordings run, which is what copying and pickling ask. A
class with one of its own, that does not call this one, takes our hooks along as ones that do nothing
(`TransparentHook`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


class TransparentHook:
    """A hook that copies and pickles as one that does nothing, by names of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


Tables = Mapping[str, tuple[str, ...]]
"""The attributes in which a model keeps its hooks by their numbers, each with those that have their options."""


class HookFreeCopies:
    """Has copies of the models of a class made without our hooks, until `remove`."""

    _active: dict[type, int] = {}  # noqa: RUF012 - shared by all: how many recordings need each class changed

    def __init__(self, kind: type, tables: Tables) -> None:
        self._kind = kind
        if not HookFreeCopies._active.get(kind):
            setattr(kind, "__reduce_ex__", _reducing(kind, tables))  # noqa: B010 - it is any class
        HookFreeCopies._active[kind] = HookFreeCopies._active.get(kind, 0) + 1
        self._is_active = True

    def remove(self) -> None:
        """Calling it twice does no harm."""
        if not self._is_active:
            return
        self._is_active = False
        HookFreeCopies._active[self._kind] -= 1
        own = vars(self._kind).get("__reduce_ex__")
        if not HookFreeCopies._active[self._kind] and getattr(own, "__module__", None) == __name__:
            delattr(self._kind, "__reduce_ex__")


def _reducing(kind: Any, tables: Tables) -> Any:
    """The `__reduce_ex__` of a class of models, whose hooks are in these tables."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(kind, self).__reduce_ex__(protocol)
        if sys._getframe(1).f_code is copy.copy.__code__:  # a shallow copy shares its hooks with the module
            return reduced
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], _without_our_hooks(reduced[2], tables), *reduced[3:])

    return reduce_ex


def _without_our_hooks(state: Any, tables: Tables) -> Any:
    """The state of a model without our hooks. The values in it are not copied."""
    if isinstance(state, tuple) and len(state) == 2:  # of a class that has slots too
        return (_without_our_hooks(state[0], tables), state[1])
    if type(state) is not dict:
        return state
    cleaned = state
    for name, options in tables.items():
        hooks = state.get(name)
        if not isinstance(hooks, dict):
            continue
        ours = {number for number, hook in hooks.items() if isinstance(hook, TransparentHook)}
        if ours:
            found = [(table, state[table]) for table in (name, *options) if isinstance(state.get(table), dict)]
            cleaned = {**cleaned, **{table: _without(entries, ours) for table, entries in found}}
    return cleaned


def _without(entries: dict[int, Any], numbers: set[int]) -> dict[int, Any]:
    return OrderedDict((number, entry) for number, entry in entries.items() if number not in numbers)
