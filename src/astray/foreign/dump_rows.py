"""The rows of one rank of another tool's dump, as its reader finds them, made into what a run stands on.

A reader tells of calls and tensors in the order of observation: a child's outputs before its parent's. It says what the
dump says, and where the values are; statistics are measured from the values, if there are any, when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import is_shape, row_major
from astray.errors import RunError
from astray.part import Part
from astray.records import Call, Frame, Kind, Phase, Role, Statistics, Tensor
from astray.stats import DTYPES, Measurement, Strided, measure
from astray.store.columns import Column, DictionaryColumn, Table
from astray.store.measured_table import MEASURES, MeasuredTable
from astray.store.run import RankRun
from astray.store.run_info import End
from astray.store.validation import contradictions
from astray.wording import counted

Load = Callable[[], npt.NDArray[Any]]
"""Reads the values of a tensor, in its storage dtype (bfloat16 as uint16) and its shape. Raises RunError."""


class ValueLocation(NamedTuple):
    """Where the values of a tensor lie. Rows with an equal `place` share them: they are read and measured once.

    nbytes: of all of them. sampled: how many values, when they are only a sample. part: the text of the slice, an
    `astray.part.Part`, when they are only those of a slice.
    """

    place: object
    load: Load
    nbytes: int
    sampled: int | None = None
    part: str | None = None


class DumpRows:
    """Takes calls and tensors one by one.

    >>> rows = Gathering()
    >>> seq = rows.call("layers.0", "Linear", step=3)
    >>> rows.tensor(seq, "output", "out", "float32", (2, 3), values=Values(path, lambda: npy.read(path), 24))
    >>> RankRun(0, rows.source())
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._calls: list[Call] = []
        self._tensors: list[Tensor] = []
        self._values: list[ValueLocation | None] = []
        self._stacks: dict[tuple[Frame, ...], int] = {}

    def stack(self, frames: Sequence[Frame]) -> int | None:
        """The number of a Python stack, innermost frame first; None of an empty one."""
        return self._stacks.setdefault(tuple(frames), len(self._stacks)) if frames else None

    def call(
        self,
        site: str,
        type: str,
        *,
        step: int = 0,
        micro: int = 0,
        kind: Kind = "module",
        call: int = 0,
        phase: Phase = "forward",
        parent: int | None = None,
        stack: int | None = None,
        args: str | None = None,
        recompute: bool = False,
    ) -> int:
        """Add a call, and give its number."""
        seq = len(self._calls)
        self._calls.append(Call(seq, step, micro, kind, site, type, call, phase, parent, stack, args, recompute))
        return seq

    def set_parent(self, seq: int, parent: int) -> None:
        """Say later around which call another was."""
        self._calls[seq] = self._calls[seq]._replace(parent=parent)

    def tensor(
        self,
        seq: int,
        role: Role,
        path: str,
        dtype: str,
        shape: Sequence[int],
        *,
        values: ValueLocation | None = None,
        statistics: Statistics | None = None,
        fingerprint: int | None = None,
        requires_grad: bool = False,
        device: str = "",
        placement: str | None = None,
        note: str | None = None,
    ) -> None:
        """Add a tensor of a call. `statistics` are the dump's own; a count it does not tell is −1."""
        whole = tuple(shape)
        form = (dtype, whole, row_major(whole), device, requires_grad)
        self._values.append(values if dtype in DTYPES else None)
        self._tensors.append(Tensor(seq, role, path, *form, statistics, fingerprint, None, placement, note))

    def problem(self, text: str) -> None:
        """Say what is not there or cannot be read, in a sentence."""
        self.problems.append(text)

    def __len__(self) -> int:
        return len(self._calls)

    def source(self, complete: bool = True, ended: str = "normally") -> DumpSource:
        """What a `RankRun` reads. `complete` is False where the dump itself shows that it was cut short."""
        return DumpSource(self._calls, self._tensors, self._values, list(self._stacks), self.problems, complete, ended)


