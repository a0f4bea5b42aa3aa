"""A recording, opened: what every later stage reads, whatever format it lies in. Users hold it as `results.run.Run`.

A format gives a `RankSource` for each rank; everything above it is the same for all. Tables are read when they are
first needed, and kept. What could not be read is a sentence in `problems`, and the rest can be read.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, UsageError
from astray.part import Part
from astray.records import Frame, Key, Setup
from astray.stats import dtypes
from astray.store.arrow import RunTable
from astray.store.columns import Column, DictionaryColumn, Table
from astray.store.run_info import End, RunInfo
from astray.wording import counted


class RankSource(Protocol):
    """What a format must offer for one rank. The two tables have the columns of docs/reference/format.md."""

    end: End | None
    problems: list[str]  # found on opening

    def calls(self) -> tuple[Table, list[str]]:
        """The calls, and what is wrong with them."""

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors in the order in which they were observed, and what is wrong with them."""

    def stack(self, id: int) -> list[Frame]:
        """A Python stack, innermost frame first; empty when it is missing."""

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:
        """The bytes of a tensor, None when they were not kept. Raises RunError when they should be there."""


class RankSummary(NamedTuple):
    """A rank as a whole, as its tables have it: their steps, and what is missing or cannot be read."""

    steps: list[int]
    problems: list[str]
    truncated: bool  # whether a file could not be read in full


