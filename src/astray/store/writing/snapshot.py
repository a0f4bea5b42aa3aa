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
from astray.store.run_format.folder import claim_or_join, recording_errors
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


class RecordingSummary(NamedTuple):
    """What a snapshot's `end.json` says of the recording. `failure` is why there are no later rows."""

    why: str
    ended: str
    failure: str | None
    waited_seconds: float
    missed: list[MissedTensor]


def write_snapshot(
    path: Path,
    rank: int,
    info: RunInfo,
    overwrite: bool,
    memory: StepRingBuffer,
    summary: RecordingSummary,
    setup: Sequence[Setup] = (),
) -> Snapshot:
    """Write everything in memory. Raises nothing: `failure` of the result says that the disk is full."""
    try:
        folder = claim_or_join(path, rank, info, overwrite)
        with recording_errors(path):
            files = RankFiles(folder)
    except RunError as error:
        return Snapshot(path, None, str(error))
    lost: list[str] = []
    files.values.connect(_nothing, _nothing, lost.append)
    failure = None
    try:
        files.write_setup(setup)
        unavailable = _write_blocks(files, memory)
        files.close()
    except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
        failure, unavailable = files.abandon(error), 0
        pass_interrupt(error)
    missed = [*summary.missed, *(MissedTensor("the values of a tensor", why, 1) for why in lost)]
    if unavailable:
        missed.append(
            MissedTensor("the values of a tensor", "they went with an older step, or are not here yet", unavailable)
        )
    end = files.end_record(summary.ended, failure or summary.failure, summary.waited_seconds, missed)
    end.why = summary.why
    unwritten = files.write_end(end)
    return Snapshot(path, end, failure or unwritten)


def _write_blocks(files: RankFiles, memory: StepRingBuffer) -> int:
    """Write the blocks in memory in order; returns how many rows have values that are not in memory."""
    copies: dict[TensorBytes, TensorBytes] = {}  # held values → the copies that were written
    written: set[int] = set()  # stacks
    unavailable = 0
    for block in memory.blocks:  # all values first: rows may have got theirs after they were taken
        copies.update(_write_values(files, block.owned))
    for block in memory.blocks:
        new_stacks = set(_stacks(block)) - written
        files.write_stacks([Stack(id, memory.stacks[id]) for id in sorted(new_stacks) if id in memory.stacks])
        written |= new_stacks
        if len(block.calls[0]):
            files.write_calls(block.calls)
        if len(block.tensors[0]):
            blobs, absent = _blobs(block, copies)
            files.tensors.append(block.with_blobs(blobs) if copies else block.tensors)
            unavailable += absent
    return unavailable


def _write_values(files: RankFiles, held: Sequence[TensorBytes]) -> dict[TensorBytes, TensorBytes]:
    """Write copies that share the bytes: writing frees them, and a later snapshot may need them again."""
    copies = {
        values: TensorBytes(values.data, values.name, values.dtype, values.shape, values.sampled, values.part)
        for values in held
        if values.data is not None
    }
    for group in _groups(list(copies.values())):
        files.take_values(group)
        files.values.drain()
    return copies


def _groups(values: Sequence[TensorBytes]) -> Iterator[list[TensorBytes]]:
    group: list[TensorBytes] = []
    size = 0
    for tensor_bytes in values:
        group.append(tensor_bytes)
        size += tensor_bytes.size
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blobs(block: RowBlock, copies: dict[TensorBytes, TensorBytes]) -> tuple[list[Blob | None], int]:
    """The blob of each row, and how many rows have none although they should."""
    blobs: list[Blob | None] = []
    absent = 0
    for values in block.values:
        written = None if values is None else copies.get(values)
        blobs.append(None if written is None else written.blob)
        absent += values is not None and written is None
    return blobs, absent


def _stacks(block: RowBlock) -> list[int]:
    """The stacks to which calls refer."""
    column = numbers(block.calls[_STACK], CALLS[_STACK])
    stacks: list[int] = np.unique(column.data[column.present]).tolist()
    return stacks


def _nothing(*_: object) -> None:
    pass


def snapshot_in_child(path: str | os.PathLike[str]) -> Snapshot:
    """What `dump` returns in a forked child."""
    return Snapshot(Path(path), None, f"{path} was not written: this is a forked child, and the rows are its parent's.")
