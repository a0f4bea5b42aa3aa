"""The tables that the page sorts, filters and folds by itself: a row per pair of a comparison, or per tensor of a run.

Every other document and every address of the page identifies a tensor by its row number here. `CallIndex` says which
rows are of one call, and which call is inside which; the page folds the table by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.rows import StringTable
from astray.comparison.select.columns import JUDGED, KEY
from astray.graph import graph_of
from astray.headroom.dtype_limits import limits
from astray.headroom.risk import near_limit
from astray.store import DictionaryColumn, RankRun, RunData
from astray.store.validation import MOST_COUNTED
from astray.web.wire import Column

Ints = npt.NDArray[np.int64]

_OF_CALL = ("step", "micro", "site", "type", "kind", "call", "phase", "recompute")
_OF_TENSOR = ("role", "path", "dtype", "shape")
_WORDS = frozenset({"site", "type", "kind", "phase", *_OF_TENSOR})
_STATISTICS = ("min", "max", "mean", "std", "l2", "absmax", "zeros", "nan", "inf", "count")
_SIDES = {"a": "reference", "b": "candidate"}
STATES = ("finite", "tight", "overflow near", "non-finite", "unknown")
"""The states of a tensor of one run; the page shows them by these words."""

_JUDGED = (
    "verdict", "reason", "source", "origin", "error", "surprise", "measure", "deviation", "limit", "given", "siblings",
    "rule",
)  # fmt: skip
_MEASURED = {"cosine": "cosine", "max_abs": "max_abs", "relative_l2": "rel_l2"}
_MORE = ("rmse", "mape")
"""Metrics that can be chosen, where values were kept to measure them."""

CUSTOM = "metric:"
"""The prefix of the columns of custom metrics."""

_PLAIN = {*KEY, *JUDGED, *METRICS, *SLICES, *BOUNDS}


def comparison_columns(comparison: ComparisonData, calls: CallIndex) -> dict[str, Column]:
    """One row for each pair, in the order of `comparison.pairs`."""
    pairs = comparison.pairs
    names = ("rank", *_OF_CALL, "role", "path", *_JUDGED)
    columns: dict[str, Column] = {name: pairs[name] for name in names}
    columns |= {name: pairs[metric] for name, metric in _MEASURED.items()}
    columns |= {name: pairs[name] for name in _MORE if not np.isnan(pairs.numbers(name)).all()}
    columns |= {f"{CUSTOM}{name}": pairs[name] for name in comparison.columns.names if _is_custom(comparison, name)}
    for form in ("dtype", "shape"):
        columns |= {f"{form}_{side}": pairs[f"{form}_{name}"] for side, name in _SIDES.items()}
    for side, run in zip(_SIDES, (comparison.reference, comparison.candidate), strict=True):
        columns[f"seq_{side}"] = _sequence(run, pairs.numbers("rank"), pairs.numbers(f"call_{_SIDES[side]}"))
    return columns | _epochs(comparison.reference, pairs.numbers("step")) | _grouped(calls)


def _is_custom(comparison: ComparisonData, name: str) -> bool:
    """Whether a column is a custom metric."""
    return name in comparison.pairs and name not in _PLAIN and not name.endswith(("_reference", "_candidate"))


def _epochs(run: RunData, steps: Ints) -> dict[str, Column]:
    """The epoch of each row, and its step in that epoch, where the program counted several epochs."""
    known = run.info.settings.get("epochs")
    if not isinstance(known, list) or len(known) < 2 or not all(map(_is_epoch, known)):
        return {}
    epochs, first, added = np.array(known, np.int64).T
    at = np.maximum(np.searchsorted(first, steps, side="right") - 1, 0)
    return {"epoch": epochs[at], "epoch_step": steps - added[at]}


def _is_epoch(value: object) -> bool:
    """Whether it is the triple that a dump's reader writes for an epoch; the file of a run may hold anything."""
    numbers = value if isinstance(value, list) and len(value) == 3 else [None]
    return all(type(number) is int and abs(number) <= MOST_COUNTED for number in numbers)


def _sequence(run: RunData, ranks: Ints, calls: Ints) -> Ints:
    """The sequence number of each row's call in its run, −1 where that run has none."""
    sequence = np.full(len(calls), -1)
    for number, rank in run.ranks.items():
        rows = np.flatnonzero((ranks == number) & (calls >= 0))
        sequence[rows] = rank.calls.numbers("seq")[calls[rows]]
    return sequence


