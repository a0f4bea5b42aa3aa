"""A function of a framework that is replaced while a recording runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PatchedFunction:
    """A function, replaced in its class or module by what `wrap` makes of it, until `remove`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._original = vars(owner)[name]
        self._wrapper = wrap(self._original)
        setattr(owner, name, self._wrapper)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is self._wrapper:  # else it was patched again since; ours only passes on
            setattr(self._owner, self._name, self._original)
