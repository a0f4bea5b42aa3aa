"""Every alarm of a run: each step of each rank by itself first, then one alarm for each origin over steps and ranks.

`step_alarms` analyses one step, also from rows that are still in memory while a program runs. `alarms` does that for
each step of a run, merges alarms of one origin (in several steps, on several ranks, through weights and collectives),
and leaves out overflows that a GradScaler has handled by skipping the update.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, UsageError
from astray.formatting import figures
from astray.formatting.page import GREEN, MARGIN, WIDTH, YELLOW, TextPage
from astray.nonfinite.alarm import Alarm, add_alarm, location_of
from astray.nonfinite.details import ReadStack, ReadValues, describe_origins
from astray.nonfinite.origins import Origins
from astray.nonfinite.step_rows import StepView, function_of
from astray.records import SKIPPED_UPDATE, STOPPED_BY_GUARD
from astray.steps import StepSelection
from astray.store import RankRun, RunData, Table, open_run

CollectiveKey = tuple[int, str, int]
"""Identifies a call of a collective, the same on every rank: micro step, site and number of the call."""

_RANGE_KINDS = frozenset({"overflow", "unknown"})
_MOST_OTHERS = 8
_SCALERS = frozenset({"amp_foreach_non_finite_check_and_unscale", "amp_update_scale"})


@dataclass(frozen=True)
class StepFindings:
    """What was found in one step of one rank.

    harmless: how many calls made NaN or infinities that reached nothing.
    scaled: whether a GradScaler was used; `updated`, whether an optimizer used the gradients.
    sent: the collectives into which this rank put NaN or infinities.
    """

    step: int
    rank: int
    alarms: tuple[Alarm, ...] = ()
    harmless: int = 0
    scaled: bool = False
    updated: bool = False
    sent: frozenset[CollectiveKey] = frozenset()

    @property
    def is_skippable(self) -> bool:
        """Whether a GradScaler may have skipped it: gradients alone are infinite, and nothing was updated."""
        return bool(self.alarms) and not self.updated and all(_may_be_by_scaling(alarm) for alarm in self.alarms)


def step_alarms(
    calls: Table,
    tensors: Table,
    *,
    rank: int = 0,
    stacks: ReadStack | None = None,
    values: ReadValues | None = None,
    stopped: bool = False,
) -> StepFindings:
    """What is wrong in one step of one rank, given its rows alone, tensors in the order of observation.

    stacks: returns the stack with a number, innermost frame first. values: returns the values of a row of `tensors` as
    they are stored, None where they were not kept. stopped: the program went no further than the last row.
    """
    return findings_of(StepView(calls, tensors), rank, stacks, values, stopped)


def findings_of(
    rows: StepView, rank: int, stacks: ReadStack | None, values: ReadValues | None, stopped: bool = False
) -> StepFindings:
    """`step_alarms` for rows that are a `StepView` already."""
    origins = Origins(rows, stopped)
    return StepFindings(
        step=int(rows.calls.numbers("step")[0]) if len(rows.calls) else 0,
        rank=rank,
        alarms=tuple(describe_origins(origins, rank, stacks, values)),
        harmless=len(origins.harmless),
        scaled=SKIPPED_UPDATE in rows.sites or any(function_of(type_) in _SCALERS for type_ in set(rows.types)),
        updated="update" in rows.phases,
        sent=frozenset(_sent(rows)),
    )


def _sent(rows: StepView) -> set[CollectiveKey]:
    calls = {rows.call_of[row] for row in rows.bad if rows.is_input(row)}
    micro, number = rows.calls.numbers("micro"), rows.calls.numbers("call")
    return {
        (int(micro[call]), rows.sites[call], int(number[call])) for call in calls if rows.kinds[call] == "collective"
    }


def _may_be_by_scaling(alarm: Alarm) -> bool:
    """Whether scaling the loss may have caused it: infinite gradients, or an infinite scaled loss.

    A derivative that does not exist, such as that of a root at zero, is not: no smaller scale helps.
    """
    by_scaling = alarm.origin.phase == "backward" or (
        alarm.origin.site.startswith("/") and function_of(alarm.origin.type) == "mul"
    )
    return (
        by_scaling
        and alarm.kind.word in _RANGE_KINDS
        and {point.what for point in alarm.surfaced} <= {"gradient", "loss"}
    )


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings(Sequence[Alarm]):
    """The alarms of a run, a sequence in order of step, and what was found besides.

    skipped_by_scaler: (step, rank) of updates that a GradScaler left out because gradients had overflowed.
    harmless: how many calls made NaN or infinities that reached nothing.
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
        return render(self)


