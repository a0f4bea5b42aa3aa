"""Looks at a recording while it is written: `guard=` of a recorder.

The recording is on disk already, so nothing has to be kept in memory: at a trip it is flushed, and is itself the run to
look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.guarding.options import GuardSetting, check_has_statistics, check_recording_guard
from astray.guarding.step_monitor import STEP_TIMEOUT, StepMonitor
from astray.guarding.trip import Trip, TripActions, Tripped
from astray.store import BackgroundWriter, RunWriter
from astray.wording import counted

if TYPE_CHECKING:
    from astray.capture.settings import Settings


class RecordingGuard:
    """The guard of a recording: `astray.Recorder.guard`, when the recorder was given `guard=`.

    >>> with astray.record("runs/a", model, guard={"on": "warn", "spike": 10}) as rec:
    ...     ...
    >>> rec.guard.summary
    'no alarm in 20 steps'
    """

    def __init__(self, setting: GuardSetting) -> None:
        options = check_recording_guard(setting)
        self._actions = TripActions(options.get("on", "raise"), self._save)
        self._monitor = StepMonitor(0, options.get("spike"), options.get("when"))
        self._writer: RunWriter | None = None
        self._finished = 0  # steps

    # -- called by the user ------------------------------------------------------------------------------------------

    @property
    def trips(self) -> list[Trip]:
        """What has gone wrong so far."""
        return self._actions.trips

    @property
    def has_seen_any(self) -> bool:
        """Whether any call was looked at."""
        return self._monitor.counts.steps > 0

    @property
    def summary(self) -> str:
        """What was seen, in one line."""
        counts = self._monitor.counts
        alarms = counted(len(self.trips), "alarm") if self.trips else "no alarm"
        return ", ".join([f"{alarms} in {counted(counts.steps, 'step')}", *counts.phrases()])

    def loss(self, value: Any) -> None:
        """Passes on the loss of this step, where no module returns it; `Guard.loss` has more."""
        self._monitor.add_loss(float(value), self._finished)

    # -- called by the recorder --------------------------------------------------------------------------------------

    def check(self, settings: Settings) -> None:
        """Raises a RecordError when a recording by these settings shows nothing to a guard."""
        check_has_statistics(settings)

    def open(self, path: Path, rank: int, **named: Any) -> BackgroundWriter:
        """The writer of the recording, which shows each step."""
        self._monitor.rank = rank
        self._writer = RunWriter(path, rank, on_step=self._monitor.observe, **named)
        return self._writer

    def after_step(self, finished: int) -> None:
        """Acts on what the finished steps show; where a device still works on the last, on those before it."""
        self._finished = finished
        if self._writer is not None and self._writer.listener is not None:
            seen = finished - self._writer.listener.is_asynchronous
            self._writer.listener.wait_until_shown(seen - 1, STEP_TIMEOUT)
            self._monitor.check_losses(before=seen)
            self._actions.act(self._monitor.take())

    def ended(self, error: BaseException) -> str | None:
        """How the recording ended, if this guard has ended it."""
        if not isinstance(error, Tripped) or error.trip not in self.trips:
            return None
        return f"a guard's alarm: {error.trip.headline}"

    def finish(self, going_down: bool) -> None:
        """The recording is closed. Acts on what is left; a program that is `going_down` is not stopped."""
        self._monitor.check_losses(before=self._finished + 1)
        trips = self._monitor.take()
        if not going_down:
            self._actions.act(trips)
            return
        for trip in trips:
            self._actions.report(self._actions.save(trip), going_down=True)

    def _save(self, trip: Trip) -> Trip:
        """Flushes the recording before the trip is reported; one that is closed is on disk already."""
        writer = self._writer
        if writer is None:
            return trip
        if writer.end is None:
            writer.flush()
        return trip.in_recording(writer.path)
