"""Finds the tensors in the attributes of an object, such as the keys and values in a cache of transformers.

`structure` asks it for what is neither a container nor a dataclass. No code of the object runs: attributes are read
from its `__dict__` and its slots, past every property and `__getattr__` (native/objects.h). How deep and how far it
looks is bounded.

A cache goes through every layer of a model, and each call would list the keys of all layers. So a tensor in an object
is told where it is first seen, and again once it was written to or another step or micro step has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from astray.capture.pytorch.native.build import load

DEEPEST = 6
"""Levels of attributes and containers below an object: cache, layers, one layer, its keys, and two to spare."""

MOST_TENSORS = 256
"""Of one object: a cache of 128 layers."""

_MOST_THINGS = 2_000  # that are looked at, so that a data set with a million strings costs next to nothing


class Objects:
    """Takes objects apart, and remembers which of their tensors have been told.

    is_tensor: what a tensor is; torch's own unless it is given. epoch: what it gives is another thing when all have to
    be told again; without it they are told every time.

    >>> class Layer:
    ...     def __init__(self) -> None:
    ...         self.keys, self.size = 1j, 8
    >>> Objects(lambda value: isinstance(value, complex)).tensors(Layer(), "past")
    ([('past.keys', 1j)], False)
    """

    def __init__(
        self, is_tensor: Callable[[Any], bool] | None = None, epoch: Callable[[], object] | None = None
    ) -> None:
        self._native = load().Objects(is_tensor, epoch, DEEPEST, MOST_TENSORS, _MOST_THINGS)

    def tensors(self, value: Any, path: str) -> tuple[list[tuple[str, Any]], bool]:
        """The tensors in an object that are to be told, with their paths, and whether there may be more.

        Nothing is found in a class, a function, or a module or the like that can be called.
        """
        found: tuple[list[tuple[str, Any]], bool] = self._native.tensors(value, path)
        return found
