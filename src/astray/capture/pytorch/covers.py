"""Functions of torch that do something more while a recording is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Cover:
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
