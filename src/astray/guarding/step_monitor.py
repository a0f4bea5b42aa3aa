"""Looks at the rows of each step as they come, in the recorder's thread, and queues what makes a guard trip.

NaN and infinity go through `nonfinite`, and only when a count of them is not zero: a step in which all is finite costs
a look at two columns. Also losses and gradient norms that are suddenly far larger than before (`SpikeMonitor`).
Nothing here takes a lock: a signal handler in the program's thread may wait for the recorder's thread.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.guarding.options import Condition
from astray.guarding.trip import Trip
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.nonfinite.alarm import Alarm
from astray.store import BufferedStep, RankRun, Table
from astray.wording import counted

STEP_TIMEOUT = 60.0
"""Seconds for which a guard waits until a step has been observed."""

BAD_WEIGHT = "bad weight"
MOST_SKIPPED = 20
"""Updates in a row that a GradScaler may skip: by then it has halved its scale to a millionth."""
SUSPICIOUS = MOST_SKIPPED // 2
"""Skipped updates after which the gradients of all calls are read: too large a first scale costs two or three."""
READS_ALL_GRADIENTS = "From here on the gradients of all calls are read: should it happen again, the call is named."


@dataclass
class UneventfulCounts:
    """What was seen and is not a reason to trip."""

    steps: int = 0  # that were looked at
    last: int = -1  # the last of them
    skipped: int = 0  # updates that a GradScaler left out because gradients had overflowed
    harmless: int = 0  # calls that made NaN or infinities which reached nothing
    repeated: int = 0  # alarms that repeat an earlier one, or follow from it
    failed: int = 0  # steps that could not be looked at, because the condition, or astray, failed

    def phrases(self) -> list[str]:
        """The counts that are not zero, in words."""
        phrases = {
            f"{counted(self.skipped, 'update')} skipped by a GradScaler": self.skipped,
            f"{counted(self.harmless, 'call')} made NaN or infinity that reached nothing": self.harmless,
            f"{counted(self.repeated, 'repetition')} of an alarm": self.repeated,
            f"{counted(self.failed, 'look')} at a step failed": self.failed,
        }
        return [phrase for phrase, count in phrases.items() if count]


class StepMonitor:
    """Queues a `Trip` for each thing that is wrong; `take()` returns and clears the queue.

    may_read_more: the program goes on after an alarm, and the gradients of calls are read once `wants_call_gradients`.
    """

    def __init__(
        self, rank: int, spike: float | None, condition: Condition | None, may_read_more: bool = False
    ) -> None:
        self.counts = UneventfulCounts()
        self.stopped = False  # the program was stopped in the middle of a step, at a call that had made NaN or infinity
        self.rank = rank
        self._spikes = SpikeMonitor(spike) if spike is not None else None
        self._condition = condition
        self._may_read_more = may_read_more
        self._backward_went_wrong = False
        self._skipped_in_a_row = 0  # updates
        self._reported: set[object] = set()  # keys of alarms
        self._trips: deque[Trip] = deque()
        self._losses: list[tuple[int, float]] = []  # with their steps; only the program's thread touches it
        self._failures: deque[str] = deque()

    @property
    def wants_call_gradients(self) -> bool:
        """Whether gradients went wrong by more than a scale that is too large, so that their origin is looked for."""
        return self._backward_went_wrong or self._skipped_in_a_row >= SUSPICIOUS

    def observe(self, rows: BufferedStep) -> None:
        """Looks at the rows of a step, or of a further part of it. Called in the recorder's thread."""
        if rows.step != self.counts.last:
            self.counts.steps += 1
            self.counts.last = rows.step
        for check in (self._check_non_finite, self._check_spikes, self._check_condition):
            try:
                trips = check(rows)
            except Exception as error:  # noqa: BLE001 - the program goes on, and the user's condition may be at fault
                pass_interrupt(error)
                trips = []
                self._count_failure(check == self._check_condition, rows.step, error)
            self._trips.extend(trips)

    def add_loss(self, value: float, step: int) -> None:
        """Keeps a loss that the program has computed for `check_losses`."""
        self._losses.append((step, value))

    def check_losses(self, before: int) -> None:
        """Looks at the losses of the steps before this one, whose rows have been observed."""
        losses = [loss for loss in self._losses if loss[0] < before]
        self._losses = [loss for loss in self._losses if loss[0] >= before]
        for step, value in losses:
            if not math.isfinite(value):
                if not self._reported:  # else it follows from an earlier alarm
                    self._reported.add("loss")
                    text = f"✗ The loss of step {step} is {value}, and nothing that was recorded shows why."
                    self._trips.append(Trip(step, self.rank, "non-finite", text))
            elif self._spikes is not None:
                self._trips.extend(self._spike_trips(step, self._spikes.check_loss(value, step)))

    def take(self) -> list[Trip]:
        """The trips since the last call, in order."""
        while self._failures:  # logged here and not in `observe`, since the logger has a lock
            logger.warning("%s", self._failures.popleft())
        return [self._trips.popleft() for _ in range(len(self._trips))]

    def _check_non_finite(self, rows: BufferedStep) -> list[Trip]:
        if not (rows.numbers("nan").any() or rows.numbers("inf").any()):
            self._skipped_in_a_row = 0
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
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if skipped and self._skipped_in_a_row < MOST_SKIPPED:
            return []
        self._backward_went_wrong |= any(alarm.origin.phase == "backward" for alarm in found.alarms)
        return [self._trip(rows.step, alarm) for alarm in found.alarms if self._is_new(alarm)]

    def _is_new(self, alarm: Alarm) -> bool:
        # Once the weights hold NaN, every later step finds them so.
        if alarm.key in self._reported or (self._reported and alarm.kind.word == BAD_WEIGHT):
            self.counts.repeated += 1
            return False
        self._reported.add(alarm.key)
        return True

    def _trip(self, step: int, alarm: Alarm) -> Trip:
        text = str(alarm)
        if self._skipped_in_a_row >= MOST_SKIPPED:
            skipped = f"A GradScaler has skipped {self._skipped_in_a_row} updates in a row"
            text += f"\n\n{skipped}: a smaller scale does not help."
        if alarm.candidates and self._may_read_more:
            text += f"\n\n{READS_ALL_GRADIENTS}"
        return Trip(step, self.rank, "non-finite", text, alarm)

    def _check_spikes(self, rows: BufferedStep) -> list[Trip]:
        return [] if self._spikes is None else self._spike_trips(rows.step, self._spikes.check_step(rows))

    def _spike_trips(self, step: int, sentences: list[str]) -> list[Trip]:
        return [Trip(step, self.rank, "spike", f"✗ {sentence}") for sentence in sentences]

    def _check_condition(self, rows: BufferedStep) -> list[Trip]:
        text = self._condition(RankRun(self.rank, rows)) if self._condition is not None else None
        return [Trip(rows.step, self.rank, "condition", f"✗ Step {rows.step}: {text}")] if text else []

    def _count_failure(self, in_condition: bool, step: int, error: Exception) -> None:
        self.counts.failed += 1
        if self.counts.failed == 1:
            what = "The condition of the guard failed" if in_condition else "The guard could not look at the rows"
            self._failures.append(
                f"{what} in step {step} ({type(error).__name__}: {error}). The program goes on; the guard's summary "
                "counts how often it happens."
            )