class RankRun:
    """One rank of a run."""

    fingerprints: str = "astray"
    """What the column `fingerprint` holds. Another tool's checksums have another name: ours do not compare to them."""

    _damage_report = ""  # the sentence about values that are damaged
    _first_damaged = ""

    def __init__(self, rank: int, source: RankSource) -> None:
        self.rank = rank
        self._source = source

    @cached_property
    def _calls(self) -> tuple[Table, list[str]]:
        calls, problems = self._source.calls()
        return calls, [*problems, *break_cycles(calls)]

    @cached_property
    def _tensors(self) -> tuple[Table, list[str]]:
        return self._source.tensors()

    @property
    def calls(self) -> Table:
        """One row per observed call."""
        return self._calls[0]

    @property
    def tensors(self) -> Table:
        """One row per tensor of a call, in the order of observation: a child's outputs before its parent's."""
        return self._tensors[0]

    @property
    def end(self) -> End | None:
        """How the recording ended; None when it was stopped before it could write that."""
        return self._source.end

    @cached_property
    def summary(self) -> RankSummary:
        """What the tables say of the rank. It can be set, by a process that got it from one that has read them."""
        lost = int((self.call_rows < 0).sum())
        orphans = (
            [f"{lost:,} of {len(self.tensors):,} tensors belong to calls whose rows are not there."] if lost else []
        )
        truncated = [*self._calls[1], *self._tensors[1]]
        return RankSummary(np.unique(self.calls.numbers("step")).tolist(), [*truncated, *orphans], bool(truncated))

    @property
    def problems(self) -> list[str]:
        """What is missing or could not be read, a sentence each."""
        return [*self._source.problems, *self._setup[1], *self._stack_problems, *self.summary.problems]

    @cached_property
    def _stack_problems(self) -> list[str]:
        read = getattr(self._source, "stacks", None)  # only astray's format has a file of stacks
        return [] if read is None else read()[1]

    @property
    def complete(self) -> bool:
        """Whether the recording ended by itself and all of it could be read."""
        return self.end is not None and self.end.complete and not self.summary.truncated

    @cached_property
    def call_rows(self) -> npt.NDArray[np.int64]:
        """For each tensor, the row of its call in `calls`; −1 when that row is missing."""
        known, wanted = self.calls.numbers("seq"), self.tensors.numbers("seq")
        if not len(known):
            return np.full(len(wanted), -1, np.int64)
        order = np.argsort(known, kind="stable")
        index = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
        rows = order[index]
        return np.where(known[rows] == wanted, rows, -1)

    @cached_property
    def _setup(self) -> tuple[list[Setup], list[str]]:
        read = getattr(self._source, "setup", None)  # only astray's format has it
        return ([], []) if read is None else read()

    @property
    def setup(self) -> list[Setup]:
        """The settings of the program, in the order of the steps from which they held; empty when not known."""
        return self._setup[0]

    def stack(self, id: int) -> list[Frame]:
        """The Python stack of this number, innermost frame first; empty when it was not recorded."""
        return self._source.stack(id)

    def values(self, row: int) -> npt.NDArray[Any] | None:
        """The values of a tensor as they were stored, mapped from the file: bfloat16 as uint16, 8-bit floats as uint8.

        None when they were not kept. Where only a slice was kept, the column `part` names it, and this gives that
        slice, in its own shape. A sample has one dimension.
        """
        raw = self._source.values(self.tensors, row)
        if raw is None:
            return None
        shape, dtype = self._kept_shape(row), self.tensors["dtype"][row]
        if dtype not in dtypes.DTYPES:
            raise RunError(f"Row {row} of rank {self.rank} is {dtype}, a dtype whose values this astray does not know.")
        storage = dtypes.find(dtype).storage
        if raw.nbytes != int(np.prod(shape, dtype=np.int64)) * storage.itemsize:
            raise RunError(
                f"Row {row} of rank {self.rank} keeps {raw.nbytes} bytes, which is not "
                f"{self.tensors['dtype'][row]} of shape {list(shape)}."
            )
        return raw.view(storage).reshape(shape)

    def verified(self, row: int) -> npt.NDArray[Any] | None:
        """The values of a tensor as `values` gives them, checked against its row.

        Raises RunError where they are not those that were recorded; that is in `problems` from then on.
        """
        values = self.values(row)
        if values is not None:
            self._verify(row, values)
        return values

    def _verify(self, row: int, values: npt.NDArray[Any]) -> None:
        matches = getattr(self._source, "matches_row", None)  # other tools' files cannot be checked
        if matches is None:
            return
        names = ("blob_file", "blob_offset", "blob_bytes", "fingerprint")
        location = tuple(int(self.tensors.numbers(name)[row]) for name in names)
        if location not in self._checked:
            self._checked[location] = matches(self.tensors, row, values)
            if not self._checked[location]:
                self._report_damage(row)
        if not self._checked[location]:
            raise RunError(
                f"The values of row {row} of rank {self.rank} are not those that it was measured from: the file "
                "was changed or damaged since. Copy the run again; its statistics can still be read."
            )

    @cached_property
    def _checked(self) -> dict[tuple[int, ...], bool]:
        """Whether the values at a location are those of their row, for those read so far."""
        return {}

    def _report_damage(self, row: int) -> None:
        call = int(self.call_rows[row])
        site = self.calls["site"][call] if call >= 0 else "a call that is not there"
        count = len(self._checked) - sum(self._checked.values())
        self._first_damaged = (
            self._first_damaged or f"{self.tensors['role'][row]} {self.tensors['path'][row]} of {site}"
        )
        others = [problem for problem in self.summary.problems if problem != self._damage_report]
        self._damage_report = (
            f"Values that rank {self.rank} kept of {counted(count, 'tensor')}, first {self._first_damaged}, are not "
            "those that were recorded: they do not have the fingerprint of their row. They are left out, and "
            "statistics are taken instead. Copy the run again."
        )
        self.summary = RankSummary(self.summary.steps, [*others, self._damage_report], True)

    def _kept_shape(self, row: int) -> tuple[int, ...]:
        """The shape of the values that were kept of a tensor."""
        shape: tuple[int, ...] = self.tensors["shape"][row]
        part = self.tensors["part"][row]
        try:
            shape = shape if part is None else Part.parse(part).shape_of(shape)
        except UsageError as error:
            raise RunError(f"Row {row} of rank {self.rank} keeps a part that cannot be read: {error}") from None
        sampled = int(self.tensors.numbers("sampled")[row])
        if sampled < 0:
            return shape
        if sampled > prod(shape):
            raise RunError(
                f"Row {row} of rank {self.rank} keeps a sample of {counted(sampled, 'element')}, and there are "
                f"{prod(shape):,}: the run was damaged. Copy it again."
            )
        return (sampled,)


