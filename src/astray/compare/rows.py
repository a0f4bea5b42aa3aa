"""The tensor rows of one rank of one run, ready to be paired: flat columns, every string an integer.

Reads `store`, feeds `align`. The columns of a call are spread over its tensors. Strings are numbered by a `Vocabulary`
that both runs and all ranks share, so that the same site has the same number everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.steps import Steps
from astray.store import Coded, RankRun

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CALL_COLUMNS = ("step", "micro", "kind", "site", "type", "call", "phase", "recompute")
TENSOR_COLUMNS = ("role", "path", "dtype", "shape", "part")
WORDS = ("kind", "site", "type", "phase", "role", "path", "dtype", "shape", "part")
"""Those that are numbered by a vocabulary."""


class Vocabulary:
    """Numbers the distinct values of one column in order of first appearance.

    >>> words = Vocabulary()
    >>> words.encode(Coded.of(["relu", None, "linear"])).tolist(), words.encode(Coded.of(["linear"])).tolist()
    ([0, -1, 1], [1])
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    @property
    def words(self) -> list[Any]:
        """The values, each at the place of its number."""
        return list(self._numbers)

    def encode(self, column: Coded[Any]) -> npt.NDArray[np.int32]:
        """The column's codes in this vocabulary; null stays −1."""
        numbers = [self._numbers.setdefault(value, len(self._numbers)) for value in column.values]
        return np.array([*numbers, -1], np.int32)[column.codes]  # the code −1 finds the last entry

    def decode(self, codes: Ints) -> Coded[Any]:
        """A column of these codes."""
        return Coded(codes.astype(np.int32, copy=False), self.words)


Vocabularies = defaultdict[str, Vocabulary]


@dataclass(frozen=True)
class Rows:
    """Some tensor rows of one rank, in order of observation.

    `tensor` and `call_row` say where each row lies in the tables of `run`; `columns` has the columns named above, and
    `again`: whether it is of a forward call that was recomputed. The backward of such a call is the ordinary one.
    """

    run: RankRun | None
    tensor: Ints
    call_row: Ints
    columns: dict[str, Ints]

    def __len__(self) -> int:
        return len(self.tensor)

    def statistic(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        """A column of numbers of the run's tensors, at some of these rows."""
        assert self.run is not None, "a rank that is not there has no rows to ask for"
        return self.run.tensors.numbers(name)[self.tensor[rows]]

    def known(self, name: str, rows: Ints) -> Bools:
        """Where that column has a value."""
        assert self.run is not None, "a rank that is not there has no rows to ask for"
        return self.run.tensors.valid(name)[self.tensor[rows]]


def read_rows(run: RankRun | None, vocabularies: Vocabularies, steps: Steps) -> Rows:
    """The rows of a rank that belong to `steps`. A rank that one run lacks (None) has no rows."""
    if run is None:
        nothing = np.empty(0, np.int64)
        return Rows(None, nothing, nothing, dict.fromkeys((*CALL_COLUMNS, *TENSOR_COLUMNS, "again"), nothing))
    calls = {name: _integers(run.calls[name], vocabularies[name]) for name in CALL_COLUMNS}
    phase = run.calls.coded("phase")
    calls["again"] = calls["recompute"] * (phase.codes == phase.code("forward"))
    kept = run.call_rows >= 0  # a torn run may have lost the call of a tensor, and says so
    if steps:
        kept &= np.append(_selected(calls["step"], steps), False)[run.call_rows]
    rows: Ints | slice = slice(None) if kept.all() else np.flatnonzero(kept)
    call_row = run.call_rows[rows]
    columns = {name: column[call_row] for name, column in calls.items()}
    for name in TENSOR_COLUMNS:
        columns[name] = _integers(run.tensors[name], vocabularies[name])[rows]
    return Rows(run, np.arange(len(run.tensors))[rows], call_row, columns)


def _integers(column: npt.NDArray[Any] | Coded[Any], vocabulary: Vocabulary) -> Ints:
    if isinstance(column, Coded):
        return vocabulary.encode(column)
    return column.view(np.int8) if column.dtype == np.bool_ else column


def _selected(step: Ints, steps: Steps) -> Bools:
    return np.isin(step, [number for number in np.unique(step).tolist() if number in steps])
