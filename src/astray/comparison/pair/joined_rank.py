"""One rank of a run as if each of its steps had been a single micro step: the rows of each group made into one.

Reads a recorded rank and the groups of both runs, feeds everything that reads a rank: `RankRun` does not know that
these tables were never on a disk. A joined row stands where the first of its rows stood. It begins as a copy of one of
its parts; statistics, shape and place of the values are then replaced by those of the whole batch, in whole columns but
for sums of gradients. Its fingerprint is not known, for that of a part depends on where the part begins; but where two
runs cut a batch alike, those of all parts are compared. Values are read part by part.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.pieces import COUNTS, Columns, Pieces, merge_statistics
from astray.comparison.pair.micro_groups import STATISTICS, GroupMembers, JoinRule, MicroStepGroups, distinct_lines
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.verdict import Reason
from astray.graph.keys import number_repeats, one_key
from astray.part import Part
from astray.records import Frame, Setup
from astray.stats import dtypes
from astray.stats.kernels import Strided, measure
from astray.store import DictionaryColumn, RankRun, Table
from astray.store.run_info import End


class Tables(NamedTuple):
    """The tables of a joined rank, and where each of its rows came from.

    Row r is made of the rows `parts[begin[r]:begin[r + 1]]` of the recorded rank, `rule[r]` is the `JoinRule`, `dim[r]`
    the dimension they are joined along.
    """

    calls: Table
    tensors: Table
    parts: Ints
    begin: Ints
    rule: Ints
    dim: Ints
    samples: Ints  # of each part: how many samples of the batch its micro step has, 0 if that is not known

    def rows(self, row: int) -> list[int]:
        """The recorded rows behind a joined one."""
        found: list[int] = self.parts[self.begin[row] : self.begin[row + 1]].tolist()
        return found


class RankJoiner(Protocol):
    """Makes the joined tables when they are first needed, since that reads both runs."""

    def tables(self, side: int) -> Tables:
        """Of the reference (0) or the candidate (1)."""


class JoinedRank(RankRun):
    """A recorded rank whose micro steps are joined."""

    def __init__(self, recorded: RankRun, joins: RankJoiner, side: int) -> None:
        super().__init__(recorded.rank, _JoinedSource(recorded, joins, side))
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
        if tables.rule[row] != JoinRule.JOINED or self.tensors.numbers("blob_file")[row] < 0:
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
        joined[tables.parts] = np.repeat(np.arange(len(tables.rule)), np.diff(tables.begin))
        known = joined[rows] >= 0
        found = np.full(len(tables.rule), -np.inf)
        np.maximum.at(found, joined[rows[known]], errors[known])
        at = np.flatnonzero(found >= 0)
        return at, found[at]


class _JoinedSource:
    """What a joined rank reads; see `store.run.RankSource`."""

    def __init__(self, recorded: RankRun, joins: RankJoiner, side: int) -> None:
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
        rows, rule = self._tables.rows(row), JoinRule(int(self._tables.rule[row]))
        if rule == JoinRule.SUMMED and len(rows) > 1:
            total = add_values(self._recorded, rows)
            return None if total is None else _bytes(encode(total, tensors["dtype"][row]))
        if rule == JoinRule.JOINED and len(rows) > 1:
            parts = [self._recorded.verified(one) for one in rows]
            known = [np.atleast_1d(one) for one in parts if one is not None]
            return _bytes(np.concatenate(known, axis=int(self._tables.dim[row]))) if len(known) == len(parts) else None
        values = self._recorded.verified(rows[-1] if rule == JoinRule.LAST else rows[0])
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


# -- making the tables -------------------------------------------------------------------------------------------------


CALL = ("step", "kind", "site", "type", "call", "phase", "recompute")
"""What the calls of all micro steps of a step have in common."""

NOWHERE = 1 << 30
"""In place of a file's number: the values are put together from several places."""


_NO_ELEMENT: Columns = {"first_bad": np.array([-1]), "first_bad_value": np.array([np.nan])}


class ReducedNumbers(NamedTuple):
    """What groups of single numbers were reduced to, NaN where they were not.

    mean: whether that is their mean; else it is their sum. sure: whether there is only one number anyway.
    """

    value: Floats
    mean: Bools
    sure: Bools

    def take(self, groups: Ints) -> ReducedNumbers:
        return ReducedNumbers(self.value[groups], self.mean[groups], self.sure[groups])


