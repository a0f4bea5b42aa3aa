"""Tensors of a recording, taken in plain Python: what the C++ of `astray.capture.pytorch.native` is compared with.

Every tensor goes the way that only odd ones go otherwise (`Observer`), which measures what it has not seen before.
`use` has recordings made by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from astray.capture.adapters import SlowPath
from astray.capture.pytorch.tensors import TorchReader


class _Numbered(weakref.ref[Any]):
    """The owner of a memory, the versions in which it is one value, and the number of that, once it was seen."""

    __slots__ = ("number", "since", "until")

    since: int
    until: int
    number: int | None


class Numbers:
    """Numbers values: a memory in one of its versions, whatever part of it a tensor shows and in which order.

    They are handed out in order of first sight, from 0. They outlive sightings, which are also cleared when the
    tickets of measurements expire: the values are still the same then. Version 0 is any: that of a view which has a
    counter of its own, such as `x.data`, or the result of an op of which autograd does not know yet.
    """

    def __init__(self) -> None:
        self._by_owner: dict[int, _Numbered] = {}
        self._next = 0
        self._crowded = 4096

    def of(self, owner: Any, version: int) -> int:
        """The number of a memory in a version of it."""
        known = self._by_owner.get(id(owner))
        if known is None or known() is not owner:
            known = self._add(owner, version)
        if version and not known.since <= version <= known.until:
            known.since = known.until = version
            known.number = None
        if known.number is None:
            known.number = self._next
            self._next += 1
        return known.number

    def ahead(self, owner: Any, version: int) -> None:
        """An op has written to a memory, and its version will say so when the op has returned."""
        self._add(owner, version).until = version + 1

    def _add(self, owner: Any, version: int) -> _Numbered:
        known = _Numbered(owner)
        known.since = known.until = version
        known.number = None
        self._by_owner[id(owner)] = known
        if len(self._by_owner) > self._crowded:  # a program without steps, such as a generation loop
            self._by_owner = {at: one for at, one in list(self._by_owner.items()) if one() is not None}
            self._crowded = max(4096, 2 * len(self._by_owner))
        return known

    def changed(self, owner: Any) -> None:
        """A write to this memory made another value of it, perhaps past its version counter."""
        self._by_owner.pop(id(owner), None)

    def clear(self) -> None:
        """Every memory may be another value from here on."""
        self._by_owner = {}


class PythonTaker:
    """What a recording asks of a taker, by the methods that see to odd tensors."""

    def __init__(self, odd: SlowPath) -> None:
        self.observe, self.observe_unread = odd.observe, odd.observe_unread
        self.written, self.changed = odd.written, odd.changed
        self._numbers = Numbers()
        self.of, self.ahead, self.forget = self._numbers.of, self._numbers.ahead, self._numbers.changed
        self.renumber = self.next_step = self._numbers.clear

    def apply(self, *_: Any) -> None:
        """The settings are the observer's."""

    def catch(self, on: bool) -> None:
        """It is told by the observer."""

    def clear(self) -> None:
        """Measurements are the observer's; the values are still the same."""

    def counted(self) -> int:
        return 0


@contextmanager
def using() -> Iterator[None]:
    """Recordings that start in here take tensors by this."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch)
        yield


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that start from now on take tensors by this."""
    monkeypatch.setattr(TorchReader, "taker", lambda _, odd: PythonTaker(odd))
