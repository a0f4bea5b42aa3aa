"""The tables that the page sorts, filters and folds by itself: a row per pair of a comparison, or per tensor of a run.

Every other document and every address of the page names a tensor by its row number here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.rows import StringTable
from astray.comparison.select.columns import JUDGED, KEY
from astray.headroom.dtype_limits import limits
from astray.headroom.risk import room_of
from astray.store import DictionaryColumn, RankRun, RunData
from astray.store.validation import MOST_COUNTED
from astray.web.calls import CallIndex
from astray.web.wire import Column

Ints = npt.NDArray[np.int64]

_OF_CALL = ("step", "micro", "site", "type", "kind", "call", "phase", "recompute")
_OF_TENSOR = ("role", "path", "dtype", "shape")
_WORDS = frozenset({"site", "type", "kind", "phase", *_OF_TENSOR})
_STATISTICS = ("min", "max", "mean", "std", "l2", "absmax", "zeros", "nan", "inf", "count")
_SIDES = {"a": "reference", "b": "candidate"}
STATES = ("finite", "tight", "overflow near", "non-finite", "unknown")
"""The states of a tensor of one run."""

_JUDGED = (
    "verdict", "reason", "source", "origin", "error", "surprise", "measure", "deviation", "limit", "given", "siblings",
    "rule",
)  # fmt: skip
_MEASURED = {"cosine": "cosine", "max_abs": "max_abs", "relative_l2": "rel_l2"}
_MORE = ("rmse", "mape")
"""Metrics that can be chosen, where values were kept to measure them."""

OWN = "metric:"
"""Stands before the names of the comparison's custom metrics."""

_PLAIN = {*KEY, *JUDGED, *METRICS, *SLICES, *BOUNDS}


def comparison_columns(comparison: ComparisonData, calls: CallIndex) -> dict[str, Column]:
    """One row for each pair, in the order of `comparison.pairs`."""
    pairs = comparison.pairs
    names = ("rank", *_OF_CALL, "role", "path", *_JUDGED)
    columns: dict[str, Column] = {name: pairs[name] for name in names}
    columns |= {name: pairs[metric] for name, metric in _MEASURED.items()}
    columns |= {name: pairs[name] for name in _MORE if not np.isnan(pairs.numbers(name)).all()}
    columns |= {f"{OWN}{name}": pairs[name] for name in comparison.columns.names if _is_own(comparison, name)}
    for form in ("dtype", "shape"):
        columns |= {f"{form}_{side}": pairs[f"{form}_{name}"] for side, name in _SIDES.items()}
    for side, run in zip(_SIDES, (comparison.reference, comparison.candidate), strict=True):
        columns[f"seq_{side}"] = _sequence(run, pairs.numbers("rank"), pairs.numbers(f"call_{_SIDES[side]}"))
    return columns | _epochs(comparison.reference, pairs.numbers("step")) | _grouped(calls)


def _is_own(comparison: ComparisonData, name: str) -> bool:
    """Whether a column is a metric that was asked for by name."""
    return name in comparison.pairs and name not in _PLAIN and not name.endswith(("_reference", "_candidate"))


def _epochs(run: RunData, steps: Ints) -> dict[str, Column]:
    """The epoch of each row, and its step in that epoch, where the program counted several epochs."""
    known = run.info.settings.get("epochs")
    if not isinstance(known, list) or len(known) < 2 or not all(map(_is_epoch, known)):
        return {}
    epochs, first, added = np.array(known, np.int64).T
    at = np.maximum(np.searchsorted(first, steps, side="right") - 1, 0)
    return {"epoch": epochs[at], "epoch_step": steps - added[at]}


def _is_epoch(said: object) -> bool:
    """Whether it is the triple that a dump's reader writes for an epoch; a run's own file may hold anything."""
    numbers = said if isinstance(said, list) and len(said) == 3 else [None]
    return all(type(number) is int and abs(number) <= MOST_COUNTED for number in numbers)


def _sequence(run: RunData, ranks: Ints, calls: Ints) -> Ints:
    """The number of each row's call in its run, −1 where it is not there."""
    found = np.full(len(calls), -1)
    for number, rank in run.ranks.items():
        here = np.flatnonzero((ranks == number) & (calls >= 0))
        found[here] = rank.calls.numbers("seq")[calls[here]]
    return found


def _grouped(calls: CallIndex) -> dict[str, Column]:
    return {"group": calls.of_row, "parent": calls.parent[calls.of_row]}


class RowLocations(NamedTuple):
    """Where the rows of a run's table lie: rank, and row in that rank's tensors."""

    rank: Ints
    row: Ints

    @classmethod
    def of(cls, run: RunData) -> RowLocations:
        """All tensors whose call is there, rank by rank, in the order of observation."""
        rows = {number: np.flatnonzero(rank.call_rows >= 0) for number, rank in run.ranks.items()}
        ranks = [np.full(len(found), number) for number, found in rows.items()]
        nothing = [np.empty(0, np.int64)]
        return cls(np.concatenate(ranks or nothing), np.concatenate(list(rows.values()) or nothing))


def run_columns(run: RunData, places: RowLocations, calls: CallIndex) -> dict[str, Column]:
    """One row for each tensor of a run, with its statistics and how far it is from the end of its dtype."""
    ranks = [(rank, places.row[places.rank == number]) for number, rank in run.ranks.items()]
    columns: dict[str, Column] = {"rank": places.rank}
    columns |= {name: _gathered([_taken(rank, name, rows) for rank, rows in ranks], name in _WORDS)
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
    """The state of each tensor: whether it is finite, and how close to the end of its dtype, as docs/risk.md has it."""
    absmax, dtype, room = columns["absmax"], columns["dtype"], columns["headroom"]
    ends = [limits(name) for name in dtype.values]
    coarse = np.array([*(end is not None and end.coarse for end in ends), False])[dtype.codes]
    close = room_of(np.log2(np.where(np.isnan(room), np.inf, np.maximum(room, 1.0))), room == 1.0, coarse)
    strange = (columns["nan"] > 0) | (columns["inf"] > 0)
    found = np.select([strange, close.near, close.few, np.isnan(absmax)], [3, 2, 1, 4], 0)
    return DictionaryColumn(found.astype(np.int32), list(STATES))


def _taken(rank: RankRun, name: str, rows: Ints) -> Column:
    if name in _OF_TENSOR:
        return rank.tensors.coded(name).take(rows)
    column = rank.calls[name]
    at = rank.call_rows[rows]
    return column.take(at) if isinstance(column, DictionaryColumn) else column[at]


def _statistic(rank: RankRun, name: str, rows: Ints) -> npt.NDArray[np.float64]:
    """A recorded number, NaN where there is none."""
    found = rank.tensors.numbers(name)[rows].astype(np.float64)
    known = rank.tensors.valid(name)[rows]
    if rank.tensors.numbers(name).dtype.kind == "i":
        known = known & (found >= 0)
    return np.where(known, found, np.nan)


def _gathered(parts: list[Any], of_words: bool = False) -> Column:
    """A column of all ranks, words in one numbering. There may be no rank at all."""
    if not of_words:
        return np.concatenate(parts or [np.empty(0)])
    if not parts:
        return DictionaryColumn(np.empty(0, np.int32), [])
    words = StringTable()
    return words.decode(np.concatenate([words.encode(part) for part in parts]))