def alarms(
    run: RunData | str | os.PathLike[str], rank: int | None = None, steps: str | int | Sequence[int] | None = None
) -> Findings:
    """Finds where NaN and infinity come from in a recorded run.

    >>> found = alarms("runs/a")
    >>> found[0].origin.site, found[0].kind.word
    ('h.2.attn/softmax', 'fully masked')
    >>> print(found)

    rank, steps: look only at these; steps="0:10:2".
    """
    run = run if isinstance(run, RunData) else open_run(run)
    if rank is not None and rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    ranks = run.ranks if rank is None else {rank: run.ranks[rank]}
    if not any(_is_counted(each) for each in ranks.values()):
        is_empty = not any(len(each.tensors) for each in ranks.values())
        why = "holds no tensors" if is_empty else "was recorded without statistics"
        known = " ".join([*run.problems[:1], "Record it with keep='stats'."])
        raise RunError(f"{run.path} {why}, so that NaN and infinity cannot be seen. {known}")
    selection = StepSelection.parse(steps)
    findings = [step for each in ranks.values() for step in _of_rank(each, selection)]
    skipped = [step for step in findings if was_skipped(ranks[step.rank], step)]
    kept = [step for step in findings if step not in skipped]
    return Findings(
        alarms=tuple(merged(kept, ranks)),
        skipped_by_scaler=tuple(sorted((step.step, step.rank) for step in skipped)),
        harmless=sum(step.harmless for step in findings),
        notes=tuple(_notes(run, ranks)),
    )


def _of_rank(run: RankRun, steps: StepSelection) -> Iterator[StepFindings]:
    """The findings of the steps of a rank in which anything is not finite."""
    known = run.call_rows >= 0
    bad = ((run.tensors.numbers("nan") > 0) | (run.tensors.numbers("inf") > 0)) & known
    step_of_call = run.calls.numbers("step")
    stopped_in = int(step_of_call.max()) if run.end is not None and run.end.ended == STOPPED_BY_GUARD else None
    for step in np.unique(step_of_call[run.call_rows[bad]]).tolist():
        if step in steps:
            wanted = step_of_call == step
            tensor_rows = np.flatnonzero(known & wanted[run.call_rows])
            rows = StepView(run.calls.take(wanted), run.tensors.take(tensor_rows))
            yield findings_of(rows, run.rank, run.stack, _Values(run, tensor_rows), stopped=step == stopped_in)


class _Values:
    """The kept values of the tensors of one step, by their row in that step."""

    def __init__(self, run: RankRun, rows: npt.NDArray[np.int64]) -> None:
        self._run, self._rows = run, rows

    def __call__(self, row: int) -> npt.NDArray[Any] | None:
        return self._run.verified(int(self._rows[row]))


def _is_counted(run: RankRun) -> bool:
    """Whether any row has a count of NaN and infinity."""
    return bool(run.tensors.valid("nan").any())


def _notes(run: RunData, ranks: dict[int, RankRun]) -> Iterator[str]:
    if not all(_is_counted(each) for each in ranks.values()):
        yield "Some ranks keep no statistics, so NaN and infinity cannot be seen there. Record with keep='stats'."
    yield from run.problems


