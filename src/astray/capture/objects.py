"""Finds the tensors in the attributes of an object, such as the keys and values in a cache of transformers.

`structure` asks it for what is neither a container nor a dataclass. No code of the object runs: attributes are read
from its `__dict__` and its slots, past every property and `__getattr__`. How deep and how far it looks is bounded.

A cache goes through every layer of a model, and each call would list the keys of all layers. So a tensor in an object
is told where it is first seen, and again once it was written to or another step or micro step has begun.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

DEEPEST = 6
"""Levels of attributes and containers below an object: cache, layers, one layer, its keys, and two to spare."""

MOST_TENSORS = 256
"""Of one object: a cache of 128 layers."""

_MOST_THINGS = 2_000  # that are looked at, so that a data set with a million strings costs less than a millisecond
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_PLAIN = frozenset({bool, int, float, str, bytes, bytearray, type(None), range, slice})

Found = list[tuple[str, Any]]


class Objects:
    """Takes objects apart, and remembers which of their tensors have been told.

    is_tensor: what a tensor is. moment: says of a tensor when it is another one to tell; None tells all, every time.

    >>> class Layer:
    ...     def __init__(self) -> None:
    ...         self.keys, self.size = 1j, 8
    >>> Objects(lambda value: isinstance(value, complex)).tensors(Layer(), "past")
    ([('past.keys', 1j)], False)
    """

    def __init__(self, is_tensor: Callable[[Any], bool], moment: Callable[[Any], Any] | None = None) -> None:
        self._is_tensor = is_tensor
        self._moment = moment
        self._told: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def tensors(self, value: Any, path: str) -> tuple[Found, bool]:
        """The tensors in an object that are to be told, with their paths, and whether there may be more."""
        search = _Search(self._is_tensor)
        search.look_into(value, path, 0)
        return [(place, tensor) for place, tensor in search.found if self._is_new(tensor)], search.cut_short

    def _is_new(self, tensor: Any) -> bool:
        if self._moment is None:
            return True
        moment = self._moment(tensor)
        reference, before = self._told.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor and before == moment:
            return False
        with contextlib.suppress(TypeError):  # some cannot be referred to
            self._told[id(tensor)] = weakref.ref(tensor, _Forgetting(self._told, id(tensor))), moment
        return True


class _Forgetting:
    """Lets go of what was told about a tensor that is gone, unless its place in memory is another's by now."""

    def __init__(self, told: dict[int, tuple[weakref.ref[Any], Any]], number: int) -> None:
        self._told, self._number = told, number

    def __call__(self, reference: weakref.ref[Any]) -> None:
        if self._told.get(self._number, (None,))[0] is reference:
            del self._told[self._number]


class _Search:
    """One walk through an object."""

    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        self._met: set[int] = set()
        self._things = 0
        self.found: Found = []
        self.cut_short = False

    def look_into(self, value: Any, path: str, depth: int) -> None:
        """Look at what an object or a container holds. What is met twice, as in a circle, counts once."""
        if id(value) in self._met:
            return
        self._met.add(id(value))
        for name, item in _items(value):
            if type(item) in _PLAIN:
                continue
            self._things += 1
            if self._things > _MOST_THINGS or len(self.found) >= MOST_TENSORS:
                self.cut_short = self.cut_short or bool(self.found)
                return
            if self._is_tensor(item):
                if id(item) not in self._met:
                    self._met.add(id(item))
                    self.found.append((f"{path}.{name}", item))
            elif depth < DEEPEST and is_searched(item):
                self.look_into(item, f"{path}.{name}", depth + 1)


def is_searched(value: Any) -> bool:
    """Whether an object may be looked into: no class, no function, and no module or the like that can be called."""
    return not isinstance(value, _CODE) and not callable(value)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds, by name. Methods of containers are those of Python, whatever a subclass makes of them."""
    if isinstance(value, dict):
        yield from ((key, item) for key, item in list(dict.items(value)) if type(key) in (str, int))
    elif isinstance(value, list):
        yield from enumerate(list.copy(value))
    elif isinstance(value, tuple):
        yield from enumerate(tuple.__iter__(value))
    if type(value) not in (dict, list, tuple):
        yield from attributes(value)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in an object's `__dict__` and slots, read by the descriptors that Python itself made for them."""
    for kind in type.__dict__["__mro__"].__get__(type(value)):
        own = type.__dict__["__dict__"].__get__(kind)
        for name, descriptor in list(own.items()):
            if type(descriptor) is MemberDescriptorType and not name.startswith("__"):
                try:
                    yield name, descriptor.__get__(value)
                except AttributeError:  # nothing has been set
                    continue
            elif name == "__dict__" and type(descriptor) is GetSetDescriptorType:
                held = descriptor.__get__(value)
                if isinstance(held, dict):
                    yield from ((key, item) for key, item in list(dict.items(held)) if type(key) is str)
