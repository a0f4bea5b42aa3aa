"""Looks at a recording while it is written: `guard=` of a recorder.

The recording goes onto disk as it is made, so nothing has to be remembered: at a trip it is flushed, and is itself the
run to look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from astray.guarding import options as asked
from astray.guarding.actions import On, TripActions
from astray.guarding.step_monitor import Condition, StepMonitor
from astray.guarding.trip import Trip, Tripped
from astray.store import BackgroundWriter, RunWriter
from astray.wording import counted

if TYPE_CHECKING:
    from astray.capture.settings import Settings

PATIENCE = 60.0  # seconds that a step is waited for


class RecordingGuardOptions(TypedDict, total=False):
    """What can be asked of the guard of a recording; `Guard` explains each."""

    on: On
    spike: float | None
    when: Condition | None


GuardSetting = On | RecordingGuardOptions
"""What `guard=` takes: what to do, or a dict with more than that."""


class RecordingGuard:
    """The guard of a recording. `astray.Recorder.guard` is one, for those who ask for it.

    >>> with astray.record("runs/a", model, guard={"on": "warn", "spike": 10}) as rec:
    ...     ...
    >>> rec.guard.summary
    'no alarm in 20 steps'
    """

    def __init__(self, guarding: GuardSetting) -> None:
        given = asked.of_recording(guarding)
        self._acting = TripActions(given.get("on", "raise"), self._save)
        self._lookout = StepMonitor(0, given.get("spike"), given.get("when"))
        self._writer: RunWriter | None = None
        self._over = 0  # steps that are over

    # -- what the user asks ------------------------------------------------------------------------------------------

    @property
    def trips(self) -> list[Trip]:
        """What has gone wrong so far."""
        return self._acting.trips

    @property
    def has_seen_any(self) -> bool:
        """Whether any call was looked at."""
        return self._lookout.counts.steps > 0

    @property
    def summary(self) -> str:
        """What was seen, in one line."""
        counts = self._lookout.counts
        found = counted(len(self.trips), "alarm") if self.trips else "no alarm"
        return ", ".join([f"{found} in {counted(counts.steps, 'step')}", *counts.told()])

    def loss(self, value: Any) -> None:
        """Tells the loss of this step, where no module returns it; `Guard.loss` has more."""
        self._lookout.loss(float(value), self._over)

    # -- what the recorder tells -------------------------------------------------------------------------------------

    def check(self, settings: Settings) -> None:
        """Raises a RecordError when a recording by these settings shows nothing to a guard."""
        asked.check_settings(settings)

    def open(self, path: Path, rank: int, **named: Any) -> BackgroundWriter:
        """The writer of the recording, which shows each step."""
        self._lookout.rank = rank
        self._writer = RunWriter(path, rank, on_step=self._lookout.look, **named)
        return self._writer

    def after_step(self, over: int) -> None:
        """`over` steps are over. Acts on what they show; where a device still works on the last, on those before."""
        self._over = over
        if self._writer is not None and self._writer.listener is not None:
            looked_at = over - self._writer.listener.is_asynchronous
            self._writer.listener.wait_until_shown(looked_at - 1, PATIENCE)
            self._lookout.judge(looked_at)
            self._acting.act(self._lookout.take())

    def ended(self, error: BaseException) -> str | None:
        """How the recording ended, if it was this guard that has ended it."""
        if not isinstance(error, Tripped) or error.trip not in self.trips:
            return None
        return f"a guard's alarm: {error.trip.headline}"

    def finish(self, going_down: bool) -> None:
        """The recording is closed. Acts on what is left; a program that is `going_down` is not stopped."""
        self._lookout.judge(self._over + 1)
        trips = self._lookout.take()
        if not going_down:
            self._acting.act(trips)
            return
        for trip in trips:
            self._acting.tell(self._acting.note(trip), going_down=True)

    def _save(self, trip: Trip) -> Trip:
        """Flushes the recording before the trip is reported; one that is closed is on disk already."""
        writer = self._writer
        if writer is None:
            return trip
        if writer.end is None:
            writer.flush()
        return trip.recorded_in(writer.path)
