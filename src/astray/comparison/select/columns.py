"""Every column that can be shown of a comparison, by name: those of its pairs, and both runs' statistics beside them.

The one definition of what a row of a report holds: filters, CSV, spreadsheets, Arrow and pandas all read it. Statistics
are fetched from the runs when they are read, and only for the rows in question.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.store import DictionaryColumn, RunData, Table

KEY = ("rank", "step", "micro", "phase", "recompute", "kind", "site", "type", "call", "role", "path")
JUDGED = (
    "verdict", "origin", "error", "surprise", "measure", "deviation", "limit", "given", "siblings", "source", "rule",
    "reason",
)  # fmt: skip
FORM = ("dtype", "shape")
MOMENTS = ("mean", "std", "l2", "min", "max", "absmax")
COUNTS = ("zeros", "nan", "inf", "count")
STATISTICS = (*MOMENTS, *COUNTS, "fingerprint")
SIDES = ("reference", "candidate")
INTERNAL = ("row", "call")
"""Row numbers in the runs' tables. They are in `pairs` for programs, and are not shown."""

RowIndex = slice | npt.NDArray[np.integer[Any]]
ALL = slice(None)


class ColumnCells(NamedTuple):
    """One column of some rows, and where it has a value."""

    column: npt.NDArray[Any] | DictionaryColumn[Any]
    known: npt.NDArray[np.bool_]


class Columns:
    """The columns of a comparison.

    >>> columns = Columns(diff.reference, diff.candidate, diff.pairs)
    >>> columns.names[:3], columns["absmax_reference"].column.dtype
    (['rank', 'step', 'micro'], dtype('float64'))
    """

    def __init__(self, reference: RunData, candidate: RunData, pairs: Table) -> None:
        self.pairs = pairs
        self._runs = dict(zip(SIDES, (reference, candidate), strict=True))
        self._statistics = {f"{name}_{side}": (name, side) for name in STATISTICS for side in SIDES}
        self.names = _names(pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __contains__(self, name: str) -> bool:
        return name in self._statistics or name in self.pairs

    def __getitem__(self, name: str) -> ColumnCells:
        return self.at(name, ALL)

    def at(self, name: str, rows: RowIndex) -> ColumnCells:
        """A column at some rows."""
        if name in self._statistics:
            return self._statistic(*self._statistics[name], rows)
        column = self.pairs[name]
        column = column.take(rows) if isinstance(column, DictionaryColumn) else column[rows]
        return ColumnCells(column, _known(column))

    def _statistic(self, name: str, side: str, rows: RowIndex) -> ColumnCells:
        """A statistic as one run recorded it. Mean and std fall back on what the kept values gave."""
        ranks, at = self.pairs.numbers("rank")[rows], self.pairs.numbers(f"row_{side}")[rows]
        kind = np.float64 if name in MOMENTS else np.int64 if name in COUNTS else np.uint64
        found, known = np.zeros(len(at), kind), np.zeros(len(at), np.bool_)
        for number, rank in self._runs[side].ranks.items():
            places = np.flatnonzero((ranks == number) & (at >= 0))
            if len(places):
                column, recorded = rank.tensors.numbers(name), at[places]
                found[places] = column[recorded]
                known[places] = rank.tensors.valid(name)[recorded] & _known(column[recorded])
        measured = f"{name}_{side}"
        if measured in self.pairs:
            found = np.where(known, found, self.pairs.numbers(measured)[rows])
            known = _known(found)
        return ColumnCells(found, known)


def _known(column: npt.NDArray[Any] | DictionaryColumn[Any]) -> npt.NDArray[np.bool_]:
    """Where a column has a value: null is NaN in a column of floats, and −1 in one of integers."""
    if isinstance(column, DictionaryColumn):
        return column.codes >= 0
    known: npt.NDArray[np.bool_] = np.ones(len(column), np.bool_)
    if column.dtype.kind == "f":
        known = ~np.isnan(column)
    elif column.dtype.kind == "i":
        known = column >= 0
    return known


def _names(pairs: Table) -> list[str]:
    """What a report shows, in its order: the key, the judgement, both sides, then what was measured between them."""
    both = [f"{name}_{side}" for name in (*FORM, *STATISTICS) for side in SIDES]
    left_out = {f"{name}_{side}" for name in (*INTERNAL, "var") for side in SIDES}
    leading = [name for name in (*KEY, *JUDGED) if name in pairs]
    known = {*leading, *both, *left_out}
    return [*leading, *both, *(name for name in pairs.names if name not in known)]
