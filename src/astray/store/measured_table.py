"""A table of tensors whose statistics are measured when they are read: for checkpoints and dumps that hold values.

A row is measured when it is read, all of them when a column is. Where values cannot be read, what the dump states about
the tensor stays, with a note that gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Statistics
from astray.stats import Measurement
from astray.store.columns import BoolArray, Column, DictionaryColumn, Table

MEASURES = ("min", "max", "mean", "std", "l2", "absmax", "first_bad_value")
COUNTS = ("zeros", "nan", "inf", "count", "first_bad")
MEASURED = (*MEASURES, *COUNTS, "fingerprint", "note")
NUMBERED = ("sampled", "value")  # other columns in which −1 stands for null

_EMPTY = Statistics(None, None, None, None, None, None, 0, 0, 0, 0)  # of a tensor without elements

Measure = Callable[[int], Measurement]
"""Reads and measures the tensor of a row. Raises RunError where that is impossible."""


class MeasuredTable(Table):
    """The tensors of a dump.

    known: the columns that are known without reading values. Rows with an equal `blob_file` are the same tensor.
    measure: reads a row; not called for rows of which `waiting` is False.
    statistics, fingerprints, notes: what is known of each row until, or unless, it is measured; an unknown count is −1.
    """

    __slots__ = ("_failures", "_measurer", "_notes", "_statistics", "_waiting")

    def __init__(
        self,
        known: dict[str, Column],
        measure: Measure,
        waiting: BoolArray | None = None,
        statistics: Sequence[Statistics | None] | None = None,
        notes: Sequence[str | None] | None = None,
        fingerprints: Sequence[int | None] | None = None,
    ) -> None:
        count = len(known["seq"])
        self._measurer = measure
        self._failures: dict[str, None] = {}
        self._waiting = np.ones(count, np.bool_) if waiting is None else waiting
        self._notes: list[str | None] = [None] * count if notes is None else list(notes)
        self._statistics: dict[str, npt.NDArray[Any]] = {
            **{name: np.full(count, np.nan) for name in MEASURES},
            **{name: np.full(count, -1) for name in COUNTS},
            "fingerprint": np.zeros(count, np.uint64),
        }
        given = [(row, each) for row, each in enumerate(statistics or ()) if each is not None]
        self._put_all([each for _, each in given], np.array([row for row, _ in given], np.intp))
        prints = [None] * count if fingerprints is None else fingerprints
        self._statistics["fingerprint"][:] = [each or 0 for each in prints]
        has_print = np.array([each is not None for each in prints], np.bool_)
        super().__init__(known, {"fingerprint": has_print} | {name: np.asarray(known[name]) >= 0 for name in NUMBERED})

    @property
    def reasons(self) -> list[str]:
        """Why tensors could not be read so far, each reason once."""
        return list(self._failures)

    def _put(self, statistics: Statistics, rows: int | npt.NDArray[np.intp]) -> None:
        for name, value in statistics._asdict().items():
            self._statistics[name][rows] = value if value is not None else np.nan if name in MEASURES else -1

    def _put_all(self, statistics: Sequence[Statistics], rows: npt.NDArray[np.intp]) -> None:
        """Set the statistics of each row."""
        if not statistics:
            return
        for name, column in zip(Statistics._fields, zip(*statistics, strict=True), strict=True):
            missing = np.nan if name in MEASURES else -1
            self._statistics[name][rows] = [missing if value is None else value for value in column]

    def _measure(self, row: int) -> None:
        """Measure a row, and those that are the same tensor under other names."""
        if not self._waiting[row]:
            return
        files = self.columns["blob_file"]
        rows = np.flatnonzero(files == files[row])
        self._waiting[rows] = False
        try:
            measured = self._measurer(row)
        except RunError as error:
            self._failures[str(error)] = None
            for same in rows.tolist():
                self._notes[same] = str(error)
            return
        self._put(measured.statistics or _EMPTY, rows)
        self._statistics["fingerprint"][rows] = measured.fingerprint or 0
        self._masks["fingerprint"][rows] = measured.fingerprint is not None

    def _all(self, name: str) -> Column:
        self._measure_all()
        return DictionaryColumn.of(self._notes) if name == "note" else self._statistics[name]

    def _measure_all(self) -> None:
        """Measure every row that was not yet, each file once."""
        waiting = np.flatnonzero(self._waiting)
        if not len(waiting):
            return
        files = np.asarray(self.columns["blob_file"])[waiting]
        _, firsts, of = np.unique(files, return_index=True, return_inverse=True)
        by_first: dict[int, Measurement] = {}
        for first in np.sort(firsts).tolist():  # in the order of rows, so that failures are listed in it
            row = int(waiting[first])
            try:
                by_first[first] = self._measurer(row)
            except RunError as error:
                self._failures[str(error)] = None
                for same in waiting[of == of[first]].tolist():
                    self._notes[same] = str(error)
        self._waiting[waiting] = False
        of_rows = [by_first.get(first) for first in firsts[of].tolist()]
        rows = waiting[[each is not None for each in of_rows]]
        measured = [each for each in of_rows if each is not None]
        self._put_all([each.statistics or _EMPTY for each in measured], rows)
        self._statistics["fingerprint"][rows] = np.array([each.fingerprint or 0 for each in measured], np.uint64)
        self._masks["fingerprint"][rows] = [each.fingerprint is not None for each in measured]

    @property
    def names(self) -> list[str]:
        return [*self.columns, *MEASURED]

    def numbers(self, name: str) -> npt.NDArray[Any]:
        if name in self._statistics:
            column = self._all(name)
            assert isinstance(column, np.ndarray)
            return column
        return super().numbers(name)

    def coded(self, name: str) -> DictionaryColumn[Any]:
        if name == "note":
            column = self._all(name)
            assert isinstance(column, DictionaryColumn)
            return column
        return super().coded(name)

    def valid(self, name: str) -> BoolArray:
        if name not in MEASURED:
            return super().valid(name)
        column = self._all(name)
        if isinstance(column, DictionaryColumn):
            return column.codes >= 0
        return self._masks[name] if name == "fingerprint" else _is_known(column)

    def row(self, index: int) -> dict[str, Any]:
        self._measure(index)
        cells = super().row(index)
        for name, column in self._statistics.items():
            known = self._masks[name][index] if name == "fingerprint" else _is_known(column)[index]
            cells[name] = column[index].item() if known else None
        return cells | {"note": self._notes[index]}

    def take(self, rows: npt.NDArray[np.integer[Any]] | BoolArray | slice) -> Table:
        """A plain table of these rows, with everything measured."""
        return self._whole().take(rows)

    def _whole(self) -> Table:
        columns = dict(self.columns) | {name: self._all(name) for name in MEASURED}
        masks = {name: self.valid(name) for name in (*MEASURES, *COUNTS, "fingerprint")}
        return Table(columns, masks | {name: self._masks[name] for name in NUMBERED})

    def __getitem__(self, name: str | list[str]) -> Any:
        if isinstance(name, list):
            return self._whole()[name]
        return self._all(name) if name in MEASURED else super().__getitem__(name)

    def __contains__(self, name: str) -> bool:
        return name in MEASURED or super().__contains__(name)


def _is_known(column: npt.NDArray[Any]) -> BoolArray:
    known: BoolArray = ~np.isnan(column) if column.dtype.kind == "f" else column >= 0
    return known