class RunData:
    """A recording: what ran, and for each rank its tables and values.

    >>> run = open_run("runs/a")
    >>> run
    <Run runs/a: torch, 20 steps, 1 rank, 3,480 calls, 9,120 tensors, complete>
    >>> run.tensor(Key(0, 0, "layers.3.attn", 0, "forward", "output", "0")).shape
    (8, 128, 512)
    """

    def __init__(self, path: Path, info: RunInfo, ranks: dict[int, RankRun], problems: list[str] | None = None) -> None:
        self.path = path
        self.info = info
        self.ranks = ranks
        self._problems = problems or []

    def with_ranks(self, ranks: dict[int, RankRun]) -> RunData:
        """The same run with other ranks in place of its own."""
        return RunData(self.path, self.info, ranks, self._problems)

    @cached_property
    def problems(self) -> list[str]:
        """What is missing or could not be read, a sentence each."""
        return self._problems + [text for rank in self.ranks.values() for text in rank.problems]

    @property
    def complete(self) -> bool:
        """Whether every rank is present, ended by itself, and could be read in full."""
        present = sum(0 <= rank < self.info.world_size for rank in self.ranks)
        return present >= self.info.world_size and all(rank.complete for rank in self.ranks.values())

    @cached_property
    def steps(self) -> list[int]:
        """The steps recorded by any rank, in order."""
        return sorted({step for rank in self.ranks.values() for step in rank.summary.steps})

    def values(self, rank: int, row: int) -> npt.NDArray[Any] | None:
        """The values of a row of `ranks[rank].tensors` as they were stored; None when they were not kept."""
        return self.ranks[rank].values(row)

    def tensor(self, key: Key) -> npt.NDArray[Any]:
        """The values of a tensor, in a dtype that numpy knows: bfloat16 and 8-bit floats are widened exactly.

        Where only a slice was kept, it is that slice; the row's `part` in `ranks[rank].tensors` says which. A sample
        has one dimension. Raises RunError when there is no such tensor, naming the nearest, or its values were not
        kept.
        """
        if key.rank not in self.ranks:
            raise RunError(f"{self.path} has no rank {key.rank}; it has {', '.join(map(str, self.ranks)) or 'none'}.")
        rank = self.ranks[key.rank]
        row = find_row(rank, key, str(self.path))
        raw = rank.values(row)
        if raw is None:
            raise RunError(f"{self.path} has statistics but no values of {describe(key)}. Record with keep='tensors'.")
        return to_numpy_dtype(raw, rank.tensors["dtype"][row])

    def table(self) -> RunTable:
        """Tensors and their calls of all ranks as one table, for pandas, Polars, DuckDB and pyarrow.

        >>> pyarrow.table(run.table()).num_rows
        9120
        """
        return RunTable(self.ranks)

    def __repr__(self) -> str:
        calls = sum(len(rank.calls) for rank in self.ranks.values())
        tensors = sum(len(rank.tensors) for rank in self.ranks.values())
        facts = [
            self.info.framework or "no framework",
            counted(len(self.steps), "step"),
            counted(len(self.ranks), "rank"),
            counted(calls, "call"),
            counted(tensors, "tensor"),
            "complete" if self.complete else "incomplete",
        ]
        return f"<Run {self.path}: {', '.join(facts)}>"


