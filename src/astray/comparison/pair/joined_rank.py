"""One rank of a run as if each of its steps had been a single micro step: the rows of each group made into one.

Reads a recorded rank, feeds everything that reads one: `RankRun` does not know that these tables were never on a disk.
A joined row stands where the first of its rows stood. Its statistics are those of the whole batch. Its fingerprint is
not known, for that of a part depends on where the part begins; but two runs that cut a batch alike can tell whether all
parts have the same. Values are read part by part.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.pieces import Pieces
from astray.comparison.pair.micro_groups import Way
from astray.comparison.rows import Floats, Ints
from astray.records import Frame, Setup
from astray.stats import dtypes
from astray.store import RankRun, Table
from astray.store.run_info import End


class Tables(NamedTuple):
    """The tables of a joined rank, and where each of its rows came from.

    Row r is made of the rows `parts[begin[r]:begin[r + 1]]` of the recorded rank, `way[r]` says how, `dim[r]` along
    which dimension.
    """

    calls: Table
    tensors: Table
    parts: Ints
    begin: Ints
    way: Ints
    dim: Ints
    samples: Ints  # of each part: how many samples of the batch its micro step has, 0 if that is not known

    def rows(self, row: int) -> list[int]:
        """The recorded rows behind a joined one."""
        found: list[int] = self.parts[self.begin[row] : self.begin[row + 1]].tolist()
        return found


class Joins(Protocol):
    """Who knows how to join a rank; asked when a table is needed, since that takes both runs."""

    def tables(self, side: int) -> Tables:
        """Of the reference (0) or the candidate (1)."""


class JoinedRank(RankRun):
    """A recorded rank whose micro steps are joined."""

    def __init__(self, recorded: RankRun, joins: Joins, side: int) -> None:
        super().__init__(recorded.rank, _Source(recorded, joins, side))
        self.recorded = recorded
        self.fingerprints = recorded.fingerprints
        self._joins = joins
        self._side = side

    @property
    def tables(self) -> Tables:
        return self._joins.tables(self._side)

    def pieces(self, row: int) -> Pieces | None:
        """The values of the parts of a joined row; None if it is none, or they were not kept."""
        tables = self.tables
        if tables.way[row] != Way.JOINED or self.tensors.numbers("blob_file")[row] < 0:
            return None
        values = [self.recorded.verified(one) for one in tables.rows(row)]
        known = [np.atleast_1d(one) for one in values if one is not None]
        samples = tables.samples[tables.begin[row] : tables.begin[row + 1]].tolist()
        return Pieces(int(tables.dim[row]), known, tuple(samples)) if len(known) == len(values) else None

    def micro(self, row: int) -> list[int]:
        """The micro steps that a joined row was made of."""
        calls = self.recorded.call_rows[self.tables.rows(row)]
        found: list[int] = self.recorded.calls.numbers("micro")[calls].tolist()
        return found

    def largest(self, rows: Ints, errors: Floats) -> tuple[Ints, Floats]:
        """Errors of some recorded rows as those of joined ones, each the largest of its parts'."""
        tables = self.tables
        joined = np.full(len(self.recorded.tensors), -1)
        joined[tables.parts] = np.repeat(np.arange(len(tables.way)), np.diff(tables.begin))
        known = joined[rows] >= 0
        found = np.full(len(tables.way), -np.inf)
        np.maximum.at(found, joined[rows[known]], errors[known])
        at = np.flatnonzero(found >= 0)
        return at, found[at]


class _Source:
    """What a joined rank reads; see `store.run.RankSource`."""

    def __init__(self, recorded: RankRun, joins: Joins, side: int) -> None:
        self._recorded = recorded
        self._joins = joins
        self._side = side
        self.end: End | None = recorded.end
        self.problems: list[str] = []  # those of the recorded rank come with its tables

    @cached_property
    def _tables(self) -> Tables:
        return self._joins.tables(self._side)

    def calls(self) -> tuple[Table, list[str]]:
        return self._tables.calls, self._recorded.problems

    def tensors(self) -> tuple[Table, list[str]]:
        return self._tables.tensors, []

    def setup(self) -> tuple[list[Setup], list[str]]:
        return self._recorded.setup, []

    def stack(self, id: int) -> list[Frame]:
        return self._recorded.stack(id)

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:
        if tensors.numbers("blob_file")[row] < 0:
            return None
        rows, way = self._tables.rows(row), Way(int(self._tables.way[row]))
        if way == Way.SUMMED and len(rows) > 1:
            total = add_values(self._recorded, rows)
            return None if total is None else _bytes(encode(total, tensors["dtype"][row]))
        if way == Way.JOINED and len(rows) > 1:
            parts = [self._recorded.verified(one) for one in rows]
            known = [np.atleast_1d(one) for one in parts if one is not None]
            return _bytes(np.concatenate(known, axis=int(self._tables.dim[row]))) if len(known) == len(parts) else None
        values = self._recorded.verified(rows[-1] if way == Way.LAST else rows[0])
        return None if values is None else _bytes(values)


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def add_values(run: RankRun, rows: list[int]) -> npt.NDArray[Any] | None:
    """The sum of the values of some rows, in float64; None where one of them cannot be had."""
    total: npt.NDArray[Any] | None = None
    for row in rows:
        values = run.verified(row)
        if values is None:
            return None
        part = dtypes.widen(values, run.tensors["dtype"][row])
        with np.errstate(over="ignore", invalid="ignore"):  # infinities of both signs
            total = part if total is None else total + part
    return total


def encode(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Numbers as raw elements of a dtype: the nearest there is, and of two equally near the even one."""
    storage = dtypes.find(dtype).storage
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            return values.astype(storage)
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(storage)


def can_encode(dtype: str) -> bool:
    """Whether numbers can be written in this dtype: floats that numpy has, and bfloat16."""
    return dtype == "bfloat16" or (dtype in dtypes.DTYPES and dtypes.find(dtype).storage.kind == "f")
