"""What stays in place while a recording runs: the base of our hooks, and functions of torch with something around them.

Used by calls, gradients, setup and compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class TransparentHook:
    """A hook that copies and pickles as one that does nothing, in words of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn that a copied tensor loses it

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class PatchedFunction:
    """A function of torch, as an attribute of a class or a module, with another one around it until `remove`."""

    def __init__(self, owner: Any, name: str, covering: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._bare = vars(owner)[name]
        self._cover = covering(self._bare)
        setattr(owner, name, self._cover)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is self._cover:  # else it was patched again since; ours only passes on
            setattr(self._owner, self._name, self._bare)
