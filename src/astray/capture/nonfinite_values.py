"""Keeps the tensors of the call that made NaN or infinity, at the moment it did: for a guard, on the CPU.

There statistics are known when a row is made, and the arguments of a call are still alive when it returns. Nothing here
runs while all is finite. Of each step the first call that made NaN and the first that made infinity are kept, of finite
numbers in both cases; NaN may also be made of infinities. An infinity that stands in the arguments is intended.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from astray.capture.adapters import TensorReader
from astray.records import Role, Statistics
from astray.stats import Strided, measure, pack
from astray.stats.dtypes import DTYPES
from astray.store import BackgroundWriter

Found = tuple[Role, str, Any]
"""A tensor of a call: its role, its path, and itself."""

MOST_SPOILT = 32
"""How many calls of a step that only pass NaN on are looked at: once weights hold NaN, all of them do."""

_NAN, _INF = map(Statistics._fields.index, ("nan", "inf"))
_INFINITE_CONSTANT = re.compile(r'"-?inf"', re.IGNORECASE)


def is_bad(statistics: tuple[Any, ...] | int | None) -> bool:
    """Whether NaN or infinities have been counted. False for a ticket, whose statistics come later."""
    return isinstance(statistics, tuple) and bool(statistics[_NAN] or statistics[_INF])


class _Measured(NamedTuple):
    """A tensor of a call, as it is now."""

    role: Role
    path: str
    memory: Strided
    statistics: Statistics
    fingerprint: int


class NonFiniteKeeper:
    """Keeps the tensors of the calls of one recording that made NaN or infinity."""

    def __init__(self, writer: BackgroundWriter, reader: TensorReader) -> None:
        self._writer = writer
        self._reader = reader
        self.next_step()

    def next_step(self) -> None:
        """The step is over."""
        self._spoilt = 0  # calls of this step that were given NaN
        self._wanted = {"nan", "inf"}

    def look(self, seq: int, found: list[Found], args: str | None) -> None:
        """Keeps the tensors of a call if it made NaN or infinity."""
        if not self._wanted or self._spoilt >= MOST_SPOILT:
            return
        results = self._measured([one for one in found if one[0] == "output"])
        made = self._wanted & {name for name in ("nan", "inf") if any(getattr(one.statistics, name) for one in results)}
        if _INFINITE_CONSTANT.search(args or ""):
            made.discard("inf")
        if not made:
            return
        written = {one.memory.address for one in results}  # what lies there is not what was given any more
        given = self._measured([one for one in found if one[0] != "output"])
        given = [one for one in given if one.memory.address not in written]
        if any(one.statistics.nan for one in given):
            self._spoilt += 1
            return
        if any(one.statistics.inf for one in given):
            made.discard("inf")
        if made:
            self._wanted -= made
            for one in (*given, *results):
                self._keep(seq, one)

    def _measured(self, found: list[Found]) -> list[_Measured]:
        """Those on the CPU. A device would have to be waited for."""
        near = []
        for role, path, tensor in found:
            identity = self._reader.identity(tensor)
            if identity is not None and identity.address and self._reader.device(tensor) == "cpu":
                memory = Strided(identity.address, identity.dtype, identity.shape, identity.stride)
                statistics, fingerprint = measure(memory)
                if statistics is not None and fingerprint is not None:
                    near.append(_Measured(role, path, memory, statistics, fingerprint))
        return near

    def _keep(self, seq: int, one: _Measured) -> None:
        room = self._writer.room(one.memory.size * DTYPES[one.memory.dtype].itemsize)
        pack(one.memory, room.array)
        values = self._writer.values(room, f"{seq}.{one.role}.{one.path}", one.memory.dtype, one.memory.shape)
        self._writer.attach(seq, one.role, one.path, one.fingerprint, values)
