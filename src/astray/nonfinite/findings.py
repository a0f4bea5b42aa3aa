"""Every alarm of a run: each step and rank by itself first, then what steps and ranks have to do with each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, UsageError
from astray.nonfinite.alarm import Alarm
from astray.nonfinite.merging import merged
from astray.nonfinite.scaling import was_skipped
from astray.nonfinite.step_findings import StepFindings, findings_of
from astray.nonfinite.step_rows import StepRows
from astray.records import STOPPED
from astray.steps import Steps
from astray.store import RankRun, Run, open_run


@dataclass(frozen=True)
class Findings(Sequence[Alarm]):
    """The alarms of a run, a sequence in order of step, and what was found besides.

    skipped_by_scaler: (step, rank) of updates that a GradScaler left out because gradients had overflowed.
    harmless: how many calls made NaN or infinities that were killed before they reached anything.
    notes: what limits the answer, a sentence each.
    """

    alarms: tuple[Alarm, ...]
    skipped_by_scaler: tuple[tuple[int, int], ...] = ()
    harmless: int = 0
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Alarm: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Alarm]: ...
    def __getitem__(self, index: int | slice) -> Alarm | Sequence[Alarm]:
        return self.alarms[index]

    def __len__(self) -> int:
        return len(self.alarms)

    def __str__(self) -> str:
        from astray.nonfinite.report import render

        return render(self)


def alarms(
    run: Run | str | os.PathLike[str], rank: int | None = None, steps: str | int | Sequence[int] | None = None
) -> Findings:
    """Finds where NaN and infinity come from in a recorded run.

    >>> found = alarms("runs/a")
    >>> found[0].origin.site, found[0].kind.word
    ('h.2.attn/softmax', 'fully masked')
    >>> print(found)

    rank, steps: look only at these; steps="0:10:2".
    """
    run = run if isinstance(run, Run) else open_run(run)
    if rank is not None and rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    ranks = run.ranks if rank is None else {rank: run.ranks[rank]}
    if not any(_is_counted(one) for one in ranks.values()):
        is_empty = not any(len(one.tensors) for one in ranks.values())
        why = "holds no tensors" if is_empty else "was recorded without statistics"
        known = " ".join([*run.problems[:1], "Record it with keep='stats'."])
        raise RunError(f"{run.path} {why}, so that NaN and infinity cannot be seen. {known}")
    found = [one for each in ranks.values() for one in _of_rank(each, Steps.parse(steps))]
    skipped = [one for one in found if was_skipped(ranks[one.rank], one)]
    kept = [one for one in found if one not in skipped]
    return Findings(
        alarms=tuple(merged(kept, ranks)),
        skipped_by_scaler=tuple(sorted((one.step, one.rank) for one in skipped)),
        harmless=sum(one.harmless for one in found),
        notes=tuple(_notes(run, ranks)),
    )


def _of_rank(run: RankRun, steps: Steps) -> Iterator[StepFindings]:
    """The steps of a rank in which anything is not finite."""
    known = run.call_rows >= 0
    bad = ((run.tensors.numbers("nan") > 0) | (run.tensors.numbers("inf") > 0)) & known
    of_call = run.calls.numbers("step")
    stopped_in = int(of_call.max()) if run.end is not None and run.end.ended == STOPPED else None
    for step in np.unique(of_call[run.call_rows[bad]]).tolist():
        if step in steps:
            wanted = of_call == step
            places = np.flatnonzero(known & wanted[run.call_rows])
            rows = StepRows(run.calls.take(wanted), run.tensors.take(places))
            yield findings_of(rows, run.rank, run.stack, _Values(run, places), stopped=step == stopped_in)


class _Values:
    """The kept values of the tensors of one step, by their row in that step."""

    def __init__(self, run: RankRun, places: npt.NDArray[np.int64]) -> None:
        self._run, self._places = run, places

    def __call__(self, row: int) -> npt.NDArray[Any] | None:
        return self._run.verified(int(self._places[row]))


def _is_counted(run: RankRun) -> bool:
    """Whether anything was recorded by which NaN and infinity are seen."""
    return bool(run.tensors.valid("nan").any())


def _notes(run: Run, ranks: dict[int, RankRun]) -> Iterator[str]:
    if not all(_is_counted(one) for one in ranks.values()):
        yield "Some ranks keep no statistics, so NaN and infinity cannot be seen there. Record with keep='stats'."
    yield from run.problems