def join_rows(
    run: RankRun, members: GroupMembers, groups: MicroStepGroups, remark: Ints, numbers: ReducedNumbers, samples: Ints
) -> Tables:
    """Make one row of each group that this run has; `remark` and `numbers` are of the groups, `samples` of the rows."""
    present = np.flatnonzero(members.length > 0)
    if len(present):
        rows, begin = members.flat(present)
        present = present[np.argsort(np.minimum.reduceat(rows, begin), kind="stable")]
    rows, begin = members.flat(present)
    length, rule, dim = members.length[present], groups.rule[present], groups.dim[present]
    parts = members.rows.tensor[rows]
    chosen = parts[begin + np.where(rule == JoinRule.LAST, length - 1, 0)]
    number, calls = join_calls(run)
    builder = _Builder(run, parts, begin, length, run.tensors.take(chosen), remark[present] * (length > 1))
    builder.columns["seq"] = calls.numbers("seq")[number[run.call_rows[parts[begin]]]]
    several = length > 1
    builder.join(np.flatnonzero(several & (rule == JoinRule.JOINED)), dim, groups.same_cut[present])
    builder.add(np.flatnonzero(several & (rule == JoinRule.SUMMED)))
    builder.reduce(np.flatnonzero(several & (rule == JoinRule.REDUCED)), numbers.take(present))
    builder.forget(np.flatnonzero(rule == JoinRule.OPEN), Reason.NO_BATCH)
    return Tables(calls, builder.table(), parts, np.append(begin, len(parts)), rule, dim, samples[rows])