def _grouped(calls: CallIndex) -> dict[str, Column]:
    return {"group": calls.of_row, "parent": calls.parent[calls.of_row]}


class RowLocations(NamedTuple):
    """The tensors of the rows of a run's table: rank, and row in that rank's table of tensors."""

    rank: Ints
    row: Ints

    @classmethod
    def of(cls, run: RunData) -> RowLocations:
        """All tensors whose call is known, rank by rank, in the order of observation."""
        rows = {number: np.flatnonzero(rank.call_rows >= 0) for number, rank in run.ranks.items()}
        ranks = [np.full(len(of_rank), number) for number, of_rank in rows.items()]
        nothing = [np.empty(0, np.int64)]
        return cls(np.concatenate(ranks or nothing), np.concatenate(list(rows.values()) or nothing))


def run_columns(run: RunData, locations: RowLocations, calls: CallIndex) -> dict[str, Column]:
    """One row for each tensor of a run, with its statistics and how far it is from the end of its dtype."""
    ranks = [(rank, locations.row[locations.rank == number]) for number, rank in run.ranks.items()]
    columns: dict[str, Column] = {"rank": locations.rank}
    columns |= {name: _gathered([_column_at(rank, name, rows) for rank, rows in ranks], name in _WORDS)
                for name in (*_OF_CALL, *_OF_TENSOR)}  # fmt: skip
    columns |= {name: _gathered([_statistic(rank, name, rows) for rank, rows in ranks]) for name in _STATISTICS}
    columns["headroom"] = headroom(columns["absmax"], columns["dtype"])
    return columns | {"state": states(columns)} | _epochs(run, np.asarray(columns["step"])) | _grouped(calls)


def headroom(absmax: Any, dtype: Any) -> npt.NDArray[np.float64]:
    """By which factor each tensor could grow before its dtype ends; NaN for integers, zeros and what is not known."""
    ends = [limits(name) for name in dtype.values]
    largest = np.array([*(np.nan if end is None else end.largest for end in ends), np.nan])[dtype.codes]
    with np.errstate(divide="ignore", over="ignore"):
        factor = largest / absmax
    return np.where(absmax > 0, factor, np.nan)


def states(columns: dict[str, Any]) -> DictionaryColumn[str]:
    """The state of each tensor: whether it is finite, and how close to the end of its dtype (docs/guides/risk.md)."""
    absmax, dtype, room = columns["absmax"], columns["dtype"], columns["headroom"]
    ends = [limits(name) for name in dtype.values]
    coarse = np.array([*(end is not None and end.coarse for end in ends), False])[dtype.codes]
    close = near_limit(np.log2(np.where(np.isnan(room), np.inf, np.maximum(room, 1.0))), room == 1.0, coarse)
    nonfinite = (columns["nan"] > 0) | (columns["inf"] > 0)
    codes = np.select([nonfinite, close.near, close.few, np.isnan(absmax)], [3, 2, 1, 4], 0)
    return DictionaryColumn(codes.astype(np.int32), list(STATES))


def _column_at(rank: RankRun, name: str, rows: Ints) -> Column:
    if name in _OF_TENSOR:
        return rank.tensors.coded(name).take(rows)
    column = rank.calls[name]
    at = rank.call_rows[rows]
    return column.take(at) if isinstance(column, DictionaryColumn) else column[at]


def _statistic(rank: RankRun, name: str, rows: Ints) -> npt.NDArray[np.float64]:
    """A recorded number, NaN where there is none."""
    numbers = rank.tensors.numbers(name)[rows].astype(np.float64)
    known = rank.tensors.valid(name)[rows]
    if rank.tensors.numbers(name).dtype.kind == "i":
        known = known & (numbers >= 0)
    return np.where(known, numbers, np.nan)


def _gathered(parts: list[Any], of_words: bool = False) -> Column:
    """A column of all ranks, words in one numbering. There may be no rank at all."""
    if not of_words:
        return np.concatenate(parts or [np.empty(0)])
    if not parts:
        return DictionaryColumn(np.empty(0, np.int32), [])
    words = StringTable()
    return words.decode(np.concatenate([words.encode(part) for part in parts]))


# -- calls -------------------------------------------------------------------------------------------------------------


