"""Writes what a flight recorder holds as a run like any other.

Values are written before the rows that refer to them, stacks before calls, calls before tensors, as in a recording. A
kill in the middle leaves an incomplete run that can be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astray.errors import RunError
from astray.interrupts import pass_interrupt
from astray.records import Blob, Call, MissedTensor, Setup
from astray.store.deferred import TensorBytes
from astray.store.run_format.folder import join, recordable
from astray.store.run_format.rows import numbers
from astray.store.run_format.schema import CALLS
from astray.store.run_info import End, RunInfo
from astray.store.writing.rank_files import RankFiles, Stack
from astray.store.writing.record_queue import GROUP_BYTES
from astray.store.writing.step_buffer import RowBlock, StepRingBuffer

_STACK = Call._fields.index("stack")


class Snapshot(NamedTuple):
    """A run written by a flight recorder: where it is, its `end.json`, and a sentence when something went wrong."""

    path: Path
    end: End | None
    failure: str | None


class SnapshotAccount(NamedTuple):
    """What a snapshot says of the recording. `failure` is why there are no later rows."""

    why: str
    ended: str
    failure: str | None
    waited_seconds: float
    missed: list[MissedTensor]


def write_dump(
    path: Path,
    rank: int,
    info: RunInfo,
    overwrite: bool,
    memory: StepRingBuffer,
    account: SnapshotAccount,
    setup: Sequence[Setup] = (),
) -> Snapshot:
    """Write everything in memory. Raises nothing: `failure` of the result says that the disk is full."""
    try:
        folder = join(path, rank, info, overwrite)
        with recordable(path):
            files = RankFiles(folder)
    except RunError as error:
        return Snapshot(path, None, str(error))
    lost: list[str] = []
    files.values.connect(_nothing, _nothing, lost.append)
    failure = None
    try:
        files.write_setup(setup)
        gone = _write_pieces(files, memory)
        files.close()
    except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
        failure, gone = files.abandon(error), 0
        pass_interrupt(error)
    missed = [*account.missed, *(MissedTensor("the values of a tensor", why, 1) for why in lost)]
    if gone:
        missed.append(MissedTensor("the values of a tensor", "they went with an older step, or are not here yet", gone))
    end = files.account(account.ended, failure or account.failure, account.waited_seconds, missed)
    end.why = account.why
    unwritten = files.write_end(end)
    return Snapshot(path, end, failure or unwritten)


def _write_pieces(files: RankFiles, memory: StepRingBuffer) -> int:
    """Write the blocks in memory in order; returns how many rows have values that are not there."""
    places: dict[TensorBytes, TensorBytes] = {}  # held values → the copies that were written
    known: set[int] = set()
    gone = 0
    for piece in memory.pieces:  # all values first: rows may have got theirs after they were taken
        places.update(_write_values(files, piece.owned))
    for piece in memory.pieces:
        referred = set(_stacks(piece)) - known
        files.write_stacks([Stack(id, memory.stacks[id]) for id in sorted(referred) if id in memory.stacks])
        known |= referred
        if len(piece.calls[0]):
            files.write_calls(piece.calls)
        if len(piece.tensors[0]):
            blobs, absent = _blobs(piece, places)
            files.tensors.append(piece.with_blobs(blobs) if places else piece.tensors)
            gone += absent
    return gone


def _write_values(files: RankFiles, held: Sequence[TensorBytes]) -> dict[TensorBytes, TensorBytes]:
    """Write copies that share the bytes: writing frees them, and a later snapshot may need them again."""
    copies = {
        values: TensorBytes(values.data, values.name, values.dtype, values.shape, values.sampled, values.part)
        for values in held
        if values.data is not None
    }
    for group in _groups(list(copies.values())):
        files.take_values(group)
        files.values.settle()
    return copies


def _groups(values: Sequence[TensorBytes]) -> Iterator[list[TensorBytes]]:
    group: list[TensorBytes] = []
    size = 0
    for one in values:
        group.append(one)
        size += one.size
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blobs(piece: RowBlock, places: dict[TensorBytes, TensorBytes]) -> tuple[list[Blob | None], int]:
    """Where the values of each row are, and how many rows have none although they should."""
    blobs: list[Blob | None] = []
    absent = 0
    for values in piece.values:
        written = None if values is None else places.get(values)
        blobs.append(None if written is None else written.blob)
        absent += values is not None and written is None
    return blobs, absent


def _stacks(piece: RowBlock) -> list[int]:
    """The stacks to which calls refer."""
    found = numbers(piece.calls[_STACK], CALLS[_STACK])
    stacks: list[int] = np.unique(found.data[found.present]).tolist()
    return stacks


def _nothing(*_: object) -> None:
    pass


def in_child(path: str | os.PathLike[str]) -> Snapshot:
    """The answer to `dump` in a forked child."""
    return Snapshot(Path(path), None, f"{path} was not written: this is a forked child, and the rows are its parent's.")
