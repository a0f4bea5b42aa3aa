"""Keeps the tensors of the call that made NaN or infinity, when it returns: for a guard, on the CPU.

On the CPU statistics are known when a row is made, and the arguments of a call are still alive when it returns. Nothing
here runs while all values are finite. In each step the first call that made NaN and the first that made infinity are
kept, if their inputs were finite; NaN may also come from infinite inputs. An infinity among the plain arguments is
intended.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from astray.capture.adapters import TensorReader
from astray.records import Role, Statistics
from astray.stats import Strided, measure, pack
from astray.stats.dtypes import DTYPES
from astray.store import BackgroundWriter

ObservedTensor = tuple[Role, str, Any]
"""A tensor of a call: its role, its path, and itself."""

MOST_TAINTED = 32
"""How many calls of a step that were given NaN are examined: once weights hold NaN, every call is."""

_NAN, _INF = map(Statistics._fields.index, ("nan", "inf"))
_INFINITE_CONSTANT = re.compile(r'"-?inf"', re.IGNORECASE)


def has_nonfinite(statistics: tuple[Any, ...] | int | None) -> bool:
    """Whether NaN or infinities have been counted. False for a ticket, whose statistics come later."""
    return isinstance(statistics, tuple) and bool(statistics[_NAN] or statistics[_INF])


class _MeasuredTensor(NamedTuple):
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
        self._tainted = 0  # calls of this step that were given NaN
        self._wanted = {"nan", "inf"}

    def examine(self, seq: int, tensors: list[ObservedTensor], args: str | None) -> None:
        """Keeps the tensors of a call if it made NaN or infinity."""
        if not self._wanted or self._tainted >= MOST_TAINTED:
            return
        results = self._measured([tensor for tensor in tensors if tensor[0] == "output"])
        made = self._wanted & {
            name for name in ("nan", "inf") if any(getattr(tensor.statistics, name) for tensor in results)
        }
        if _INFINITE_CONSTANT.search(args or ""):
            made.discard("inf")
        if not made:
            return
        written = {tensor.memory.address for tensor in results}  # which no longer holds what the call was given
        inputs = self._measured([tensor for tensor in tensors if tensor[0] != "output"])
        inputs = [tensor for tensor in inputs if tensor.memory.address not in written]
        if any(tensor.statistics.nan for tensor in inputs):
            self._tainted += 1
            return
        if any(tensor.statistics.inf for tensor in inputs):
            made.discard("inf")
        if made:
            self._wanted -= made
            for tensor in (*inputs, *results):
                self._keep(seq, tensor)

    def _measured(self, tensors: list[ObservedTensor]) -> list[_MeasuredTensor]:
        """Measures those on the CPU. Others would have to wait for their device."""
        measured = []
        for role, path, tensor in tensors:
            identity = self._reader.identity(tensor)
            if identity is not None and identity.address and self._reader.device(tensor) == "cpu":
                memory = Strided(identity.address, identity.dtype, identity.shape, identity.stride)
                statistics, fingerprint = measure(memory)
                if statistics is not None and fingerprint is not None:
                    measured.append(_MeasuredTensor(role, path, memory, statistics, fingerprint))
        return measured

    def _keep(self, seq: int, tensor: _MeasuredTensor) -> None:
        buffer = self._writer.take_buffer(tensor.memory.size * DTYPES[tensor.memory.dtype].itemsize)
        pack(tensor.memory, buffer.array)
        values = self._writer.values(
            buffer, f"{seq}.{tensor.role}.{tensor.path}", tensor.memory.dtype, tensor.memory.shape
        )
        self._writer.attach(seq, tensor.role, tensor.path, tensor.fingerprint, values)
