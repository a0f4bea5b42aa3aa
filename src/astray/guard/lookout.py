"""Looks at the rows of each step as they come, in the recorder's thread, and notes what makes a guard trip.

A step in which all is finite costs a look at two columns. Only when a count is not zero is the step taken apart.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from astray.guard.spikes import Spikes
from astray.guard.trip import Trip
from astray.store import RankRun, StepRows

Condition = Callable[[RankRun], str | None]
"""Given the rows of a step, as a rank of a run; gives a text when they should make the guard trip."""

BAD_WEIGHT = "bad weight"


@dataclass
class Counts:
    """What was seen and is no reason to trip."""

    skipped: int = 0  # updates that a GradScaler left out because gradients had overflowed
    harmless: int = 0  # calls that made NaN or infinities which reached nothing
    repeated: int = 0  # alarms of which there was one already, or that follow from one


class Lookout:
    """What is found is waiting in `take`."""

    def __init__(self, rank: int, spike: float | None, condition: Condition | None) -> None:
        self.counts = Counts()
        self.stopped = False  # the program was stopped in the middle of a step, at a call that had made NaN or infinity
        self._rank = rank
        self._gradients = Spikes(spike) if spike is not None else None
        self._condition = condition
        self._known: set[object] = set()
        self._found: list[Trip] = []
        self._lock = threading.Lock()

    def look(self, rows: StepRows) -> None:
        """Looks at the rows of one step."""
        found: list[Trip] = []
        if rows.numbers("nan").any() or rows.numbers("inf").any():
            found += self._non_finite(rows)
        if not found and self._gradients is not None:
            found += self._spike(rows, self._gradients)
        if self._condition is not None:
            found += self._asked(rows, self._condition)
        with self._lock:
            self._found += found

    def add(self, trip: Trip) -> None:
        """Something was found elsewhere."""
        with self._lock:
            self._found.append(trip)

    def take(self) -> list[Trip]:
        """What was found since the last time, in order."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def _non_finite(self, rows: StepRows) -> list[Trip]:
        from astray.alarms.step_findings import step_alarms

        rank = RankRun(self._rank, rows)
        found = step_alarms(
            rank.calls,
            rank.tensors,
            rank=self._rank,
            stacks=rows.stack,
            values=rank.values,
            stopped=self.stopped and not rows.whole,
        )
        self.counts.harmless += found.harmless
        if found.is_skippable and found.scaled:
            self.counts.skipped += 1
            return []
        trips = []
        for alarm in found.alarms:
            # Once something has spoilt the weights, every step finds them so.
            if alarm.key in self._known or (self._known and alarm.kind.word == BAD_WEIGHT):
                self.counts.repeated += 1
                continue
            self._known.add(alarm.key)
            trips.append(Trip(rows.step, self._rank, "non-finite", str(alarm), alarm))
        return trips

    def _spike(self, rows: StepRows, spikes: Spikes) -> list[Trip]:
        """The norm of all gradients of parameters against what it usually is."""
        tensors, _ = rows.tensors()
        calls, _ = rows.calls()
        kind, path = calls.coded("kind"), tensors.coded("path")
        call = np.searchsorted(calls.numbers("seq"), tensors.numbers("seq"))
        of_parameter = kind.codes[np.minimum(call, max(len(calls) - 1, 0))] == kind.code("parameter")
        at = np.flatnonzero(of_parameter & (path.codes == path.code("grad")))
        if not len(at):
            return []
        last = dict(zip(call[at].tolist(), tensors.numbers("l2")[at].tolist(), strict=True))
        norm = math.sqrt(sum(one * one for one in last.values() if one == one))
        usual = spikes.usual(norm)
        if usual is None:
            return []
        text = (
            f"✗ The gradients of step {rows.step} have a norm of {norm:.4g}, {norm / usual:.0f} times the usual "
            f"{usual:.4g}. Look at the batch of that step, at the loss, and at what clips the gradients."
        )
        return [Trip(rows.step, self._rank, "spike", text)]

    def _asked(self, rows: StepRows, condition: Condition) -> list[Trip]:
        said = condition(RankRun(self._rank, rows))
        return [Trip(rows.step, self._rank, "condition", f"✗ Step {rows.step}: {said}")] if said else []