class DumpSource:
    """The tables, stacks and values of one rank. It is a `RankSource`."""

    def __init__(
        self,
        calls: list[Call],
        tensors: list[Tensor],
        values: list[ValueLocation | None],
        stacks: list[tuple[Frame, ...]],
        problems: list[str],
        complete: bool,
        ended: str,
    ) -> None:
        self._calls, self._tensors, self._values, self._stacks = calls, tensors, values, stacks
        self.problems = problems
        kept = [one for one in values if one is not None]
        self.end: End | None = End(
            complete=complete,
            ended=ended,
            steps=len({call.step for call in calls}),
            calls=len(calls),
            tensors=len(tensors),
            stacks=len(stacks),
            values=len(kept),
            value_bytes=sum(one.nbytes for one in kept),
        )

    def calls(self) -> tuple[Table, list[str]]:
        """The calls."""
        fields = dict(zip(Call._fields, zip(*self._calls, strict=True), strict=True)) if self._calls else {}
        of = {name: fields.get(name, ()) for name in Call._fields}
        columns: dict[str, Column] = {
            "seq": np.array(of["seq"], np.int64),
            "step": np.array(of["step"], np.int64),
            "micro": np.array(of["micro"], np.int32),
            "kind": DictionaryColumn.of(of["kind"]),
            "site": DictionaryColumn.of(of["site"]),
            "type": DictionaryColumn.of(of["type"]),
            "call": np.array(of["call"], np.int32),
            "phase": DictionaryColumn.of(of["phase"]),
            "parent": _numbers(of["parent"]),
            "stack": _numbers(of["stack"]),
            "args": DictionaryColumn.of(of["args"]),
            "recompute": np.array(of["recompute"], np.bool_),
        }
        masks = {name: np.asarray(columns[name]) >= 0 for name in ("parent", "stack")}
        return Table(columns, masks), []

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, with statistics that are measured when they are looked at."""
        places: dict[object, int] = {}
        file = [-1 if one is None else places.setdefault(one.place, len(places)) for one in self._values]
        sampled = [-1 if one is None or one.sampled is None else one.sampled for one in self._values]
        part = DictionaryColumn.of([None if one is None else one.part for one in self._values])
        columns: dict[str, Column] = {
            "seq": np.array([row.seq for row in self._tensors], np.int64),
            **{
                name: DictionaryColumn.of([getattr(row, name) for row in self._tensors])
                for name in ("role", "path", "dtype", "shape", "stride", "device", "placement")
            },
            "requires_grad": np.array([row.requires_grad for row in self._tensors], np.bool_),
            "blob_file": np.array(file, np.int32),
            "blob_offset": np.where(np.array(file, np.int64) >= 0, 0, -1),
            "blob_bytes": np.array([-1 if one is None else one.nbytes for one in self._values], np.int64),
            "sampled": np.array(sampled, np.int64),
            "part": part,
            "value": np.full(len(file), -1),  # no dump tells; `astray.graph` derives it
        }
        # a sample or a slice says nothing of the whole
        whole = (np.array(file) >= 0) & (np.array(sampled) < 0) & (part.codes < 0)
        told, problems = _sound([row.statistics for row in self._tensors], columns["dtype"])
        table = MeasuredTable(
            columns,
            self._measure,
            waiting=whole,
            statistics=told,
            notes=[row.note for row in self._tensors],
            fingerprints=[row.fingerprint for row in self._tensors],
        )
        return table, problems

    def stack(self, id: int) -> list[Frame]:
        """A Python stack, innermost frame first; empty when it is not there."""
        return list(self._stacks[id]) if 0 <= id < len(self._stacks) else []

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:  # noqa: ARG002 - as a RankSource has it
        """The bytes of a tensor, None when they were not kept."""
        values = self._values[row]
        return None if values is None else self._load(row).reshape(-1).view(np.uint8)

    def _measure(self, row: int) -> Measurement:
        array = self._load(row)  # whose memory must be there while it is read
        return measure(Strided.from_numpy(array, self._tensors[row].dtype))

    def _load(self, row: int) -> npt.NDArray[Any]:
        values, tensor = self._values[row], self._tensors[row]
        assert values is not None, "asked for only where there are some"
        array = values.load()
        shape = tensor.shape if values.part is None else Part.parse(values.part).shape_of(tensor.shape)
        shape = shape if values.sampled is None else (values.sampled,)
        storage = DTYPES[tensor.dtype].storage
        if array.dtype != storage or array.shape != shape:
            raise RunError(
                f"{values.place} holds {array.dtype} of shape {list(array.shape)}, and the dump says "
                f"{tensor.dtype} of shape {list(shape)}."
            )
        return np.ascontiguousarray(array).reshape(shape)


class DumpRank(RankRun):
    """One rank of a foreign dump. Its problems grow as values are looked at that cannot be read."""

    @property
    def problems(self) -> list[str]:
        """What is not there, and why tensors could not be read that were asked for until now."""
        tensors = self.tensors
        return [*super().problems, *(tensors.reasons if isinstance(tensors, MeasuredTable) else [])]


def shape_of(value: object) -> tuple[int, ...] | None:
    """The shape a dump gives, None when that is none.

    >>> shape_of([2, 3]), shape_of([2, -1]), shape_of("2x3")
    ((2, 3), None, None)
    """
    return tuple(value) if isinstance(value, (list, tuple)) and is_shape(value) else None


def _sound(told: list[Statistics | None], dtype: Column) -> tuple[list[Statistics | None], list[str]]:
    """What a dump says of its tensors without what no tensor can have, and a sentence about that."""
    rows = [row for row, one in enumerate(told) if one is not None]
    if not rows:
        return told, []
    known = zip(*(one for one in told if one is not None), strict=True)
    columns = {
        name: np.array([(np.nan if name in MEASURES else -1) if cell is None else cell for cell in column])
        for name, column in zip(Statistics._fields, known, strict=True)
    }
    assert isinstance(dtype, DictionaryColumn)
    wrong = list(contradictions(columns.__getitem__, dtype.take(np.array(rows))))
    if not wrong:
        return told, []
    bad = np.logical_or.reduce([one.rows for one in wrong])
    at = int(np.argmax(bad))
    first = next(one for one in wrong if one.rows[at])
    left_out = {rows[place] for place in np.flatnonzero(bad).tolist()}
    sentence = (
        f"The dump says of {counted(len(left_out), 'tensor')} what no tensor has, and that is left out. The first is "
        f"tensor {rows[at]}, with {first.column} {columns[first.column][at].item()!r} in place of {first.expected}."
    )
    return [None if row in left_out else one for row, one in enumerate(told)], [sentence]


def _numbers(values: Sequence[int | None]) -> npt.NDArray[np.int64]:
    return np.array([-1 if value is None else value for value in values], np.int64)
