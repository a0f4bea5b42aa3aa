"""A comparison or a run as the page needs it: its rows, its calls, and the tensors of each row in the runs.

`detail` and `overview` make documents from a view, for the server and for the one-file report. Costly parts are
computed once, when they are first read, under the `lock`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.comparison.verdict import AGREEING
from astray.errors import AstrayError
from astray.nonfinite.alarm import Alarm
from astray.nonfinite.findings import alarms, notes_of
from astray.store import CheckpointData, DictionaryColumn, RankRun, RunData, Table
from astray.web.columns import (
    CallIndex,
    RowLocations,
    calls_of_pairs,
    calls_of_rows,
    comparison_columns,
    run_columns,
)
from astray.web.wire import Column

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
CallKey = tuple[int, int, str, str, int]
"""How an alarm identifies a call: rank, step, site, phase and number."""


class TensorRef(NamedTuple):
    """A tensor in one of the runs: its rank, and its row in that rank's table."""

    rank: RankRun
    row: int

    @property
    def call(self) -> int:
        """The row of its call."""
        return int(self.rank.call_rows[self.row])

    def cells(self) -> dict[str, Any]:
        """Its row in plain objects."""
        return self.rank.tensors.row(self.row)


class ResultView(ABC):
    """What the views of a comparison and of a run share. Rows are those of the page's table."""

    kind: str

    def __init__(self, runs: tuple[RunData, ...]) -> None:
        self.runs = runs
        self.lock = threading.RLock()
        self._row_of_tensor: dict[tuple[int, int], Ints] = {}  # by side and rank

    @cached_property
    def calls(self) -> CallIndex:
        """The calls of all rows."""
        return self._make_calls()

    @cached_property
    @abstractmethod
    def table(self) -> dict[str, Column]:
        """The columns of the page's table."""

    @abstractmethod
    def _make_calls(self) -> CallIndex: ...

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def locations(self, side: int) -> tuple[Ints, Ints]:
        """For each row its rank and its row in the tensors of one of the runs, −1 where that run has none."""

    @abstractmethod
    def wrong(self, rows: Ints) -> Bools:
        """Which of these rows are wrong, or not finite."""

    def sides(self, row: int) -> tuple[TensorRef | None, TensorRef | None]:
        """The tensor of a row in the reference, or in the only run, and in the candidate."""
        tensors: list[TensorRef | None] = [None, None]
        for side, run in enumerate(self.runs):
            ranks, rows = self.locations(side)
            if rows[row] >= 0:
                tensors[side] = TensorRef(run.ranks[int(ranks[row])], int(rows[row]))
        return tensors[0], tensors[1]

    def rows_of(self, side: int, rank: int, tensors: list[int]) -> list[int]:
        """The rows of these tensors of a rank; tensors without a row are left out."""
        if (side, rank) not in self._row_of_tensor:
            ranks, rows = self.locations(side)
            row_of = np.full(len(self.runs[side].ranks[rank].tensors), -1)
            of_rank = np.flatnonzero((ranks == rank) & (rows >= 0))
            row_of[rows[of_rank]] = of_rank
            self._row_of_tensor[side, rank] = row_of
        return [row for row in self._row_of_tensor[side, rank][tensors].tolist() if row >= 0]

    def cell(self, name: str, row: int) -> Any:
        """A cell of the table; None for a null word."""
        column = self.table[name]
        return column[row] if isinstance(column, DictionaryColumn) else column[row].item()


class ComparisonView(ResultView):
    """A comparison; its rows are those of `comparison.pairs`."""

    kind = "comparison"

    def __init__(self, comparison: ComparisonData) -> None:
        super().__init__((comparison.reference, comparison.candidate))
        self.comparison = comparison
        self.pairs: Table = comparison.pairs

    @cached_property
    def table(self) -> dict[str, Column]:
        return comparison_columns(self.comparison, self.calls)

    def _make_calls(self) -> CallIndex:
        return calls_of_pairs(self.comparison)

    def __len__(self) -> int:
        return len(self.pairs)

    def locations(self, side: int) -> tuple[Ints, Ints]:
        return self.pairs.numbers("rank"), self.pairs.numbers(("row_reference", "row_candidate")[side])

    def wrong(self, rows: Ints) -> Bools:
        return ~np.isin(self.pairs.coded("verdict").codes[rows], AGREEING)


class RunView(ResultView):
    """One run alone; its rows are the tensors of all ranks, one rank after another."""

    kind = "run"

    def __init__(self, run: RunData) -> None:
        super().__init__((run,))
        self.run = run

    @cached_property
    def _locations(self) -> RowLocations:
        return RowLocations.of(self.run)

    @cached_property
    def table(self) -> dict[str, Column]:
        return run_columns(self.run, self._locations, self.calls)

    def _make_calls(self) -> CallIndex:
        return calls_of_rows(self.run, self._locations.rank, self._locations.row)

    def __len__(self) -> int:
        return len(self._locations.row)

    def locations(self, side: int) -> tuple[Ints, Ints]:  # noqa: ARG002 - there is only one
        return self._locations

    def wrong(self, rows: Ints) -> Bools:
        bad = np.zeros(len(rows), np.bool_)
        for name in ("nan", "inf"):
            bad |= np.asarray(self.table[name])[rows] > 0
        return bad

    @cached_property
    def findings(self) -> tuple[list[Alarm], list[str]]:
        """Its alarms, and notes about NaN and infinity."""
        if isinstance(self.run, CheckpointData):  # in which nothing was computed
            return [], []
        try:
            findings = alarms(self.run)
        except AstrayError as error:
            return [], [str(error)]
        return list(findings), list(notes_of(findings))

    def first_rows(self) -> dict[CallKey, int]:
        """The first row of each call."""
        first = self.calls.first
        columns = [_values_at(self.table[name], first) for name in ("rank", "step", "site", "phase", "call")]
        rows: dict[CallKey, int] = {}
        for row, key in zip(first.tolist(), zip(*columns, strict=True), strict=True):
            rows.setdefault(key, row)
        return rows


def _values_at(column: Column, rows: Ints) -> list[Any]:
    return column.take(rows).tolist() if isinstance(column, DictionaryColumn) else column[rows].tolist()
