"""A checkpoint as `RunData`: one rank, one step, and a row for each tensor, whose site is its name.

Statistics are measured when they are read: those of one row by `Table.row`, those of all by a column. So a listing of a
few tensors reads only these, and a checkpoint of any size takes no more memory than a block of it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.checkpoints import Checkpoint
from astray.checkpoints import open as open_checkpoint
from astray.checkpoints.stored_tensor import printable, row_major
from astray.records import Frame, Role
from astray.store.columns import Column, DictionaryColumn, Table
from astray.store.measured_table import MeasuredTable
from astray.store.run import RankRun, RunData
from astray.store.run_info import End, RunInfo
from astray.wording import counted, sized

_OF_OPTIMIZER = re.compile(
    r"(^|\.)(optim|optimizers?|optimizer_states?|optimizer_state_dict|opt)\.|^state\."
    r"|\.(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|acc_delta)$"
    r"|(^|\.)master_weights\.|\.[wb]_\d+_\w+_\d+$|_(moment[12]?|velocity|inf_norm|mean_square|beta[12]_pow_acc)_\d+$"
)
"""How torch, Paddle and programs that save optimizer states beside a model name these."""


class CheckpointData(RunData):
    """A checkpoint that is read like a run. `checkpoint` has the tensors themselves."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        modified = datetime.datetime.fromtimestamp(checkpoint.files[0].stat().st_mtime, datetime.timezone.utc)
        info = RunInfo(astray="", created=modified.isoformat(timespec="seconds"))
        super().__init__(checkpoint.path, info, {0: CheckpointRank(checkpoint)})
        self.checkpoint = checkpoint

    def __repr__(self) -> str:
        facts = f"{self.checkpoint.format}, {counted(len(self.checkpoint), 'tensor')}, {sized(self.checkpoint.nbytes)}"
        return f"<CheckpointRun {self.path}: {facts}>"


def open_as_run(path: Path) -> CheckpointData:
    """Open a checkpoint as a run."""
    return CheckpointData(open_checkpoint(path))


class CheckpointRank(RankRun):
    """The only rank of a checkpoint. Its calls are in the order of the file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(0, _CheckpointSource(checkpoint))
        self._checkpoint = checkpoint

    @property
    def problems(self) -> list[str]:
        """What is not read, and why tensors that were read until now could not be."""
        tensors = self.tensors
        return [*super().problems, *(tensors.reasons if isinstance(tensors, MeasuredTable) else [])]

    def blocks(self, row: int) -> Iterator[npt.NDArray[Any]]:
        """The values of a row in row-major order, as flat arrays of bounded size."""
        return self._checkpoint.blocks(self._checkpoint.names[row])


class _CheckpointSource:
    """The tables and values of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._names = checkpoint.names
        count = len(checkpoint)
        self.end: End | None = End(
            complete=True, steps=1, calls=count, tensors=count, values=count, value_bytes=checkpoint.nbytes
        )
        self.problems = [f"{printable(name)} is not read: {what}." for name, what in checkpoint.unread.items()]

    def calls(self) -> tuple[Table, list[str]]:
        """A call for each tensor: parameters at the start of the forward, states of an optimizer in its update."""
        count = len(self._names)
        states = [role_of(name) == "state" for name in self._names]
        nulls: DictionaryColumn[str] = DictionaryColumn(np.full(count, -1, np.int32), [])
        columns: dict[str, Column] = {
            "seq": np.arange(count),
            "step": np.zeros(count, np.int64),
            "micro": np.zeros(count, np.int32),
            "kind": DictionaryColumn.of(["optimizer" if state else "parameter" for state in states]),
            "site": DictionaryColumn.of([printable(name, len(name)) or "''" for name in self._names]),
            "type": DictionaryColumn.of([""] * count),
            "call": np.zeros(count, np.int32),
            "phase": DictionaryColumn.of(["update" if state else "forward" for state in states]),
            "parent": np.full(count, -1),
            "stack": np.full(count, -1),
            "args": nulls,
            "recompute": np.zeros(count, np.bool_),
        }
        no_row = np.zeros(count, np.bool_)
        return Table(columns, {"parent": no_row, "stack": no_row}), []

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, with statistics that are yet to be measured."""
        names = self._names
        return MeasuredTable(_known_columns(self._checkpoint), lambda row: self._checkpoint.measure(names[row])), []

    def stack(self, id: int) -> list[Frame]:  # noqa: ARG002
        """Empty: a checkpoint has no calls."""
        return []

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        """The bytes of a tensor."""
        return self._checkpoint.read(self._names[row])[0].reshape(-1).view(np.uint8)


def role_of(name: str) -> Role:
    """The role of a tensor by its name: the state of an optimizer, or a parameter."""
    return "state" if _OF_OPTIMIZER.search(name) else "parameter"


def _known_columns(checkpoint: Checkpoint) -> dict[str, Column]:
    """The columns that are known without reading the tensors."""
    names = checkpoint.names
    specs = [checkpoint.spec(name) for name in names]
    count = len(names)
    first_rows: dict[object, int] = {}
    storage = [first_rows.setdefault(checkpoint.place(name), row) for row, name in enumerate(names)]
    return {
        "seq": np.arange(count),
        "role": DictionaryColumn.of([role_of(name) for name in names]),
        "path": DictionaryColumn.of([""] * count),
        "dtype": DictionaryColumn.of([spec.dtype for spec in specs]),
        "shape": DictionaryColumn.of([spec.shape for spec in specs]),
        "stride": DictionaryColumn.of([row_major(spec.shape) for spec in specs]),
        "device": DictionaryColumn.of(["cpu"] * count),
        "requires_grad": np.zeros(count, np.bool_),
        "blob_file": np.array(storage, np.int32),  # the same number for tied tensors, whatever their names
        "blob_offset": np.zeros(count, np.int64),
        "blob_bytes": np.array([spec.nbytes for spec in specs], np.int64),
        "sampled": np.full(count, -1),
        "part": DictionaryColumn(np.full(count, -1, np.int32), []),
        "placement": DictionaryColumn(np.full(count, -1, np.int32), []),
        "value": np.array(storage, np.int64),
    }
