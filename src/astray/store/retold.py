"""Rows of a rank in other tables: some of them, or with other names. Stacks and values stay where they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from astray.records import Frame, Setup
from astray.store.columns import Table
from astray.store.run import RankRun
from astray.store.run_info import End


class Retold:
    """It is a `RankSource`. rows: which row of the rank each tensor is; the same one by default."""

    def __init__(self, rank: RankRun, calls: Table, tensors: Table, rows: npt.NDArray[np.intp] | None = None) -> None:
        self._rank, self._calls, self._tensors, self._rows = rank, calls, tensors, rows
        self.end: End | None = rank.end
        self.problems: list[str] = rank.problems

    def calls(self) -> tuple[Table, list[str]]:
        return self._calls, []

    def tensors(self) -> tuple[Table, list[str]]:
        return self._tensors, []

    def stack(self, id: int) -> list[Frame]:
        return self._rank.stack(id)

    def setup(self) -> tuple[list[Setup], list[str]]:
        return self._rank.setup, []

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:  # noqa: ARG002 - as a RankSource has it
        found = self._rank.values(row if self._rows is None else int(self._rows[row]))
        return None if found is None else np.ascontiguousarray(found).reshape(-1).view(np.uint8)
