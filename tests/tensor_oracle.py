"""Tensors of a recording, taken in plain Python: what the C++ of `astray.capture.pytorch.native` is compared with.

Every tensor takes the slow path (`Observer`), which is otherwise taken by unusual ones only. `use` has recordings made
by it.
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

    They are assigned in order of first use, from 0. They outlive measurements, which are also cleared when the
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

    def written_ahead(self, owner: Any, version: int) -> None:
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


class PythonObserver:
    """A `NativeObserver` in plain Python: every tensor takes the slow path."""

    def __init__(self, slow_path: SlowPath) -> None:
        self.observe, self.observe_unread = slow_path.observe, slow_path.observe_unread
        self.written, self.changed = slow_path.written, slow_path.changed
        self._numbers = Numbers()
        self.value_number, self.written_ahead = self._numbers.of, self._numbers.written_ahead
        self.forget = self._numbers.changed
        self.renumber = self.next_step = self._numbers.clear

    def apply(self, *_: Any) -> None:
        """The settings are those of `Observer`."""

    def report_nonfinite(self, on: bool) -> None:
        """`Observer` reports it."""

    def clear(self) -> None:
        """`Observer` has the measurements; the values are still the same."""

    def take_row_count(self) -> int:
        return 0


@contextmanager
def using() -> Iterator[None]:
    """Recordings that start in here take tensors by this."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch)
        yield


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that start from now on take tensors by this."""
    monkeypatch.setattr(TorchReader, "native_observer", lambda _, slow_path: PythonObserver(slow_path))
