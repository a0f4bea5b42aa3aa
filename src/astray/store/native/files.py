"""The open files of one rank, and the order in which things reach them.

A tensor's row is written after its bytes, a call's row after its stack, and calls before tensors: whatever a killed
program left behind refers only to what is there. Bytes are written as they come, to free memory; rows wait until there
are enough for a batch or somebody asks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from astray.record import Call, Frame, Tensor
from astray.store.native.batches import BatchFile, call_columns, tensor_columns
from astray.store.native.schema import CALLS, TENSORS
from astray.store.native.values import SHARD_BYTES, Values, ValuesWriter


class Stack(NamedTuple):
    """A distinct Python stack, innermost frame first."""

    id: int
    frames: list[Frame]


Row = tuple[Any, ...]
"""The fields of a `Call` or a `Tensor`. A plain tuple of plain values is one that Python's garbage collector lets go
of; named tuples it would go through again and again while they wait."""

Item = Row | tuple[Row, Values] | Values | Stack

_STEP = itemgetter(Call._fields.index("step"))
_OF_A_CALL, _OF_A_TENSOR = len(Call._fields), len(Tensor._fields)


class RankFiles:
    """Writes what it is given into one rank's folder, which must hold none of these files yet."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        with contextlib.ExitStack() as opened:  # closes what was opened when something cannot be
            self.calls = BatchFile(folder / "calls.arrows", CALLS)
            opened.callback(self.calls.close)
            self.tensors = BatchFile(folder / "tensors.arrows", TENSORS)
            opened.callback(self.tensors.close)
            self._stack_file = (folder / "stacks.jsonl").open("xb")
            opened.pop_all()
        self.values = ValuesWriter(folder, shard_bytes)
        self.steps: set[int] = set()
        self.stacks = 0
        self._calls: list[Row] = []
        self._tensors: list[Row] = []
        self._sources: list[Values | None] = []  # of the rows in _tensors
        self._stacks: list[Stack] = []

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not written yet."""
        return len(self._calls) + len(self._tensors)

    def take(self, items: Iterable[Item]) -> None:
        """Write the bytes among `items`, and keep the rows for the next batch."""
        group: list[Values] = []
        for item in items:
            if isinstance(item, Values):
                group.append(item)
            elif isinstance(item, Stack):
                self._stacks.append(item)
            elif len(item) == _OF_A_TENSOR:
                self._tensors.append(item)
                self._sources.append(None)
            elif len(item) == _OF_A_CALL:
                self._calls.append(item)
            else:
                row, values = item
                self._tensors.append(row)
                self._sources.append(values)
        self.values.write(group)

    def write_rows(self) -> None:
        """Write every row taken so far; they are with the kernel when this returns."""
        stacks, self._stacks = self._stacks, []
        calls, self._calls = self._calls, []
        tensors, self._tensors = self._tensors, []
        sources, self._sources = self._sources, []
        if stacks:
            self._stack_file.write(b"".join(map(_line, stacks)))
            self._stack_file.flush()
            self.stacks += len(stacks)
        if calls:
            self.calls.append(call_columns(calls))
            self.steps.update(map(_STEP, calls))
        if tensors:
            self.tensors.append(tensor_columns(tensors, [None if v is None else v.blob for v in sources]))

    def close(self) -> None:
        """End every file properly, each of them even if another cannot be."""
        with contextlib.ExitStack() as closing:
            for file in (self._stack_file, self.values, self.calls, self.tensors):
                closing.callback(file.close)


def _line(stack: Stack) -> bytes:
    return json.dumps({"id": stack.id, "frames": stack.frames}).encode() + b"\n"