class _Builder:
    """The columns of the joined rows while they are made, first as those of one of their parts."""

    def __init__(self, run: RankRun, parts: Ints, begin: Ints, length: Ints, table: Table, remark: Ints) -> None:
        self.run, self.parts, self.begin, self.length = run, parts, begin, length
        self.columns: dict[str, Any] = dict(table.columns)
        self.known = table.valid("fingerprint").copy()
        self.remark = remark
        self.merged = np.zeros(len(begin), np.bool_)
        self._places = 0  # that have been given to values which are put together

    def table(self) -> Table:
        return Table(self.columns | {"remark": self.remark, "merged": self.merged}, {"fingerprint": self.known})

    def join(self, at: Ints, dim: Ints, same_cut: Bools) -> None:
        """Lay the parts of these rows end to end. Where both runs cut alike, the parts' bits stand for the whole."""
        if not len(at):
            return
        parts, begin = self._parts(at)
        self.known[at] = same_cut[at] & np.logical_and.reduceat(self.run.tensors.valid("fingerprint")[parts], begin)
        self.columns["fingerprint"][at] = _together(self.run.tensors.numbers("fingerprint")[parts], begin)
        self.merged[at] = ~self.known[at]
        self._set(at, merge_statistics({name: self.run.tensors.numbers(name)[parts] for name in STATISTICS}, begin))
        self._reshape(at, dim)
        self._place(at, self._join_values(at, dim), dim)

    def add(self, at: Ints) -> None:
        """Add up the parts of these rows: their values, or single numbers by their statistics."""
        self.known[at] = False
        for row in at.tolist():
            parts = self.parts[self.begin[row] : self.begin[row] + self.length[row]]
            one = np.array([row])
            single = bool(np.all(self.run.tensors.numbers("count")[parts] == 1))
            total = add_values(self.run, parts.tolist()) if self._has_values(row, self.columns["dtype"][row]) else None
            if total is None and not single:
                self.forget(one, Reason.NO_SUM)
            elif total is None:
                self._number(row, float(np.sum(self.run.tensors.numbers("mean")[parts])))
                self._place(one, np.zeros(1, np.bool_), np.zeros(row + 1, np.int8))
            else:
                self._set(one, _measured(total))
                self._place(one, np.ones(1, np.bool_), np.full(row + 1, -1))

    def reduce(self, at: Ints, numbers: ReducedNumbers) -> None:
        """Put the mean or the sum of single numbers in their place."""
        for row in at[~numbers.sure[at]].tolist():
            if np.isnan(numbers.value[row]):
                self.forget(np.array([row]), Reason.NO_BATCH)
                continue
            self._number(row, float(numbers.value[row]))
            self.known[row] = False
            self.columns["blob_file"][row] = -1
            self.remark[row] |= Reason.MEAN if numbers.mean[row] else Reason.SUM

    def forget(self, at: Ints, why: Reason) -> None:
        """Leave nothing of these rows that could be compared."""
        self._set(at, {name: np.full(len(at), -1 if name in COUNTS else np.nan) for name in STATISTICS})
        self.known[at] = False
        self.columns["blob_file"][at] = -1
        self.remark[at] = why

    def _number(self, row: int, value: float) -> None:
        """The statistics of a tensor that is this one number."""
        size = abs(value)
        found = {"min": value, "max": value, "mean": value, "std": 0.0, "l2": size, "absmax": size}
        found |= {"zeros": value == 0, "nan": 0, "inf": 0, "count": 1}
        self._set(np.array([row]), {name: np.array([one]) for name, one in found.items()})

    def _set(self, at: Ints, statistics: Columns) -> None:
        """Put statistics in place of those of a part, whose first bad element has another index in the whole."""
        for name, column in {**_NO_ELEMENT, **statistics}.items():
            self.columns[name][at] = column

    def _parts(self, at: Ints) -> tuple[Ints, Ints]:
        """The recorded rows of some joined ones, and where those of each begin."""
        length = self.length[at]
        begin = np.cumsum(length) - length
        offset = np.arange(int(length.sum())) - np.repeat(begin, length)
        return self.parts[np.repeat(self.begin[at], length) + offset], begin

    def _reshape(self, at: Ints, dim: Ints) -> None:
        """Give joined rows their shapes: the sizes along the dimension added up. A number becomes a list of numbers."""
        shape: DictionaryColumn[tuple[int, ...]] = self.columns["shape"]
        stride: DictionaryColumn[Any] = self.columns["stride"]
        recorded = self.run.tensors.coded("shape")
        known = {one: code for code, one in enumerate(shape.values)}
        lines = self._lines(at, recorded.codes, dim)
        first, which = distinct_lines(lines)
        found = [
            _end_to_end([recorded.values[code] for code in codes if code >= 0], along)
            for along, *codes in lines[first].tolist()
        ]
        codes = shape.codes.copy()
        codes[at] = np.array([known.setdefault(one, len(known)) for one in found], np.int32)[which]
        nowhere = stride.codes.copy()
        nowhere[at] = -1
        self.columns |= {
            "shape": DictionaryColumn(codes, list(known)),
            "stride": DictionaryColumn(nowhere, stride.values),
        }

    def _lines(self, at: Ints, column: Ints, dim: Ints) -> Ints:
        """A line for each of some joined rows: its dimension, then a column at its parts, filled up with −1."""
        parts, begin = self._parts(at)
        length = self.length[at]
        lines = np.full((len(at), 1 + int(length.max(initial=0))), -1, np.int64)
        lines[:, 0] = dim[at]
        number = np.repeat(np.arange(len(at)), length)
        lines[number, 1 + np.arange(len(parts)) - np.repeat(begin, length)] = column[parts]
        return lines

    def _has_values(self, row: int, dtype: str) -> bool:
        """Whether every value of all parts of a row was kept, and their sum can be written."""
        rows = self.parts[self.begin[row] : self.begin[row] + self.length[row]]
        file, sampled = (self.run.tensors.numbers(name)[rows] for name in ("blob_file", "sampled"))
        part = self.run.tensors.coded("part").codes[rows]
        return bool(np.all((file >= 0) & (sampled < 0) & (part < 0))) and can_encode(dtype)

    def _join_values(self, at: Ints, dim: Ints) -> Bools:
        """Whether the values kept of the parts, end to end, are what would have been kept of the whole."""
        tensors = self.run.tensors
        parts, begin = self._parts(at)
        part = tensors.coded("part")
        kept = np.logical_and.reduceat(tensors.numbers("blob_file")[parts] >= 0, begin)
        alike = np.maximum.reduceat(part.codes[parts], begin) == np.minimum.reduceat(part.codes[parts], begin)
        alike &= np.maximum.reduceat(tensors.numbers("sampled")[parts], begin) < 0
        for row in np.flatnonzero(kept & alike & (part.codes[parts[begin]] >= 0)).tolist():
            first = int(parts[begin[row]])
            alike[row] = _spares(str(part[first]), len(tensors["shape"][first]), int(dim[at[row]]))
        self.remark[at[kept & ~alike]] |= Reason.OTHER_PART
        return np.asarray(kept & alike)

    def _place(self, at: Ints, kept: Bools, dim: Ints) -> None:
        """Say where the values of joined rows lie: at one place for all that are put together from the same parts."""
        self.columns["blob_file"][at] = np.where(kept, NOWHERE, -1)
        at = at[kept]
        if not len(at):
            return
        recorded = self.run.tensors
        parts, begin = self._parts(at)
        places = one_key([recorded.numbers("blob_file"), recorded.numbers("blob_offset")])
        _, number = distinct_lines(self._lines(at, places, dim))
        self.columns["blob_offset"][at] = number + self._places
        self.columns["blob_bytes"][at] = np.add.reduceat(recorded.numbers("blob_bytes")[parts], begin)
        self._places += int(number.max()) + 1


