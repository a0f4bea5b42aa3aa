"""The tensor rows of one rank of one run, ready to be paired: flat columns, every string an integer.

Reads `store`, feeds `pair`. The columns of a call are spread over its tensors. Strings are numbered by a `StringTable`
that both runs and all ranks share, so that the same site has the same number everywhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.pair.mapping import NOTHING, Mapping
from astray.comparison.pair.renaming import renamed_columns
from astray.records import GENERATOR
from astray.steps import StepSelection
from astray.store import DictionaryColumn, RankRun

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CALL_COLUMNS = ("step", "micro", "kind", "site", "type", "call", "phase", "recompute")
TENSOR_COLUMNS = ("role", "path", "dtype", "shape", "part")
MADE_COLUMNS = ("again", "form", "layout", "moved", "apart")
WORDS = ("kind", "site", "type", "phase", "role", "path", "dtype", "shape", "part")
"""Those that are numbered by a `StringTable`."""


class StringTable:
    """Numbers the distinct values of one column in order of first appearance.

    >>> words = StringTable()
    >>> words.encode(DictionaryColumn.of(["relu", None, "linear"])).tolist()
    [0, -1, 1]
    >>> words.encode(DictionaryColumn.of(["linear"])).tolist()
    [1]
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    @property
    def words(self) -> list[Any]:
        """The values, each at the place of its number."""
        return list(self._numbers)

    def encode(self, column: DictionaryColumn[Any]) -> npt.NDArray[np.int32]:
        """The column's codes in this table; null stays −1."""
        numbers = [self._numbers.setdefault(value, len(self._numbers)) for value in column.values]
        return np.array([*numbers, -1], np.int32)[column.codes]  # the code −1 finds the last entry

    def decode(self, codes: Ints) -> DictionaryColumn[Any]:
        """A column of these codes."""
        return DictionaryColumn(codes.astype(np.int32, copy=False), self.words)


Vocabularies = defaultdict[str, StringTable]


@dataclass(frozen=True)
class Rows:
    """Some tensor rows of one rank, in order of observation.

    `tensor` and `call_row` say where each row lies in the tables of `run`; `columns` has the columns named above, and
    five more. `again`: whether it is of a forward call that was recomputed; the backward of such a call is the ordinary
    one. `form`: the shape as it is judged. `layout`: the place of the mapping's rule for how it is laid out, −1 for
    none; `moved`: whether that rule puts its elements into another order. `apart`: whether the mapping says that it is
    not compared.
    """

    run: RankRun | None
    tensor: Ints
    call_row: Ints
    columns: dict[str, Ints]

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def laid_out_shape(self) -> Ints:
        """The shapes as the reference's tensors have them, with dimensions of size 1."""
        return np.where(self.columns["layout"] >= 0, self.columns["form"], self.columns["shape"])

    def statistic(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        """A column of numbers of the run's tensors, at some of these rows."""
        assert self.run is not None, "a rank that is not there has no rows to ask for"
        return self.run.tensors.numbers(name)[self.tensor[rows]]

    def known(self, name: str, rows: Ints) -> Bools:
        """Where that column has a value."""
        assert self.run is not None, "a rank that is not there has no rows to ask for"
        return self.run.tensors.valid(name)[self.tensor[rows]]


@dataclass(frozen=True)
class RowReader:
    """How rows are read.

    steps, sites: only those; `sites` is a regular expression that is found in a site. ones: whether dimensions of size
    1 count in a shape. mapping, offset: what the candidate's names and steps are in the reference.
    """

    steps: StepSelection = StepSelection()
    sites: re.Pattern[str] | None = None
    ones: bool = True
    mapping: Mapping = NOTHING
    offset: int = 0


def read_rows(run: RankRun | None, vocabularies: Vocabularies, reading: RowReader) -> Rows:
    """The rows of a rank that are asked for. A rank that one run lacks (None) has no rows."""
    if run is None:
        nothing = np.empty(0, np.int64)
        return Rows(None, nothing, nothing, dict.fromkeys((*CALL_COLUMNS, *TENSOR_COLUMNS, *MADE_COLUMNS), nothing))
    tables: dict[str, Any] = {name: run.calls[name] for name in CALL_COLUMNS}
    tables |= {name: run.tensors[name] for name in TENSOR_COLUMNS}
    if reading.mapping != NOTHING:
        tables |= renamed_columns(run, reading.mapping)._asdict()
    calls = {name: _integers(tables[name], vocabularies[name]) for name in CALL_COLUMNS}
    calls["step"] = calls["step"] + reading.offset
    phase = run.calls.coded("phase")
    calls["again"] = calls["recompute"] * (phase.codes == phase.code("forward"))
    kept = run.call_rows >= 0  # a torn run may have lost the call of a tensor, which its problems name
    kept &= ~_of_generators(run)
    if reading.steps or reading.sites:
        wanted = _selected(calls["step"], reading.steps) & _match(calls["site"], vocabularies["site"], reading.sites)
        kept &= np.append(wanted, False)[run.call_rows]
    rows: Ints | slice = slice(None) if kept.all() else np.flatnonzero(kept)
    call_row = run.call_rows[rows]
    columns = {name: column[call_row] for name, column in calls.items()}
    for name in TENSOR_COLUMNS:
        columns[name] = _integers(tables[name], vocabularies[name])[rows]
    count = len(columns["shape"])
    no = np.zeros(count, np.int8)
    columns |= {"form": columns["shape"], "layout": np.full(count, -1, np.int32), "moved": no, "apart": no}
    if reading.mapping.layouts or reading.mapping.not_compared:
        columns |= {name: _integers(tables[name], vocabularies["shape"])[rows] for name in MADE_COLUMNS[1:]}
    if not reading.ones:
        columns["form"] = _without_ones(columns["form"], vocabularies["shape"])
    return Rows(run, np.arange(len(run.tensors))[rows], call_row, columns)


def _of_generators(run: RankRun) -> Bools:
    """The states of random generators, which are kept for a replay."""
    role, path = run.tensors.coded("role"), run.tensors.coded("path")
    named = [path.code(name) for name in GENERATOR if name in path.values]
    return np.asarray(np.isin(path.codes, named) & (role.codes == role.code("state")))


def _without_ones(shape: Ints, vocabulary: StringTable) -> Ints:
    """The same code for shapes that differ only in dimensions of size 1; meant to be compared, not to be shown."""
    forms: dict[tuple[int, ...], int] = {}
    shapes = vocabulary.words
    codes = [forms.setdefault(tuple(size for size in one if size != 1), code) for code, one in enumerate(shapes)]
    return np.array([*codes, -1])[shape]


def _integers(column: npt.NDArray[Any] | DictionaryColumn[Any], vocabulary: StringTable) -> Ints:
    if isinstance(column, DictionaryColumn):
        return vocabulary.encode(column)
    return column.view(np.int8) if column.dtype == np.bool_ else column


def _match(site: Ints, vocabulary: StringTable, pattern: re.Pattern[str] | None) -> Bools:
    if pattern is None:
        return np.ones(len(site), np.bool_)
    found = [bool(pattern.search(name)) for name in vocabulary.words]
    return np.array([*found, False])[site]


def _selected(step: Ints, steps: StepSelection) -> Bools:
    return np.isin(step, [number for number in np.unique(step).tolist() if number in steps])