def break_cycles(calls: Table) -> list[str]:
    """Remove parents that form a cycle, as only a damaged file has, so that a walk outwards ends."""
    seq, parent = calls.numbers("seq"), calls.numbers("parent")
    if not np.any(parent >= seq):  # a call that is around another began before it
        return []
    order = np.argsort(seq, kind="stable")
    index = np.minimum(np.searchsorted(seq, parent, sorter=order), len(seq) - 1)
    outer = np.where((parent >= 0) & (seq[order[index]] == parent), order[index], -1)
    for _ in range(len(seq).bit_length()):  # each time twice as far out
        outer = np.where(outer >= 0, outer[outer], -1)
    cyclic = outer >= 0
    if not cyclic.any():
        return []
    parent[cyclic] = -1
    calls.valid("parent")[cyclic] = False
    return [
        f"{counted(int(cyclic.sum()), 'call')} would lie inside of each other, so what is around them is not known."
    ]


def to_numpy_dtype(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The values as they were stored, in a dtype that numpy knows: bfloat16 and 8-bit floats are widened exactly."""
    kind = dtypes.find(dtype)
    if kind.kind == "complex" and kind.storage.kind != "c":  # halves: there is no complex32 in numpy
        pairs = dtypes.decode(raw, dtype)
        return np.ascontiguousarray(pairs).view(np.complex64)[..., 0]
    if kind.kind == "float" and kind.storage.kind != "f":
        return dtypes.decode(raw, dtype)
    return raw


# -- a tensor by its key -----------------------------------------------------------------------------------------------

CALL_FIELDS = ("site", "step", "micro", "phase", "call")
TENSOR_FIELDS = ("role", "path")
SUGGESTIONS = 5


def describe(key: Key) -> str:
    """The key in words."""
    return f"{key.role} {key.path} of {key.site} ({key.phase} call {key.call}, step {key.step}, micro {key.micro})"


def find_row(rank: RankRun, key: Key, where: str) -> int:
    """The row of `key` in the tensors of `rank`.

    Activation checkpointing makes the same call twice; the first run of it is meant.
    """
    call_rows = rank.call_rows
    rows = np.flatnonzero(call_rows >= 0)
    for field in CALL_FIELDS:
        rows = _narrow(rank.calls[field], rows, call_rows[rows], key, field, where)
    for field in TENSOR_FIELDS:
        rows = _narrow(rank.tensors[field], rows, rows, key, field, where)
    again = rank.calls.numbers("recompute")[call_rows[rows]]
    return int(rows[np.argmin(again)])


def _narrow(
    column: Column, rows: npt.NDArray[Any], at: npt.NDArray[Any], key: Key, field: str, where: str
) -> npt.NDArray[Any]:
    """Keep the rows whose `column`, read at the indices `at`, has the key's value."""
    wanted = getattr(key, field)
    cells = column.codes[at] if isinstance(column, DictionaryColumn) else column[at]
    kept: npt.NDArray[Any] = rows[cells == (column.code(wanted) if isinstance(column, DictionaryColumn) else wanted)]
    if len(kept):
        return kept
    present = np.unique(cells).tolist()
    values = [column.values[code] for code in present] if isinstance(column, DictionaryColumn) else present
    raise RunError(f"{where} has no {describe(key)}: {_alternatives(field, wanted, values)}")


def _alternatives(field: str, wanted: Any, recorded: list[Any]) -> str:
    """The values that were recorded in place of a missing one."""
    if not recorded:
        return "no tensors were recorded."
    if isinstance(wanted, str):
        near = difflib.get_close_matches(wanted, recorded, SUGGESTIONS, cutoff=0.0)
        return f"there is no {field} {wanted!r}. Nearest: {', '.join(map(repr, near))}."
    if recorded[-1] - recorded[0] == len(recorded) - 1:
        span = f"{recorded[0]}–{recorded[-1]}" if len(recorded) > 1 else f"only {recorded[0]}"
    else:
        span = ", ".join(map(str, recorded[:SUGGESTIONS])) + (" …" if len(recorded) > SUGGESTIONS else "")
    return f"there is no {field} {wanted}; recorded: {span}."