# -- one alarm for each origin -----------------------------------------------------------------------------------------


_LASTING = frozenset({"gradient", "weight", "buffer", "update", "state"})
"""What of a step still exists in the next."""


def merged(findings: Iterable[StepFindings], runs: Mapping[int, RankRun]) -> list[Alarm]:
    """The alarms of all steps and ranks, one for each origin, in order of step and rank.

    A bad weight follows from the alarm of the earlier step that reached it. A collective whose results are infinite is
    an origin only if no rank has put infinities into it; otherwise the origin on that rank has reached the others. The
    same holds for an update whose gradients were averaged over ranks by code that was not recorded.
    """
    ordered = sorted(findings, key=lambda step_findings: (step_findings.step, step_findings.rank))
    alarms: list[Alarm] = []
    for step_findings in ordered:
        for alarm in step_findings.alarms:
            if not _is_from_another_rank(alarm, ordered):
                _add_or_join(alarms, alarm, runs[step_findings.rank])
    return [_with_reached(alarm, ordered) for alarm in alarms]


def _add_or_join(alarms: list[Alarm], alarm: Alarm, run: RankRun) -> None:
    """Adds an alarm, or joins it to the earlier alarm that it repeats or follows from."""
    for at, known in enumerate(alarms):
        if known.key == alarm.key or _is_consequence(alarm, known):
            alarms[at] = _joined(known, alarm)
            return
    alarms.append(_with_last_finite_step(alarm, run) if alarm.kind.word == "bad weight" else alarm)


def _is_consequence(alarm: Alarm, of: Alarm) -> bool:
    """Whether a bad weight or optimizer state comes from an earlier step, here or on a rank that shares gradients.

    An optimizer's state is recorded only after a step, so that a bad one may be an unrecorded input of the next.
    """
    has_lasted = any(point.what in _LASTING for point in of.surfaced)
    lasting = alarm.kind.word == "bad weight" or alarm.origin.kind == "optimizer"
    return lasting and of.step < alarm.step and has_lasted


def _joined(known: Alarm, alarm: Alarm) -> Alarm:
    later = {*known.later, alarm.step} - {known.step}
    return replace(known, ranks=tuple(sorted({*known.ranks, *alarm.ranks})), later=tuple(sorted(later)))


def _is_from_another_rank(alarm: Alarm, findings: list[StepFindings]) -> bool:
    return any((_has_sent(other, alarm) and other.alarms) or _has_averaged(other, alarm) for other in findings)


def _has_sent(other: StepFindings, alarm: Alarm) -> bool:
    """Whether another rank put NaN or infinities into the collective that is the origin of an alarm."""
    origin = alarm.origin
    same = other.step == alarm.step and other.rank != alarm.rank and origin.kind == "collective"
    return same and (alarm.micro, origin.site, origin.call) in other.sent


def _has_averaged(other: StepFindings, alarm: Alarm) -> bool:
    """Whether the update that is the origin of an alarm used gradients that are bad on another rank."""
    same = other.step == alarm.step and other.rank != alarm.rank and alarm.origin.phase == "update"
    return same and any(
        theirs.origin.phase != "update" and any(point.what == "gradient" for point in theirs.surfaced)
        for theirs in other.alarms
    )


def _with_reached(alarm: Alarm, findings: list[StepFindings]) -> Alarm:
    """The alarm with the ranks that its infinities were sent to."""
    reached = {
        other.rank
        for own in findings
        if own.step == alarm.step and own.rank == alarm.rank
        for other in findings
        for theirs in other.alarms
        if (_has_sent(own, theirs) and own.sent) or _has_averaged(own, theirs)
    }
    return replace(alarm, ranks=tuple(sorted({*alarm.ranks, *reached})))