class CallIndex(NamedTuple):
    """For each row the number of its call, for each call the number of the call around it (−1 for an outermost one).

    Calls are numbered in the order in which they are first seen, so that the next number is the next call, also across
    steps. A module's outputs are seen after the calls inside it: rows of one call need not be adjacent.
    """

    of_row: Ints
    parent: Ints
    rank: Ints  # of each call
    first: Ints  # of each call its first row
    order: Ints  # all rows, those of a call together
    begin: Ints  # where in `order` each call begins, and the end

    def rows(self, call: int) -> list[int]:
        """The rows of a call, in order."""
        rows: list[int] = self.order[self.begin[call] : self.begin[call + 1]].tolist()
        return rows


def calls_of_pairs(comparison: ComparisonData) -> CallIndex:
    """The calls of a comparison. Rows that only the candidate has, of a call in both runs, belong to that call."""
    pairs = comparison.pairs
    ranks, in_reference, in_candidate = (pairs.numbers(name) for name in ("rank", "call_reference", "call_candidate"))
    reference, candidate = comparison.reference.ranks, comparison.candidate.ranks
    return _joined(
        len(pairs),
        (
            (rank, rows, *_of_rank(reference.get(rank), candidate.get(rank), in_reference[rows], in_candidate[rows]))
            for rank, rows in _by_rank(ranks)
        ),
    )


def calls_of_rows(run: RunData, rank_of: Ints, row_of: Ints) -> CallIndex:
    """The calls of a run, for rows given by rank and row in that rank's table."""
    none = np.full(len(row_of), -1)
    return _joined(
        len(row_of),
        (
            (rank, rows, *_of_rank(run.ranks[rank], None, run.ranks[rank].call_rows[row_of[rows]], none[rows]))
            for rank, rows in _by_rank(rank_of)
        ),
    )


def _by_rank(ranks: Ints) -> Iterator[tuple[int, Ints]]:
    for rank in np.unique(ranks).tolist():
        yield rank, np.flatnonzero(ranks == rank)


def _joined(count: int, ranks: Iterator[tuple[int, Ints, Ints, Ints]]) -> CallIndex:
    """The calls of all ranks in one numbering."""
    of_row = np.full(count, -1)
    parents, owners, total = [], [], 0
    for rank, rows, group, parent in ranks:
        of_row[rows] = group + total
        parents.append(np.where(parent >= 0, parent + total, -1))
        owners.append(np.full(len(parent), rank))
        total += len(parent)
    order = np.argsort(of_row, kind="stable")
    begin = np.searchsorted(of_row[order], np.arange(total + 1))
    nothing = [np.empty(0, np.int64)]
    return CallIndex(
        of_row,
        np.concatenate(parents or nothing),
        np.concatenate(owners or nothing),
        order[begin[:-1]],
        order,
        begin,
    )


def _of_rank(
    reference: RankRun | None, candidate: RankRun | None, in_reference: Ints, in_candidate: Ints
) -> tuple[Ints, Ints]:
    """For rows of one rank, given by their calls in both runs: the number of each, and of each number its parent.

    The key of a call is its row in the reference; for a call of the candidate alone, the rows of the reference plus its
    row in the candidate.
    """
    sizes = [0 if run is None else len(run.calls) for run in (reference, candidate)]
    partner = np.full(sizes[1] + 1, -1)  # of each call of the candidate, the call in the reference
    matched = (in_reference >= 0) & (in_candidate >= 0)
    partner[in_candidate[matched]] = in_reference[matched]
    paired = partner[in_candidate]
    key = np.where(in_reference >= 0, in_reference, np.where(paired >= 0, paired, sizes[0] + in_candidate))
    known, first, group = np.unique(key, return_index=True, return_inverse=True)
    number = np.empty(len(known), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(known))
    around = _enclosing_keys(reference, candidate, sizes, partner)
    group_of = np.full(len(around) + 1, -1)
    group_of[known] = number
    outer = around[known]
    while len(again := np.flatnonzero((outer >= 0) & (group_of[outer] < 0))):  # a call that has no rows itself
        outer[again] = around[outer[again]]
    parent = np.full(len(known), -1)
    parent[number] = np.where(outer >= 0, group_of[outer], -1)
    return number[group.reshape(-1)], parent


def _enclosing_keys(reference: RankRun | None, candidate: RankRun | None, sizes: list[int], partner: Ints) -> Ints:
    """For each key the key of the call around it; −1 for an outermost call."""
    in_reference, in_candidate = (
        np.empty(0, np.int64) if run is None else graph_of(run).enclosings for run in (reference, candidate)
    )
    paired = partner[in_candidate]
    keys = np.where(in_candidate < 0, -1, np.where(paired >= 0, paired, sizes[0] + in_candidate))
    return np.concatenate([in_reference, keys])
