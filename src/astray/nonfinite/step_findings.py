"""What one step of one rank shows by itself: the answer for rows that are still in memory while a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from astray.nonfinite.alarm import Alarm
from astray.nonfinite.details import Stacks, tell
from astray.nonfinite.elements import Values
from astray.nonfinite.naming import function_of
from astray.nonfinite.origins import Origins
from astray.nonfinite.step_rows import StepRows
from astray.records import SKIPPED_UPDATE
from astray.store import Table

Collective = tuple[int, str, int]
"""Which call of a collective it is, on every rank alike: micro step, site and number of the call."""

_OF_RANGE = frozenset({"overflow", "unknown"})
_OF_SCALERS = frozenset({"amp_foreach_non_finite_check_and_unscale", "amp_update_scale"})


@dataclass(frozen=True)
class StepFindings:
    """What was found in one step of one rank.

    harmless: how many calls made NaN or infinities that reached nothing.
    scaled: whether a GradScaler was at work; `updated`, whether an optimizer took the gradients.
    given_away: the collectives that this rank gave NaN or infinities to.
    """

    step: int
    rank: int
    alarms: tuple[Alarm, ...] = ()
    harmless: int = 0
    scaled: bool = False
    updated: bool = False
    given_away: frozenset[Collective] = frozenset()

    @property
    def is_skippable(self) -> bool:
        """Whether it may be what a GradScaler is there for: gradients alone are infinite, and nothing was updated."""
        return bool(self.alarms) and not self.updated and all(_is_of_scaling(alarm) for alarm in self.alarms)


def step_alarms(
    calls: Table,
    tensors: Table,
    *,
    rank: int = 0,
    stacks: Stacks | None = None,
    values: Values | None = None,
    stopped: bool = False,
) -> StepFindings:
    """What is wrong in one step of one rank, given its rows alone, tensors in the order of observation.

    stacks: gives the stack of a number, innermost frame first. values: gives the values of a row of `tensors` as they
    are stored, None where they were not kept. stopped: the program went no further than the last of the rows.
    """
    return findings_of(StepRows(calls, tensors), rank, stacks, values, stopped)


def findings_of(
    rows: StepRows, rank: int, stacks: Stacks | None, values: Values | None, stopped: bool = False
) -> StepFindings:
    """The same, of rows that were taken up already."""
    origins = Origins(rows, stopped)
    return StepFindings(
        step=int(rows.calls.numbers("step")[0]) if len(rows.calls) else 0,
        rank=rank,
        alarms=tuple(tell(origins, rank, stacks, values)),
        harmless=len(origins.harmless),
        scaled=SKIPPED_UPDATE in rows.sites or any(function_of(type_) in _OF_SCALERS for type_ in set(rows.types)),
        updated="update" in rows.phases,
        given_away=frozenset(_given_away(rows)),
    )


def _given_away(rows: StepRows) -> set[Collective]:
    calls = {rows.call_of[row] for row in rows.bad if rows.goes_in(row)}
    micro, number = rows.calls.numbers("micro"), rows.calls.numbers("call")
    return {
        (int(micro[call]), rows.sites[call], int(number[call])) for call in calls if rows.kinds[call] == "collective"
    }


def _is_of_scaling(alarm: Alarm) -> bool:
    """Whether it is what scaling the loss may do: infinite gradients, or an infinite scaled loss.

    A derivative that does not exist, such as that of a root at zero, is none of it: no smaller scale helps.
    """
    by_scaling = alarm.origin.phase == "backward" or (
        alarm.origin.site.startswith("/") and function_of(alarm.origin.type) == "mul"
    )
    return by_scaling and alarm.kind.word in _OF_RANGE and {one.what for one in alarm.surfaced} <= {"gradient", "loss"}
