"""Caches what was measured of a tensor's memory, which may be seen again: a module's output is the next one's input.

A measurement is reused for as long as the storage lives and has not been written to, by the key that the adapter gives
(address, version counter, layout). Views of one memory in one order share it, so `x.view(-1)` costs a row and no
reading. Writes that bypass the version counter (through `.data`, a numpy view or a collective) are not noticed: code
that sees such a write calls `changed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from astray.store import TensorBytes

_SWEEP_SIZE = 4096


class CachedMeasurement(NamedTuple):
    """The part of a tensor's row that is costly to get, and depends on its numbers alone."""

    statistics: tuple[Any, ...] | int | None  # the fields of a `Statistics`, or the ticket for them
    fingerprint: int | None
    values: TensorBytes | None
    placement: str | None = None
    note: str | None = None


class _Owner(weakref.ref[Any]):
    """The owner of a memory, and what was measured of it.

    One object rather than several: thousands of these live at a time, and the garbage collector visits every object
    except numbers, strings and plain tuples of them. So measurements are kept as plain tuples, too.
    """

    __slots__ = ("by_key", "key", "measurement")

    key: Hashable
    measurement: tuple[Any, ...]
    by_key: dict[Hashable, tuple[Any, ...]] | None  # seen under further keys


class MeasurementCache:
    """Finds the measurements of a memory, by the living object that owns it and a key for the part that was read."""

    def __init__(self) -> None:
        self._by_owner: dict[int, _Owner] = {}
        self._sweep_above = _SWEEP_SIZE

    def find(self, owner: Any, key: Hashable) -> tuple[Any, ...] | None:
        """The fields of a `CachedMeasurement`."""
        entry = self._by_owner.get(id(owner))
        if entry is None or entry() is not owner:
            return None
        if entry.key == key:
            return entry.measurement
        return None if entry.by_key is None else entry.by_key.get(key)

    def add(self, owner: Any, key: Hashable, measurement: CachedMeasurement) -> None:
        entry = self._by_owner.get(id(owner))
        if entry is not None and entry() is owner and entry.key != key:
            if entry.by_key is None:
                entry.by_key = {}
            entry.by_key[key] = tuple(measurement)
            return
        entry = _Owner(owner)
        entry.key, entry.measurement, entry.by_key = key, tuple(measurement), None
        self._by_owner[id(owner)] = entry
        if len(self._by_owner) > self._sweep_above:  # a program without steps, such as a generation loop
            self._drop_dead()
            self._sweep_above = max(_SWEEP_SIZE, 2 * len(self._by_owner))

    def changed(self, owner: Any) -> None:
        """This memory was written to, perhaps without its version counter changing."""
        self._by_owner.pop(id(owner), None)

    def clear(self) -> None:
        """Forgets everything: between steps, weights are often written to without their version counters changing."""
        self._by_owner = {}

    def _drop_dead(self) -> None:
        # Another thread may add meanwhile: `list` copies in one go, and a lost entry only costs measuring again.
        self._by_owner = {number: entry for number, entry in list(self._by_owner.items()) if entry() is not None}


class UnfilledMemory:
    """Memory that was allocated and has not been filled yet: its content differs in every run.

    It is not read until it is written to. If a call takes it as an input, it must have been filled by a kernel that we
    cannot see.
    """

    def __init__(self) -> None:
        self.by_owner: dict[int, weakref.ref[Any]] = {}
        """By the `id` of the owner. Native code reads this dict too, so it is never replaced."""

    def __bool__(self) -> bool:
        return bool(self.by_owner)

    def add(self, owner: Any) -> None:
        if len(self.by_owner) > _SWEEP_SIZE:
            for number in [number for number, entry in list(self.by_owner.items()) if entry() is None]:
                self.by_owner.pop(number, None)
        self.by_owner[id(owner)] = weakref.ref(owner)

    def __contains__(self, owner: Any) -> bool:
        entry = self.by_owner.get(id(owner))
        return entry is not None and entry() is owner

    def discard(self, owner: Any) -> None:
        self.by_owner.pop(id(owner), None)
