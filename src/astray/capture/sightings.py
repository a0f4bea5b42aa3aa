"""What was measured of a tensor that may be seen again: a module's output is the next one's input.

A tensor is recognised when it is the same living object with the same identity (version counter, address, shape and
stride, as its adapter reads them), so its numbers cannot have changed. What escapes this: writes that bypass the
version counter, such as through `.data` or a numpy view.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from astray.record import Statistics
from astray.store import Values

_ENOUGH = 4096


class Sighting(NamedTuple):
    """Everything the row of a tensor needs that belongs to the tensor and not to the call."""

    tensor: weakref.ref[Any] | None
    identity: Any
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    statistics: Statistics | None
    fingerprint: int | None
    values: Values | None
    placement: str | None
    note: str | None


class Sightings:
    """Finds a tensor's numbers again for as long as the tensor lives unchanged."""

    def __init__(self) -> None:
        self._by_id: dict[int, Sighting] = {}
        self._crowded = _ENOUGH

    def find(self, tensor: Any, identity: Any) -> Sighting | None:
        seen = self._by_id.get(id(tensor))
        if seen is None or seen.identity != identity or seen.tensor is None or seen.tensor() is not tensor:
            return None
        return seen

    def add(self, tensor: Any, sighting: Sighting) -> None:
        self._by_id[id(tensor)] = sighting
        if len(self._by_id) > self._crowded:  # a program without steps, such as a generation loop
            self._forget_dead()
            self._crowded = max(_ENOUGH, 2 * len(self._by_id))

    def clear(self) -> None:
        """Trusts nothing from here on: between steps, weights are often written past their version counter."""
        self._by_id = {}

    def _forget_dead(self) -> None:
        # Another thread may add meanwhile: `list` copies in one go, and a lost entry only costs measuring again.
        self._by_id = {
            number: seen
            for number, seen in list(self._by_id.items())
            if seen.tensor is not None and seen.tensor() is not None
        }