def _together(fingerprints: Ints, begin: Ints) -> Ints:
    """One number for the fingerprints of several parts in their order. It is not the fingerprint of the whole."""
    place = np.arange(len(fingerprints)) - np.repeat(begin, np.diff(np.append(begin, len(fingerprints))))
    factor = np.uint64(2) * place.astype(np.uint64) + np.uint64(1)  # odd, so that no bit is lost
    return np.add.reduceat(fingerprints * factor * np.uint64(0x9E3779B97F4A7C15), begin)


def _measured(total: npt.NDArray[Any]) -> Columns:
    """The statistics of a tensor as columns of one row."""
    found = measure(Strided.from_numpy(total), fingerprint=False).statistics
    assert found is not None, "statistics were asked for"
    known = {name: value for name, value in found._asdict().items() if value is not None}
    none = dict.fromkeys(STATISTICS, np.nan)  # a count is always known
    return {name: np.array([value]) for name, value in (none | known).items()}


def _end_to_end(shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    if not shapes[0]:
        return (len(shapes),)
    return tuple(sum(shape[dim] for shape in shapes) if at == dim else size for at, size in enumerate(shapes[0]))


def _spares(part: str, dims: int, dim: int) -> bool:
    """Whether a slice takes all of a dimension."""
    shape = tuple(2 if at == dim else 1 << 40 for at in range(dims))
    return Part.parse(part).shape_of(shape)[dim] == 2


def join_calls(run: RankRun) -> tuple[Ints, Table]:
    """The calls of a run without its micro steps, numbered anew; and for each recorded call its row among them."""
    calls = run.calls
    columns = [
        calls.coded(name).codes if isinstance(calls[name], DictionaryColumn) else calls.numbers(name) for name in CALL
    ]
    columns = [column.astype(np.int64) for column in columns]
    micro = calls.numbers("micro")
    again = number_repeats(one_key([*columns, micro]))
    seq = calls.numbers("seq")
    order = np.argsort(seq, kind="stable")
    _, first, number = np.unique(one_key([*columns, again])[order], return_index=True, return_inverse=True)
    group = np.empty(len(seq), np.int64)
    group[order] = number
    chosen = order[first]  # of each group the call that began first
    place = np.argsort(np.argsort(chosen))  # calls stay in the order in which they were recorded
    rows, row_of = np.sort(chosen), place[group]
    table = calls.take(rows)
    numbers = np.argsort(np.argsort(seq[rows])).astype(np.int64)
    parent = calls.numbers("parent")[rows]
    found = np.minimum(np.searchsorted(seq, parent, sorter=order), max(len(seq) - 1, 0))
    outer = order[found] if len(seq) else found
    known = (parent >= 0) & (seq[outer] == parent) if len(seq) else parent >= 0
    changed: dict[str, Any] = dict(table.columns)
    changed["seq"] = numbers
    changed["parent"] = np.where(known, numbers[row_of[outer]] if len(seq) else -1, -1)
    changed["micro"] = np.zeros_like(table.numbers("micro"))
    return row_of, Table(changed, {name: changed[name] >= 0 for name in ("parent", "stack")})
