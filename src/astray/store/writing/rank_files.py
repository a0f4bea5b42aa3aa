"""The open files of one rank, and the order in which they are written.

A tensor's row is written after its bytes, a call's row after its stack, and calls before tensors: what a killed program
leaves refers only to what is there. Bytes are written as they come, to free memory; rows wait until there are enough
for a batch, or `write_rows` is called.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astray.interrupts import pass_interrupt
from astray.process import largest_file, reason
from astray.records import Blob, Frame, MissedTensor, Setup
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.run_format.encoder import BatchFile, call_columns, tensor_columns
from astray.store.run_format.folder import END_FILE, RANK_FILES, SETUP_FILE, STACKS_FILE
from astray.store.run_format.rows import STEP, TICKET, VALUES, EncodedCells, RowBuffer, call_rows, numbers, tensor_rows
from astray.store.run_format.schema import CALLS, TENSORS
from astray.store.run_info import End, now, sync, write_json
from astray.store.writing.values_writer import SHARD_BYTES, ValuesWriter


class Stack(NamedTuple):
    """A distinct Python stack, innermost frame first."""

    id: int
    frames: list[Frame]


class RankFiles:
    """Writes into one rank's folder, which must hold none of these files yet."""

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, deferred: DeferredMeasurements | None = None
    ) -> None:
        self.folder = folder
        self._deferred = deferred
        with contextlib.ExitStack() as opened:  # closes the others when one cannot be opened
            self.calls = BatchFile(folder / "calls.arrows", CALLS)
            opened.callback(self.calls.close)
            self.tensors = BatchFile(folder / "tensors.arrows", TENSORS)
            opened.callback(self.tensors.close)
            self._stack_file = (folder / STACKS_FILE).open("xb")
            opened.pop_all()
        self.values = ValuesWriter(folder, shard_bytes)
        self.steps: set[int] = set()
        self.stacks = 0
        self.setup = 0
        self._setup_file: BufferedWriter | None = None  # opened when there is something to write
        self._calls = call_rows()
        self._tensors = tensor_rows()
        self._stacks: list[Stack] = []
        self._keeps_values = False

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not written yet."""
        return len(self._calls) + len(self._tensors)

    @property
    def keeps_values(self) -> bool:
        """Whether bytes of tensors were ever handed over."""
        return self._keeps_values

    def take(self, stacks: Sequence[Stack], calls: RowBuffer, tensors: RowBuffer) -> None:
        """Keep rows for the next batch."""
        self._stacks += stacks
        self._calls = _joined(self._calls, calls)
        self._tensors = _joined(self._tensors, tensors)

    def take_values(self, group: Sequence[TensorBytes]) -> None:
        """Begin to write the bytes of tensors."""
        self._keeps_values = True
        self.values.write(group)

    def write_rows(self) -> None:
        """Write every row taken so far; they are with the kernel when this returns.

        Rows stay whose bytes are not written yet, or whose measurements are not due, and so do those after them, to
        keep the order.
        """
        stacks, self._stacks = self._stacks, []
        calls = self._calls.take()
        tensors = self._tensors.take(self._due())
        self.write_stacks(stacks)
        if len(calls):
            self.write_calls(call_columns(calls))
        if len(tensors):
            self.tensors.append(tensor_columns(tensors, self._blobs(tensors), self._deferred))

    def write_stacks(self, stacks: Sequence[Stack]) -> None:
        """Write stacks, before the calls that refer to them."""
        if stacks:
            self._stack_file.write(b"".join(map(_line, stacks)))
            self._stack_file.flush()
            self.stacks += len(stacks)

    def write_setup(self, rows: Sequence[Setup]) -> None:
        """Write the program's settings, before the calls for which they hold."""
        if rows:
            if self._setup_file is None:
                self._setup_file = (self.folder / SETUP_FILE).open("xb")
            self._setup_file.write(b"".join(json.dumps(row._asdict()).encode() + b"\n" for row in rows))
            self._setup_file.flush()
            self.setup += len(rows)

    def write_calls(self, columns: Sequence[EncodedCells]) -> None:
        """Write the rows of calls, given as columns."""
        self.calls.append(columns)
        self.steps.update(np.unique(numbers(columns[STEP], CALLS[STEP]).data).tolist())

    def _due(self) -> int:
        """How many of the tensors' rows can be written now."""
        due = len(self._tensors)
        if self._keeps_values:
            values = self._tensors.cells(VALUES)
            due = next((place for place, each in enumerate(values) if each is not None and not each.resolved), due)
        if self._deferred is not None:
            places, tickets = (np.frombuffer(found, np.int64) for found in self._tensors.tickets(TICKET))
            sent = self._deferred.due(tickets)
            due = min(due, int(places[sent])) if sent < len(places) else due
        return due

    def _blobs(self, rows: RowBuffer) -> list[Blob | None] | None:
        if not self._keeps_values:
            return None
        return [None if values is None else values.blob for values in rows.cells(VALUES)]

    def close(self) -> None:
        """Close every file, each of them even if another cannot be."""
        with contextlib.ExitStack() as closing:
            for file in (self._setup_file, self._stack_file, self.values, self.calls, self.tensors):
                if file is not None:
                    closing.callback(file.close)

    def abandon(self, error: Exception, write: Callable[[], None] | None = None) -> str:
        """After an error, write what can be of the rows taken, by `write` if they are elsewhere; says what happened."""
        for save in (self.values.abandon, write or self.write_rows, self.close):
            with contextlib.suppress(Exception):
                save()
        why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            why = "there was no memory left"
        return (
            f"Recording into {self.folder} stopped: {why}. The program goes on; {self.calls.rows:,} calls and "
            f"{self.tensors.rows:,} tensors before that can be read. {_remedy(error)}".rstrip()
        )

    def end_record(self, ended: str, failure: str | None, waited_seconds: float, missed: list[MissedTensor]) -> End:
        """How the recording ended, and what was written."""
        return End(
            complete=failure is None,
            ended=ended,
            finished=now(),
            failure=failure,
            steps=len(self.steps),
            calls=self.calls.rows,
            tensors=self.tensors.rows,
            stacks=self.stacks,
            setup=self.setup,
            values=self.values.count,
            value_bytes=self.values.nbytes,
            waited_seconds=round(waited_seconds, 3),
            missed=missed,
        )

    def write_end(self, end: End) -> str | None:
        """Write `end.json` once all else is on the disk; returns a sentence when that is impossible."""
        unsynced = self._sync()
        if unsynced is not None:
            end.complete, end.failure = False, end.failure or unsynced
        try:
            write_json(self.folder / END_FILE, end)
            _sync_folder(self.folder)
            _sync_folder(self.folder.parent)
        except OSError as error:
            pass_interrupt(error)
            return f"{self.folder / END_FILE} could not be written: {error.strerror}."
        return unsynced

    def _sync(self) -> str | None:
        """Sync every file to the disk: until then a power failure may lose them."""
        path = self.folder
        try:
            for path in sorted(entry for entry in self.folder.iterdir() if RANK_FILES.fullmatch(entry.name)):
                with path.open("rb") as file:
                    sync(file.fileno())
        except OSError as error:
            pass_interrupt(error)
            return f"{path} could not be put onto the disk: {error.strerror}."
        return None


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, where folders can be opened."""
    if os.name == "posix":
        file = os.open(folder, os.O_RDONLY)
        try:
            sync(file)
        finally:
            os.close(file)


def _line(stack: Stack) -> bytes:
    return json.dumps({"id": stack.id, "frames": stack.frames}).encode() + b"\n"


def _joined(rows: RowBuffer, more: RowBuffer) -> RowBuffer:
    if len(rows):
        rows.extend(more)
        return rows
    return more


def _remedy(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "Record less of it, or lower queue_bytes."
    if isinstance(error, OSError) and error.errno == errno.EFBIG and largest_file() is not None:
        return ""  # the error says it already
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "Make room, or record into another folder." if full else "Record into another folder."
