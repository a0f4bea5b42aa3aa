"""Writes a run in another format: a step of a rank at a time, by the translator that writes that format.

What the other format cannot hold is counted in `Conversion.lost`. `RunTranslator` writes our own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from astray.errors import RunError, RunExists, UsageError
from astray.records import Call, Frame, Setup, Statistics, Tensor
from astray.store.columns import Table
from astray.store.formats import WRITABLE, TranslatorFactory, open_run
from astray.store.run import RankRun, RunData
from astray.store.run_info import FORMAT, End, RunInfo
from astray.store.writing.run_writer import RunWriter

Progress = Callable[[int, int], None]
"""Called after each step of a rank with how many steps are done, and how many there are."""


class Conversion(NamedTuple):
    """What a conversion has written, and what the format could not hold."""

    path: Path
    format: str
    ranks: int
    steps: int
    calls: int
    tensors: int
    lost: Counter[str]


def convert(
    run: str | os.PathLike[str] | RunData,
    target: str | os.PathLike[str],
    to: str,
    *,
    overwrite: bool = False,
    steps: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a run, or another tool's dump, in another format.

    >>> convert("runs/a", "dump", to="msprobe").lost
    Counter({'the standard deviation of a tensor': 9120, …})

    to: "astray", "msprobe", "torch_npu", "saving_hook" or "hooktools".
    overwrite: replace what is at `target`; by default RunExists is raised where there is something.
    steps: convert only these.
    """
    if to not in WRITABLE:
        raise UsageError(f"{to!r} is not a format that can be written. There are {', '.join(WRITABLE)}.")
    opened = run if isinstance(run, RunData) else open_run(run)
    return write_as(opened, target, to, WRITABLE[to], overwrite=overwrite, steps=steps, progress=progress)


def write_as(
    run: RunData,
    target: str | os.PathLike[str],
    format: str,
    make: TranslatorFactory,
    *,
    overwrite: bool = False,
    steps: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a run at `target` with the translators that `make` returns."""
    path = Path(target)
    _check(run, path, overwrite)
    selected = None if steps is None else set(steps)
    wanted = {
        number: [step for step in rank.summary.steps if selected is None or step in selected]
        for number, rank in run.ranks.items()
    }
    total = sum(map(len, wanted.values()))
    if not total:
        raise RunError(f"{run.path} has nothing to convert{'' if selected is None else ' in the steps asked for'}.")
    lost: Counter[str] = Counter()
    calls = tensors = done = 0
    for number, own in wanted.items():
        if not own:
            continue
        rank = run.ranks[number]
        translator = make(path, number, run.info, overwrite=overwrite)
        rows = StepBatches(rank)
        for step in own:
            part = rows.of(step)
            translator.take(step, part)
            translator.end_step(step)
            calls, tensors, done = calls + len(part.calls), tensors + len(part.tensors), done + 1
            if progress is not None:
                progress(done, total)
        translator.close(rank.end or End(complete=False, ended="it does not say"))
        lost.update(translator.lost)
    converted = {step for own in wanted.values() for step in own}
    return Conversion(path, format, sum(map(bool, wanted.values())), len(converted), calls, tensors, lost)


def _check(run: RunData, path: Path, overwrite: bool) -> None:
    if path.exists() and path.resolve() == run.path.resolve():
        raise RunError(f"{path} is the run itself. Give another place to write to.")
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not overwrite:
        raise RunExists(f"{path} is there already. Choose another place, or overwrite it with --force.")


class StepBatches:
    """The rows of a rank, step by step."""

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank
        self._tensors = rank.tensors.take(slice(None))  # measured, where they had not been
        self._step_of_tensor = np.append(rank.calls.numbers("step"), -1)[rank.call_rows]

    def of(self, step: int) -> RankRun:
        """The rows of one step, with their values."""
        calls = self._rank.calls.take(self._rank.calls.numbers("step") == step)
        at = np.flatnonzero(self._step_of_tensor == step)
        return RankRun(self._rank.rank, _StepRows(self._rank, calls, self._tensors.take(at), at))


class RankView:
    """A `RankSource` that shows a rank through other tables: some of its rows, or other names.

    Stacks and values come from the rank. rows: which row of the rank each tensor is; the same one by default.
    """

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
        values = self._rank.values(row if self._rows is None else int(self._rows[row]))
        return None if values is None else np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class _StepRows(RankView):
    """The rows of one step."""

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:
        """None also where they cannot be read: the row's note says why."""
        try:
            return super().values(tensors, row)
        except RunError:
            return None


_ROW_FIELDS = [name for name in Tensor._fields if name not in ("statistics", "blob")]


class RunTranslator:
    """Writes one rank of a run of our own. It is a `Translator`. The format holds all that a reader returns."""

    def __init__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> None:
        process = RunInfo.of_process()
        known = {"format": FORMAT, "astray": process.astray, "created": process.created, "command": process.command}
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
            known = {name: cells[name] for name in _ROW_FIELDS}
            tensor = Tensor(**known, statistics=_statistics(cells))
            self._writer.tensor(tensor, rows.values(at), cells["sampled"], cells["part"])

    def sync(self) -> None:
        """Wait until it is on the disk."""
        self._writer.flush()

    def end_step(self, step: int) -> None:  # noqa: ARG002 - a step may be any
        """End the step in the writer too, so that its queue does not grow."""
        self._writer.step_done()

    def close(self, end: End) -> None:
        """Write how the recording ended, as the source has it."""
        for what, why, count in end.missed:
            self._writer.missed(what, why, count)
        self._writer.close(end.ended)
        if self._writer.failure is not None:
            raise RunError(f"{self._writer.path} is not whole. {self._writer.failure}")


def _statistics(cells: dict[str, Any]) -> Statistics | None:
    """The statistics of a tensor, of which a dump may have only some."""
    known = {name: cells[name] for name in Statistics._fields}
    return None if all(value is None for value in known.values()) else Statistics(**known)
