"""Writes rows that were read from another format as a run of our own, for `astray convert --to astray`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from astray.errors import RunError
from astray.records import Call, Statistics, Tensor
from astray.store.run import RankRun
from astray.store.run_info import FORMAT, End, RunInfo
from astray.store.writing.run_writer import RunWriter

_KNOWN = [name for name in Tensor._fields if name not in ("statistics", "blob")]


class RunTranslator:
    """Writes one rank. It is a `Translator`. Nothing is lost: the format holds all that a reader gives."""

    def __init__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> None:
        here = RunInfo.here()
        known = {"format": FORMAT, "astray": here.astray, "created": here.created, "command": here.command}
        self.lost: Counter[str] = Counter()
        self._writer = RunWriter(path, rank, info=msgspec.structs.replace(info, **known), overwrite=overwrite)
        self._stacks: set[int] = set()
        self._has_setup = False

    def take(self, step: int, rows: RankRun) -> None:  # noqa: ARG002 - the calls say it
        """Write the rows, and the values that can be read."""
        if not self._has_setup:
            self._has_setup = True
            for row in rows.setup:
                self._writer.setup(row)
        for at in range(len(rows.calls)):
            call = Call(**{name: rows.calls.row(at)[name] for name in Call._fields})
            if call.stack is not None and call.stack not in self._stacks:
                self._stacks.add(call.stack)
                self._writer.stack(call.stack, rows.stack(call.stack))
            self._writer.call(call)
        for at in range(len(rows.tensors)):
            cells = rows.tensors.row(at)
            known = {name: cells[name] for name in _KNOWN}
            tensor = Tensor(**known, statistics=_statistics(cells))
            self._writer.tensor(tensor, rows.values(at), cells["sampled"], cells["part"])

    def sync(self) -> None:
        """Wait until it is on the disk."""
        self._writer.flush()

    def step_over(self, step: int) -> None:  # noqa: ARG002 - a step may be any
        """Tell the writer, so that its queue does not grow."""
        self._writer.step_done()

    def close(self, end: End) -> None:
        """Write how it ended, as the source has it."""
        for what, why, count in end.missed:
            self._writer.missed(what, why, count)
        self._writer.close(end.ended)
        if self._writer.failure is not None:
            raise RunError(f"{self._writer.path} is not whole. {self._writer.failure}")


def _statistics(cells: dict[str, Any]) -> Statistics | None:
    """The statistics of a tensor, of which a dump may have only some."""
    found = {name: cells[name] for name in Statistics._fields}
    return None if all(value is None for value in found.values()) else Statistics(**found)
