"""What all our hooks on modules and parameters have in common."""

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


# -- covers ------------------------------------------------------------------------------------------------------------
# Functions of torch that do something more while a recording is under way.


class PatchedFunction:
    """An attribute of a class or a module, with something around it until `remove`."""

    def __init__(self, owner: Any, name: str, covering: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._bare = vars(owner)[name]
        self._cover = covering(self._bare)
        setattr(owner, name, self._cover)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is self._cover:  # else somebody has covered it since; ours only passes on
            setattr(self._owner, self._name, self._bare)