def _with_last_finite_step(alarm: Alarm, run: RankRun) -> Alarm:
    """A bad weight with the last step in which it was still finite."""
    calls, tensors = run.calls, run.tensors
    weight = alarm.offenders[0]
    site, path = calls.coded("site"), tensors.coded("path")
    known = run.call_rows >= 0
    same = known & (site.codes == site.code(alarm.origin.site))[run.call_rows] & (path.codes == path.code(weight.path))
    steps = calls.numbers("step")[run.call_rows]
    finite = (tensors.numbers("nan") == 0) & (tensors.numbers("inf") == 0) & (steps < alarm.step)
    before = steps[same & finite]
    if len(before):
        since = f"It was finite in step {int(np.max(before))}: something has written to it since."
    else:
        since = "That is so in the first step that was recorded."
    return replace(alarm, kind=replace(alarm.kind, text=f"{alarm.kind.text} {since}"))


# -- updates that a GradScaler skipped ---------------------------------------------------------------------------------


def was_skipped(run: RankRun, findings: StepFindings) -> bool:
    """Whether a GradScaler has skipped the update of this step.

    A recording shows it in one of three ways: the scaler's own call and no update after it (functions, ops), updates in
    other steps and none in this one, or weights with which the next recorded step begins unchanged.
    """
    if not findings.is_skippable:
        return False
    phase = run.calls.coded("phase")
    updates_elsewhere = bool((phase.codes == phase.code("update")).any())
    return findings.scaled or updates_elsewhere or _weights_stayed(run, findings.step)


def _weights_stayed(run: RankRun, step: int) -> bool:
    """Whether the next recorded step began with the same weights."""
    role, steps = run.tensors.coded("role"), run.calls.numbers("step")[run.call_rows]
    weights = role.codes == role.code("parameter")
    later = np.unique(steps[weights & (steps > step)])
    if not len(later):
        return False
    now, then = (_weights(run, np.flatnonzero(weights & (steps == each))) for each in (step, int(later[0])))
    return bool(now) and now == {name: then.get(name) for name in now}


def _weights(run: RankRun, rows: npt.NDArray[np.int64]) -> dict[tuple[str, str], int]:
    sites, paths, prints = run.calls["site"], run.tensors["path"], run.tensors.numbers("fingerprint")
    return {(sites[run.call_rows[row]], paths[row]): int(prints[row]) for row in rows.tolist()}


# -- text --------------------------------------------------------------------------------------------------------------


def render(findings: Findings, *, width: int = WIDTH, colour: bool = False) -> str:
    """All findings: the first alarm in full, the others in a line each."""
    page = TextPage(width, colour)
    if not findings and findings.notes:
        seen = "≈ No NaN or infinity is seen to reach a result, a gradient or a weight. The notes say what is missing."
        for line in page.folded(seen, later_indent=" " * MARGIN):
            page.line(page.paint(line, YELLOW))
    elif not findings:
        page.line(page.paint("✓ No NaN or infinity reached a result, a gradient or a weight.", GREEN))
    for alarm in findings[:1]:
        add_alarm(page, alarm)
    others = [f"{location_of(other)}: {other.kind.word}" for other in findings[1 : 1 + _MOST_OTHERS]]
    if others:
        page.line()
        page.entry("by itself", ["These have other origins:", *others])
        left = len(findings) - 1 - len(others)
        page.entry("", f"and {left:,} more") if left else None
    notes = list(notes_of(findings))
    if notes:
        page.line()
        page.entry("notes", notes, margin=0)
    return page.text()


def notes_of(findings: Findings) -> Iterator[str]:
    """What is worth knowing besides the alarms, and what limits the answer."""
    if findings.skipped_by_scaler:
        steps = sorted({step for step, _ in findings.skipped_by_scaler})
        many = figures.counted(len(steps), "update")
        yield f"GradScaler left out {many} because gradients had overflowed (first in step {steps[0]}): no alarm."
    if findings.harmless:
        calls = figures.counted(findings.harmless, "call")
        yield f"{calls} made NaN or infinities that were killed before they reached anything."
    yield from findings.notes
