"""Caches what was measured of a tensor's memory, which may be seen again: a module's output is the next one's input.

A measurement is reused for as long as the storage lives and was not written to, as its adapter tells (address, version
counter, layout). Views of one memory in one order share it, so `x.view(-1)` costs a row and no reading. What escapes
this: writes that bypass the version counter, such as through `.data`, a numpy view or a collective; code that sees such
a write calls `changed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from astray.store import TensorBytes

_ENOUGH = 4096


class CachedMeasurement(NamedTuple):
    """What the row of a tensor needs that is costly to have, and belongs to its numbers alone."""

    statistics: tuple[Any, ...] | int | None  # the fields of a `Statistics`, or the ticket for them
    fingerprint: int | None
    values: TensorBytes | None
    placement: str | None = None
    note: str | None = None


class _Owner(weakref.ref[Any]):
    """The owner of a memory, and what was measured of it.

    One object rather than a few: thousands of these live at a time, and the garbage collector goes through all that is
    neither a number nor a text nor a plain tuple of such. So measurements are kept as plain tuples too.
    """

    __slots__ = ("key", "others", "seen")

    key: Hashable
    seen: tuple[Any, ...]
    others: dict[Hashable, tuple[Any, ...]] | None  # seen under further keys


class MeasurementCache:
    """Finds the numbers of a memory again, by the living object that owns it and a key for what of it was read."""

    def __init__(self) -> None:
        self._by_owner: dict[int, _Owner] = {}
        self._crowded = _ENOUGH

    def find(self, owner: Any, key: Hashable) -> tuple[Any, ...] | None:
        """The fields of a `CachedMeasurement`."""
        known = self._by_owner.get(id(owner))
        if known is None or known() is not owner:
            return None
        if known.key == key:
            return known.seen
        return None if known.others is None else known.others.get(key)

    def add(self, owner: Any, key: Hashable, sighting: CachedMeasurement) -> None:
        known = self._by_owner.get(id(owner))
        if known is not None and known() is owner and known.key != key:
            if known.others is None:
                known.others = {}
            known.others[key] = tuple(sighting)
            return
        known = _Owner(owner)
        known.key, known.seen, known.others = key, tuple(sighting), None
        self._by_owner[id(owner)] = known
        if len(self._by_owner) > self._crowded:  # a program without steps, such as a generation loop
            self._forget_dead()
            self._crowded = max(_ENOUGH, 2 * len(self._by_owner))

    def changed(self, owner: Any) -> None:
        """This memory was written to, perhaps past its version counter."""
        self._by_owner.pop(id(owner), None)

    def clear(self) -> None:
        """Forgets everything: between steps, weights are often written past their version counter."""
        self._by_owner = {}

    def _forget_dead(self) -> None:
        # Another thread may add meanwhile: `list` copies in one go, and a lost entry only costs measuring again.
        self._by_owner = {number: known for number, known in list(self._by_owner.items()) if known() is not None}


class UnfilledMemory:
    """Memory that was allocated and has not been filled yet: its content is another in every run.

    It is not read until it is written to. A call that takes it as an input shows that it has been filled, by a kernel
    that we cannot see.
    """

    def __init__(self) -> None:
        self.by_owner: dict[int, weakref.ref[Any]] = {}
        """By the `id` of the owner. Native code looks into it too, so it stays the same one."""

    def __bool__(self) -> bool:
        return bool(self.by_owner)

    def add(self, owner: Any) -> None:
        if len(self.by_owner) > _ENOUGH:
            for number in [number for number, known in list(self.by_owner.items()) if known() is None]:
                self.by_owner.pop(number, None)
        self.by_owner[id(owner)] = weakref.ref(owner)

    def __contains__(self, owner: Any) -> bool:
        known = self.by_owner.get(id(owner))
        return known is not None and known() is owner

    def discard(self, owner: Any) -> None:
        self.by_owner.pop(id(owner), None)
