"""Makes one alarm of those with one origin: in several steps, on several ranks, or through weights and collectives.

A weight that an earlier step has spoilt is that step's fault. A collective that gives infinities is to blame only if no
rank has put any into it; otherwise it is that rank's origin that reached the others. So it is when an update takes
gradients which were averaged over ranks where nobody saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from astray.nonfinite.alarm import Alarm
from astray.nonfinite.step_findings import StepFindings
from astray.store import RankRun

_LASTING = frozenset({"gradient", "weight", "buffer", "update", "state"})
"""What of a step is still there in the next."""


def merged(found: Iterable[StepFindings], runs: Mapping[int, RankRun]) -> list[Alarm]:
    """The alarms of all steps and ranks, one for each origin, in order of step and rank."""
    ordered = sorted(found, key=lambda one: (one.step, one.rank))
    alarms: list[Alarm] = []
    for one in ordered:
        for alarm in one.alarms:
            if not _brought_by_others(alarm, ordered):
                _take(alarms, alarm, runs[one.rank])
    return [_with_reached(alarm, ordered) for alarm in alarms]


def _take(alarms: list[Alarm], alarm: Alarm, run: RankRun) -> None:
    """Adds an alarm, or what it says to one that is there already."""
    for at, known in enumerate(alarms):
        if known.key == alarm.key or _is_consequence(alarm, known):
            alarms[at] = _joined(known, alarm)
            return
    alarms.append(_dated(alarm, run) if alarm.kind.word == "bad weight" else alarm)


def _is_consequence(alarm: Alarm, of: Alarm) -> bool:
    """Whether a weight or an optimizer's state was spoilt by an earlier step, here or on a rank that shares gradients.

    An optimizer's state is recorded only after a step, so that what it starts from may be bad unseen.
    """
    spoilt = any(surfaced.what in _LASTING for surfaced in of.surfaced)
    lasting = alarm.kind.word == "bad weight" or alarm.origin.kind == "optimizer"
    return lasting and of.step < alarm.step and spoilt


def _joined(known: Alarm, alarm: Alarm) -> Alarm:
    later = {*known.later, alarm.step} - {known.step}
    return replace(known, ranks=tuple(sorted({*known.ranks, *alarm.ranks})), later=tuple(sorted(later)))


def _brought_by_others(alarm: Alarm, found: list[StepFindings]) -> bool:
    return any((_gave(alarm, one) and one.alarms) or _averaged(alarm, one) for one in found)


def _gave(alarm: Alarm, other: StepFindings) -> bool:
    """Whether another rank put NaN or infinities into the collective that an alarm blames."""
    origin = alarm.origin
    same = other.step == alarm.step and other.rank != alarm.rank and origin.kind == "collective"
    return same and (alarm.micro, origin.site, origin.call) in other.given_away


def _averaged(alarm: Alarm, other: StepFindings) -> bool:
    """Whether the update that an alarm blames was given gradients that another rank has spoilt."""
    same = other.step == alarm.step and other.rank != alarm.rank and alarm.origin.phase == "update"
    return same and any(
        one.origin.phase != "update" and any(surfaced.what == "gradient" for surfaced in one.surfaced)
        for one in other.alarms
    )


def _with_reached(alarm: Alarm, found: list[StepFindings]) -> Alarm:
    """The alarm with the ranks that its infinities were sent to."""
    own = [one for one in found if one.step == alarm.step and one.rank == alarm.rank]
    reached = {
        other.rank
        for one in own
        for other in found
        for theirs in other.alarms
        if (_gave(theirs, one) and one.given_away) or _averaged(theirs, one)
    }
    return replace(alarm, ranks=tuple(sorted({*alarm.ranks, *reached})))


def _dated(alarm: Alarm, run: RankRun) -> Alarm:
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
