"""Looks at the rows of each step as they come, in the recorder's thread, and notes what makes a guard trip.

A step in which all is finite costs a look at two columns. Only when a count is not zero is the step taken apart.
There is no lock in it: a signal handler of the program's thread may wait for the recorder's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from astray.guarding.spikes import SpikeMonitor
from astray.guarding.trip import Trip
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.nonfinite.alarm import Alarm
from astray.store import BufferedStep, RankRun
from astray.wording import counted

Condition = Callable[[RankRun], str | None]
"""Given the rows of a step, as a rank of a run; gives a text when they should make the guard trip."""

BAD_WEIGHT = "bad weight"
MOST_SKIPPED = 20
"""Updates in a row that a GradScaler may skip: by then it has halved its scale to a millionth."""
SUSPICIOUS = MOST_SKIPPED // 2
"""Skipped updates from which on the gradients of all calls are read: too large a first scale costs two or three."""
FROM_HERE_ON = "From here on the gradients of all calls are read: should it happen again, the call is named."


@dataclass
class UneventfulCounts:
    """What was seen and is not a reason to trip."""

    steps: int = 0  # that were looked at
    last: int = -1  # the last of them
    skipped: int = 0  # updates that a GradScaler left out because gradients had overflowed
    harmless: int = 0  # calls that made NaN or infinities which reached nothing
    repeated: int = 0  # alarms of which there was one already, or that follow from one
    failed: int = 0  # steps that could not be looked at, because the condition, or we, failed

    def told(self) -> list[str]:
        """What there is of it, in words."""
        said = {
            f"{counted(self.skipped, 'update')} skipped by a GradScaler": self.skipped,
            f"{counted(self.harmless, 'call')} made NaN or infinity that reached nothing": self.harmless,
            f"{counted(self.repeated, 'repetition')} of an alarm": self.repeated,
            f"{counted(self.failed, 'look')} at a step failed": self.failed,
        }
        return [words for words, count in said.items() if count]


class StepMonitor:
    """Findings are queued; `take()` returns and clears them.

    may_read_more: the gradients of calls are read once `wants_call_gradients`, and the program goes on behind an alarm.
    """

    def __init__(
        self, rank: int, spike: float | None, condition: Condition | None, may_read_more: bool = False
    ) -> None:
        self.counts = UneventfulCounts()
        self.stopped = False  # the program was stopped in the middle of a step, at a call that had made NaN or infinity
        self.rank = rank
        self._followed = SpikeMonitor(spike) if spike is not None else None
        self._condition = condition
        self._may_read_more = may_read_more
        self._backward_went_wrong = False
        self._in_a_row = 0  # updates that were skipped
        self._known: set[object] = set()
        self._found: deque[Trip] = deque()
        self._losses: list[tuple[int, float]] = []  # with their steps; the program's thread alone knows them
        self._trouble: deque[str] = deque()

    @property
    def wants_call_gradients(self) -> bool:
        """Whether gradients went wrong by more than a scale that is too large, so that their origin is looked for."""
        return self._backward_went_wrong or self._in_a_row >= SUSPICIOUS

    def look(self, rows: BufferedStep) -> None:
        """Looks at the rows of one step."""
        if rows.step != self.counts.last:  # else it is a further part of the same step
            self.counts.steps += 1
            self.counts.last = rows.step
        for look in (self._non_finite, self._spike, self._asked):
            try:
                found = look(rows)
            except Exception as error:  # noqa: BLE001 - the program goes on, and the user's condition may be at fault
                pass_interrupt(error)
                found = []
                self._failed(look == self._asked, rows.step, error)
            self._found.extend(found)

    def loss(self, value: float, step: int) -> None:
        """A loss that the program has computed; `judge` looks at it."""
        self._losses.append((step, value))

    def judge(self, over: int) -> None:
        """Looks at the losses of the steps before `over`, whose rows have been looked at."""
        losses = [loss for loss in self._losses if loss[0] < over]
        self._losses = [loss for loss in self._losses if loss[0] >= over]
        for step, value in losses:
            if math.isfinite(value):
                self._found.extend(self._spikes(step, self._followed.loss(value, step) if self._followed else []))
            elif not self._known:  # else it follows from what was found before
                self._known.add("loss")
                text = f"✗ The loss of step {step} is {value}, and nothing that was recorded shows why."
                self._found.append(Trip(step, self.rank, "non-finite", text))

    def take(self) -> list[Trip]:
        """What was found since the last time, in order."""
        while self._trouble:  # told here, since the logger has a lock
            logger.warning("%s", self._trouble.popleft())
        return [self._found.popleft() for _ in range(len(self._found))]

    def _non_finite(self, rows: BufferedStep) -> list[Trip]:
        if not (rows.numbers("nan").any() or rows.numbers("inf").any()):
            self._in_a_row = 0
            return []
        from astray.nonfinite.findings import step_alarms

        rank = RankRun(self.rank, rows)
        found = step_alarms(
            rank.calls,
            rank.tensors,
            rank=self.rank,
            stacks=rows.stack,
            values=rank.values,
            stopped=self.stopped and not rows.whole,
        )
        self.counts.harmless += found.harmless
        skipped = found.is_skippable and found.scaled
        self.counts.skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if skipped and self._in_a_row < MOST_SKIPPED:
            return []
        self._backward_went_wrong |= any(alarm.origin.phase == "backward" for alarm in found.alarms)
        return [self._trip(rows.step, alarm) for alarm in found.alarms if self._is_new(alarm)]

    def _is_new(self, alarm: Alarm) -> bool:
        # Once something has spoilt the weights, every step finds them so.
        if alarm.key in self._known or (self._known and alarm.kind.word == BAD_WEIGHT):
            self.counts.repeated += 1
            return False
        self._known.add(alarm.key)
        return True

    def _trip(self, step: int, alarm: Alarm) -> Trip:
        text = str(alarm)
        if self._in_a_row >= MOST_SKIPPED:
            text += f"\n\nA GradScaler has skipped {self._in_a_row} updates in a row: a smaller scale does not help."
        if alarm.candidates and self._may_read_more:
            text += f"\n\n{FROM_HERE_ON}"
        return Trip(step, self.rank, "non-finite", text, alarm)

    def _spike(self, rows: BufferedStep) -> list[Trip]:
        return [] if self._followed is None else self._spikes(rows.step, self._followed.look(rows))

    def _spikes(self, step: int, sentences: list[str]) -> list[Trip]:
        return [Trip(step, self.rank, "spike", f"✗ {sentence}") for sentence in sentences]

    def _asked(self, rows: BufferedStep) -> list[Trip]:
        said = self._condition(RankRun(self.rank, rows)) if self._condition is not None else None
        return [Trip(rows.step, self.rank, "condition", f"✗ Step {rows.step}: {said}")] if said else []

    def _failed(self, asking: bool, step: int, error: Exception) -> None:
        self.counts.failed += 1
        if self.counts.failed == 1:
            whose = "The condition of the guard failed" if asking else "The guard could not look at the rows"
            said = f"{whose} in step {step} ({type(error).__name__}: {error})."
            self._trouble.append(f"{said} The program goes on; the guard's summary counts how often it happens.")
