"""Makes the tables of a run from the calls and tensors that the reader of another tool's dump adds.

A reader adds calls and tensors in the order of observation, a child's outputs before its parent's, with the facts of
the dump and the locations of values. Statistics that the dump does not have are measured from the values on demand.
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
    """The location of a tensor's values. Rows with an equal `place` share them: they are read and measured once.

    nbytes: of all values. sampled: how many values, if they are a sample. part: the text of the slice, an
    `astray.part.Part`, if they are those of a slice.
    """

    place: object
    load: Load
    nbytes: int
    sampled: int | None = None
    part: str | None = None


class DumpRows:
    """Collects calls and tensors one by one.

    >>> rows = DumpRows()
    >>> seq = rows.call("layers.0", "Linear", step=3)
    >>> rows.tensor(seq, "output", "out", "float32", (2, 3), values=ValueLocation(path, lambda: npy.read(path), 24))
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
        """Add a call, and return its number."""
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
        """Add a tensor of a call. `statistics` are the dump's own; a count that it does not have is −1."""
        sizes = tuple(shape)
        form = (dtype, sizes, row_major(sizes), device, requires_grad)
        self._values.append(values if dtype in DTYPES else None)
        self._tensors.append(Tensor(seq, role, path, *form, statistics, fingerprint, None, placement, note))

    def problem(self, text: str) -> None:
        """Report what is missing or cannot be read, in a sentence."""
        self.problems.append(text)

    def __len__(self) -> int:
        return len(self._calls)

    def source(self, complete: bool = True, ended: str = "normally") -> DumpSource:
        """The source of a `RankRun`. `complete` is False where the dump itself shows that it was cut short."""
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
        kept = [location for location in values if location is not None]
        self.end: End | None = End(
            complete=complete,
            ended=ended,
            steps=len({call.step for call in calls}),
            calls=len(calls),
            tensors=len(tensors),
            stacks=len(stacks),
            values=len(kept),
            value_bytes=sum(location.nbytes for location in kept),
        )

    def calls(self) -> tuple[Table, list[str]]:
        """The calls."""
        fields = dict(zip(Call._fields, zip(*self._calls, strict=True), strict=True)) if self._calls else {}
        cells = {name: fields.get(name, ()) for name in Call._fields}
        columns: dict[str, Column] = {
            "seq": np.array(cells["seq"], np.int64),
            "step": np.array(cells["step"], np.int64),
            "micro": np.array(cells["micro"], np.int32),
            "kind": DictionaryColumn.of(cells["kind"]),
            "site": DictionaryColumn.of(cells["site"]),
            "type": DictionaryColumn.of(cells["type"]),
            "call": np.array(cells["call"], np.int32),
            "phase": DictionaryColumn.of(cells["phase"]),
            "parent": _numbers(cells["parent"]),
            "stack": _numbers(cells["stack"]),
            "args": DictionaryColumn.of(cells["args"]),
            "recompute": np.array(cells["recompute"], np.bool_),
        }
        masks = {name: np.asarray(columns[name]) >= 0 for name in ("parent", "stack")}
        return Table(columns, masks), []

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, with statistics that are measured on demand."""
        locations = self._values
        places: dict[object, int] = {}
        file = [-1 if values is None else places.setdefault(values.place, len(places)) for values in locations]
        sampled = [-1 if values is None or values.sampled is None else values.sampled for values in locations]
        part = DictionaryColumn.of([None if values is None else values.part for values in locations])
        columns: dict[str, Column] = {
            "seq": np.array([row.seq for row in self._tensors], np.int64),
            **{
                name: DictionaryColumn.of([getattr(row, name) for row in self._tensors])
                for name in ("role", "path", "dtype", "shape", "stride", "device", "placement")
            },
            "requires_grad": np.array([row.requires_grad for row in self._tensors], np.bool_),
            "blob_file": np.array(file, np.int32),
            "blob_offset": np.where(np.array(file, np.int64) >= 0, 0, -1),
            "blob_bytes": np.array([-1 if values is None else values.nbytes for values in locations], np.int64),
            "sampled": np.array(sampled, np.int64),
            "part": part,
            "value": np.full(len(file), -1),  # no dump has it; `astray.graph` derives it
        }
        # a sample or a slice does not have the statistics of the whole
        whole = (np.array(file) >= 0) & (np.array(sampled) < 0) & (part.codes < 0)
        statistics, problems = _drop_impossible([row.statistics for row in self._tensors], columns["dtype"])
        table = MeasuredTable(
            columns,
            self._measure,
            waiting=whole,
            statistics=statistics,
            notes=[row.note for row in self._tensors],
            fingerprints=[row.fingerprint for row in self._tensors],
        )
        return table, problems

    def stack(self, id: int) -> list[Frame]:
        """A Python stack, innermost frame first; empty when the dump has none."""
        return list(self._stacks[id]) if 0 <= id < len(self._stacks) else []

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:  # noqa: ARG002 - of RankSource
        """The bytes of a tensor, None when they were not kept."""
        values = self._values[row]
        return None if values is None else self._load(row).reshape(-1).view(np.uint8)

    def _measure(self, row: int) -> Measurement:
        array = self._load(row)  # kept alive while its memory is read
        return measure(Strided.from_numpy(array, self._tensors[row].dtype))

    def _load(self, row: int) -> npt.NDArray[Any]:
        values, tensor = self._values[row], self._tensors[row]
        assert values is not None, "called only where there are some"
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
    """One rank of another tool's dump. Its problems grow as values are read that turn out unreadable."""

    @property
    def problems(self) -> list[str]:
        """What is missing, and why tensors could not be read so far."""
        tensors = self.tensors
        return [*super().problems, *(tensors.reasons if isinstance(tensors, MeasuredTable) else [])]


def shape_of(value: object) -> tuple[int, ...] | None:
    """The shape in a dump; None when the value is not a shape.

    >>> shape_of([2, 3]), shape_of([2, -1]), shape_of("2x3")
    ((2, 3), None, None)
    """
    return tuple(value) if isinstance(value, (list, tuple)) and is_shape(value) else None


def _drop_impossible(statistics: list[Statistics | None], dtype: Column) -> tuple[list[Statistics | None], list[str]]:
    """A dump's statistics without those that no tensor can have, and a sentence about these."""
    rows = [row for row, of_row in enumerate(statistics) if of_row is not None]
    if not rows:
        return statistics, []
    known = zip(*(of_row for of_row in statistics if of_row is not None), strict=True)
    columns = {
        name: np.array([(np.nan if name in MEASURES else -1) if cell is None else cell for cell in column])
        for name, column in zip(Statistics._fields, known, strict=True)
    }
    assert isinstance(dtype, DictionaryColumn)
    wrong = list(contradictions(columns.__getitem__, dtype.take(np.array(rows))))
    if not wrong:
        return statistics, []
    bad = np.logical_or.reduce([contradiction.rows for contradiction in wrong])
    at = int(np.argmax(bad))
    first = next(contradiction for contradiction in wrong if contradiction.rows[at])
    left_out = {rows[index] for index in np.flatnonzero(bad).tolist()}
    sentence = (
        f"The dump says of {counted(len(left_out), 'tensor')} what no tensor has, and that is left out. The first is "
        f"tensor {rows[at]}, with {first.column} {columns[first.column][at].item()!r} in place of {first.expected}."
    )
    return [None if row in left_out else of_row for row, of_row in enumerate(statistics)], [sentence]


def _numbers(values: Sequence[int | None]) -> npt.NDArray[np.int64]:
    return np.array([-1 if value is None else value for value in values], np.int64)
