"""The open files of one rank, and the order in which things reach them.

A tensor's row is written after its bytes, a call's row after its stack, and calls before tensors: whatever a killed
program left behind refers only to what is there. Bytes are written as they come, to free memory; rows wait until there
are enough for a batch or somebody asks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astray.record import Blob, Call, Frame, Tensor
from astray.store.late import Late
from astray.store.native import cells
from astray.store.native.batches import STATISTICS, BatchFile, call_columns, tensor_columns
from astray.store.native.cells import Row
from astray.store.native.schema import CALLS, TENSORS
from astray.store.native.values import Values
from astray.store.native.values_writer import SHARD_BYTES, ValuesWriter

MOST_ROWS = 1 << 16
"""The most rows in a batch."""

STEP, BLOB = Call._fields.index("step"), Tensor._fields.index("blob")


class Stack(NamedTuple):
    """A distinct Python stack, innermost frame first."""

    id: int
    frames: list[Frame]


class RankFiles:
    """Writes what it is given into one rank's folder, which must hold none of these files yet."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, late: Late | None = None) -> None:
        self.folder = folder
        self._late = late
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
        self._stacks: list[Stack] = []
        self._keeps_values = False

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not written yet."""
        return len(self._calls) + len(self._tensors)

    def take(self, stacks: Sequence[Stack], calls: Sequence[Row], tensors: Sequence[Row]) -> None:
        """Keep rows for the next batch: the fields of calls and tensors. A tensor has its values in place of the blob.

        A plain tuple of plain values is one that Python's garbage collector lets go of; named tuples it would go
        through again and again while they wait.
        """
        self._stacks += stacks
        self._calls += calls
        self._tensors += tensors

    def take_values(self, group: Sequence[Values]) -> None:
        """Begin to write the bytes of tensors."""
        self._keeps_values = True
        self.values.write(group)

    def write_rows(self) -> None:
        """Write every row taken so far; they are with the kernel when this returns.

        Rows whose bytes are not written yet stay, or whose measurements have not even been sent for, and those after
        them too, to keep their order.
        """
        stacks, self._stacks = self._stacks, []
        calls, self._calls = self._calls, []
        due = self._due()
        tensors, self._tensors = self._tensors[:due], self._tensors[due:]
        if stacks:
            self._stack_file.write(b"".join(map(_line, stacks)))
            self._stack_file.flush()
            self.stacks += len(stacks)
        for part in _batches(calls):
            self.calls.append(call_columns(part))
            self.steps.update(map(itemgetter(STEP), part))
        for part in _batches(tensors):
            self.tensors.append(tensor_columns(part, self._blobs(part), self._late))

    def _due(self) -> int:
        """How many of the tensors can be written now."""
        due = len(self._tensors)
        if self._keeps_values:
            unsettled = (place for place, row in enumerate(self._tensors) if row[BLOB] and not row[BLOB].settled)
            due = next(unsettled, due)
        if self._late is not None:
            places, tickets = (np.frombuffer(found, np.int64) for found in cells.tickets(self._tensors, STATISTICS))
            sent = self._late.due(tickets)
            due = min(due, int(places[sent])) if sent < len(places) else due
        return due

    def _blobs(self, rows: list[Row]) -> list[Blob | None]:
        if not self._keeps_values:
            return [None] * len(rows)
        return [None if row[BLOB] is None else row[BLOB].blob for row in rows]

    def close(self) -> None:
        """End every file properly, each of them even if another cannot be."""
        with contextlib.ExitStack() as closing:
            for file in (self._stack_file, self.values, self.calls, self.tensors):
                closing.callback(file.close)


def _line(stack: Stack) -> bytes:
    return json.dumps({"id": stack.id, "frames": stack.frames}).encode() + b"\n"


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    for start in range(0, len(rows), MOST_ROWS):
        yield rows[start : start + MOST_ROWS]