# -- spikes ------------------------------------------------------------------------------------------------------------


WINDOW = 50
LEAST = 8
"""Values that must have been seen before one can stand out."""


class SpikeDetector:
    """Follows one number. A value is a spike when its magnitude is more than `factor` times the usual one.

    The usual magnitude is the median of the last values, which one outlier does not move.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=WINDOW)

    def usual_if_spike(self, value: float) -> float | None:
        """The usual magnitude, if this value is a spike; None if it is not, or is not finite."""
        if not math.isfinite(value):
            return None
        usual = median(self._last) if len(self._last) >= LEAST else math.inf
        if abs(value) > self._factor * usual and usual > 0:
            return usual
        self._last.append(abs(value))
        return None


class SpikeMonitor:
    """Follows the norm of all gradients, the scalar results of outermost modules, and losses given to it.

    Returns a sentence for each value that stands out.
    """

    def __init__(self, factor: float) -> None:
        self._detectors: defaultdict[str, SpikeDetector] = defaultdict(lambda: SpikeDetector(factor))

    def check_step(self, rows: BufferedStep) -> list[str]:
        """Looks at the rows of a step, losses first."""
        run = RankRun(0, rows)
        if (run.call_rows < 0).any():  # a part of a step, and not its first
            return []
        tables = run.calls, run.tensors, run.call_rows
        sentences = [text for name, value in _scalars(*tables) for text in self.check_loss(value, rows.step, name)]
        norm = _gradient_norm(*tables) if rows.whole else None
        usual = None if norm is None else self._detectors["gradients"].usual_if_spike(norm)
        if norm is not None and usual is not None:
            sentences.append(
                f"The gradients of step {rows.step} have a norm of {norm:.4g}, {norm / usual:,.0f} times the usual "
                f"{usual:.4g}. Look at the batch of that step, at the loss, and at what clips the gradients."
            )
        return sentences

    def check_loss(self, value: float, step: int, name: str = "The loss") -> list[str]:
        """Looks at one value of a loss."""
        usual = self._detectors[name].usual_if_spike(value)
        if usual is None:
            return []
        return [
            f"{name} of step {step} is {value:.4g}, {abs(value) / usual:,.0f} times the usual {usual:.4g}. Look at the "
            "batch of that step, and at the learning rate."
        ]


def _gradient_norm(calls: Table, tensors: Table, call_rows: npt.NDArray[Any]) -> float | None:
    """The norm of the last gradients of all parameters; None without any, or when it is not finite."""
    kind, path = calls.coded("kind"), tensors.coded("path")
    rows = np.flatnonzero((kind.codes[call_rows] == kind.code("parameter")) & (path.codes == path.code("grad")))
    if tensors.numbers("nan")[rows].any() or tensors.numbers("inf")[rows].any():
        return None
    site = calls.coded("site").codes[call_rows[rows]]
    last = dict(zip(site.tolist(), tensors.numbers("l2")[rows].tolist(), strict=True))
    return math.hypot(*last.values()) if last else None


def _scalars(calls: Table, tensors: Table, call_rows: npt.NDArray[Any]) -> Iterator[tuple[str, float]]:
    """The results of outermost modules that are a single number, each with a name."""
    kind, phase, role = calls.coded("kind"), calls.coded("phase"), tensors.coded("role")
    outermost = (kind.codes == kind.code("module")) & (phase.codes == phase.code("forward")) & ~calls.valid("parent")
    single = (tensors.numbers("count") == 1) & (role.codes == role.code("output"))
    for row in np.flatnonzero(single & outermost[call_rows]).tolist():
        path = tensors["path"][row]
        part = "" if path == "out" else f" ({path})"
        yield f"The output of {calls['site'][call_rows[row]]}{part}", float(tensors.numbers("mean")[row])
