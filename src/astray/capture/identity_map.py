"""Maps and sets keyed by the identity of the program's objects.

Their `__eq__` and `__hash__` are not run: a module may be unhashable, compare elementwise, or raise. Keys are held
weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from typing import Generic, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class IdentityMap(Generic[K, V]):
    """A value for each of several objects, for as long as these live.

    >>> sites = IdentityMap()
    >>> sites[module] = site
    >>> sites.get(module)
    <site>
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: object = None) -> object:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else default

    def __setitem__(self, key: K, value: V) -> None:
        # When the object dies its entry is removed without running Python code: `pop` gets the dead reference as its
        # default.
        self._entries[id(key)] = weakref.ref(key, partial(self._entries.pop, id(key))), value

    @overload
    def pop(self, key: K) -> V | None: ...
    @overload
    def pop(self, key: K, default: D) -> V | D: ...
    def pop(self, key: K, default: object = None) -> object:
        if key not in self:
            return default
        return self._entries.pop(id(key))[1]

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __iter__(self) -> Iterator[K]:
        """The living keys, as of the start of the iteration."""
        yield from [key for key, _ in self.items()]

    def items(self) -> list[tuple[K, V]]:
        entries = [(reference(), value) for reference, value in list(self._entries.values())]
        return [(key, value) for key, value in entries if key is not None]

    def clear(self) -> None:
        self._entries.clear()


class IdentitySet(Generic[K]):
    """Several objects, for as long as these live."""

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._members: IdentityMap[K, None] = IdentityMap()
        for member in members:
            self.add(member)

    def add(self, member: K) -> None:
        self._members[member] = None

    def __contains__(self, member: K) -> bool:
        return member in self._members

    def clear(self) -> None:
        self._members.clear()


def same(known: Iterable[object], now: Iterable[object]) -> bool:
    """Whether two collections hold the very same objects in the same order."""
    before, after = tuple(known), tuple(now)
    return len(before) == len(after) and all(map(is_, before, after))
