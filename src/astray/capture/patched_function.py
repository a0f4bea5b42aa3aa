"""Functions of a framework that are replaced while a recording runs, and put back.

Several recordings may replace the same function, and end in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Replaced:
    """What was there first, and what has been put in its place, the last on top."""

    __slots__ = ("layers", "original", "owner")

    def __init__(self, owner: Any, original: Any) -> None:
        self.owner = owner  # held, so that its id stays its own
        self.original = original
        self.layers: list[Any] = []


_REPLACED: dict[tuple[int, str], _Replaced] = {}


def replace(owner: Any, name: str, ours: Any) -> None:
    """Puts `ours` in the place of an attribute of a module or class."""
    replaced = _REPLACED.get((id(owner), name))
    if replaced is None:
        replaced = _REPLACED[id(owner), name] = _Replaced(owner, vars(owner)[name])
    replaced.layers.append(ours)
    setattr(owner, name, ours)


def put_back(owner: Any, name: str, ours: Any) -> None:
    """Takes `ours` off again. Where somebody else has replaced it since, theirs stays, and ours only passes on."""
    replaced = _REPLACED.get((id(owner), name))
    if replaced is None or ours not in replaced.layers:
        return
    was_on_top = vars(owner).get(name) is ours
    replaced.layers.remove(ours)
    if was_on_top:
        setattr(owner, name, replaced.layers[-1] if replaced.layers else replaced.original)
    if not replaced.layers:
        del _REPLACED[id(owner), name]


class PatchedFunction:
    """A function, replaced in its class or module by what `wrap` makes of it, until `remove`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._wrapper = wrap(vars(owner)[name])
        replace(owner, name, self._wrapper)

    def remove(self) -> None:
        put_back(self._owner, self._name, self._wrapper)
