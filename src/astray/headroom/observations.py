"""The rows of all ranks side by side as columns, and which of them are the same place seen again in another step.

A place is a site, phase, role, path and dtype: the unit of the analysis of risks. Its calls, micro steps, steps and
ranks are observations of it. Rows without floating-point statistics are left out here, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.graph import graph_of
from astray.headroom.dtype_limits import limits
from astray.stats import dtypes
from astray.steps import StepSelection
from astray.store import DictionaryColumn, RankRun, RunData, Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OF_CALL = ("kind", "type", "site", "phase")
OF_TENSOR = ("role", "path", "dtype")
PLACE = ("site", "phase", "role", "path", "dtype")
_NUMBERS_OF_CALL = ("seq", "step", "micro", "call")
_NUMBERS_OF_TENSOR = ("min", "max", "mean", "std", "l2", "absmax", "zeros", "nan", "inf", "count", "fingerprint")


@dataclass
class SkippedRows:
    """How many rows have no head-room, and why."""

    total: int = 0  # how many rows there were to choose from
    unmeasured: int = 0  # recorded without statistics
    whole: int = 0  # integers and booleans
    empty: int = 0  # no elements
    orphans: int = 0  # a killed run lost the call
    unknown: Counter[str] = field(default_factory=Counter)  # of dtypes astray does not know


class StatisticColumns(NamedTuple):
    """Statistics of some tensors, each a column. `finite` and `nonzero` are how many values are that."""

    min: Floats
    max: Floats
    mean: Floats
    l2: Floats
    absmax: Floats
    finite: Floats
    nonzero: Floats

    def take(self, rows: npt.NDArray[Any]) -> StatisticColumns:
        """The same at some rows."""
        return StatisticColumns(*(column[rows] for column in self))


class Observations:
    """Columns of all rows that have floating-point statistics, in order of rank and observation.

    words: columns of texts; each has one numbering for all ranks.
    numbers: columns of numbers; also `rank`, `known_print` (whether there is a fingerprint), and `value`, which is the
        same for rows of a rank that show the same value.
    place: for each row, the number of its place; places are numbered in order of their first appearance.
    first: for each place, its first row.
    """

    def __init__(self, run: RunData, steps: StepSelection, ranks: Collection[int] | None = None) -> None:
        self.left_out = SkippedRows()
        words: dict[str, dict[Any, int]] = {name: {} for name in (*OF_CALL, *OF_TENSOR)}
        chosen = [rank for number, rank in run.ranks.items() if ranks is None or number in ranks]
        parts = [_columns(rank, words, steps, self.left_out) for rank in chosen]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
        self.words = {
            name: DictionaryColumn(columns.get(name, np.zeros(0, np.int32)).astype(np.int32), list(known))
            for name, known in words.items()
        }
        self.numbers = {name: column for name, column in columns.items() if name not in words}
        self.place, self.first = _places([self.words[name] for name in PLACE])

    def __len__(self) -> int:
        return len(self.place)

    def values(self) -> StatisticColumns:
        """The statistics of all rows, as the functions of `measures` take them."""
        at = self.numbers
        finite = (at["count"] - at["nan"] - at["inf"]).astype(np.float64)
        low, high, mean, l2, absmax = (np.nan_to_num(at[name]) for name in ("min", "max", "mean", "l2", "absmax"))
        return StatisticColumns(low, high, mean, l2, absmax, finite, finite - at["zeros"])

    def where(self, **wanted: str) -> npt.NDArray[np.bool_]:
        """The rows whose words are these."""
        mask = np.ones(len(self), np.bool_)
        for name, word in wanted.items():
            mask &= self.words[name].codes == self.words[name].code(word)
        return mask


def _columns(
    rank: RankRun, words: dict[str, dict[Any, int]], steps: StepSelection, left_out: SkippedRows
) -> dict[str, npt.NDArray[Any]]:
    calls, tensors = rank.calls, rank.tensors
    rows = _measured(rank, steps, left_out)
    at = rank.call_rows[rows]
    columns: dict[str, npt.NDArray[Any]] = {"rank": np.full(len(rows), rank.rank, np.int64)}
    columns |= {name: calls.numbers(name)[at].astype(np.int64) for name in _NUMBERS_OF_CALL}
    columns |= {name: tensors.numbers(name)[rows] for name in _NUMBERS_OF_TENSOR}
    columns["known_print"] = tensors.valid("fingerprint")[rows]
    columns["value"] = graph_of(rank).first_seen[rows]
    columns |= {name: _recoded(calls.coded(name), at, words[name]) for name in OF_CALL}
    columns |= {name: _recoded(tensors.coded(name), rows, words[name]) for name in OF_TENSOR}
    return columns


def _measured(rank: RankRun, steps: StepSelection, left_out: SkippedRows) -> Ints:
    """The rows with floating-point statistics in these steps; the others are counted."""
    tensors, at = rank.tensors, rank.call_rows
    wanted = at >= 0
    left_out.orphans += int((~wanted).sum())
    if steps and len(rank.calls):
        numbers, step_of = np.unique(rank.calls.numbers("step"), return_inverse=True)
        selected = np.array([int(number) in steps for number in numbers], np.bool_)[step_of]
        wanted = wanted & selected[at]
    left_out.total += int(wanted.sum())
    kinds = tensors.coded("dtype")
    floating = _by_word(kinds, lambda name: limits(name) is not None)
    known = _by_word(kinds, lambda name: name in dtypes.DTYPES)
    for name, count in _counted(tensors, wanted & ~known).items():
        left_out.unknown[name] += count
    left_out.whole += int((wanted & known & ~floating).sum())
    wanted &= floating
    left_out.unmeasured += int((wanted & (tensors.numbers("count") < 0)).sum())
    left_out.empty += int((wanted & (tensors.numbers("count") == 0)).sum())
    return np.flatnonzero(wanted & (tensors.numbers("count") > 0))


def _by_word(column: DictionaryColumn[Any], fits: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    return np.array([*map(fits, column.values), False], np.bool_)[column.codes]


def _counted(tensors: Table, rows: npt.NDArray[np.bool_]) -> Counter[str]:
    return Counter(str(name) for name in tensors.coded("dtype").take(rows)) if rows.any() else Counter()


def _recoded(column: DictionaryColumn[Any], rows: Ints, words: dict[Any, int]) -> npt.NDArray[np.int32]:
    """The codes of some rows in the numbering of all ranks."""
    numbers = [words.setdefault(word, len(words)) for word in column.values]
    return np.array([*numbers, -1], np.int32)[column.codes[rows]]


def _places(columns: list[DictionaryColumn[Any]]) -> tuple[Ints, Ints]:
    """Numbers the distinct combinations of some columns in order of their first row."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        # Renumbered after each column, so that the product of the vocabularies never overflows.
        key = np.unique(key * (len(column.values) + 1) + column.codes + 1, return_inverse=True)[1].astype(np.int64)
    _, first, key = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number[key] if len(key) else key.astype(np.int64), first[order]
