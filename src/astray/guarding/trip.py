"""What made a guard trip, the error that stops the program, and what is done about a trip.

Reads nothing of a run: `astray check` and `astray run` import this before the script has imported its framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from astray.errors import AstrayError
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.process import relative_to_cwd

if TYPE_CHECKING:
    from astray.nonfinite.alarm import Alarm

What = Literal["non-finite", "spike", "condition", "exception", "signal", "rank"]


@dataclass(frozen=True)
class Trip:
    """One thing that went wrong.

    step, rank: where it was found.
    what: NaN or infinity that reached something that matters, a loss or gradient norm out of all proportion, a
        condition of yours, an exception, a signal, or another rank of the program that has tripped.
    text: the same in words; for NaN and infinity a screen of them.
    alarm: the origin of NaN or infinity.
    path: the run into which the last steps were written; None when that could not be done. In a recording that is
        guarded, the recording itself.
    is_recorded: whether `path` is such a recording.
    """

    step: int
    rank: int
    what: What
    text: str
    alarm: Alarm | None = None
    path: Path | None = None
    is_recorded: bool = False

    def in_snapshot(self, path: Path | None) -> Trip:
        """This trip, with the run into which the last steps were written."""
        return replace(self, path=path)

    def in_recording(self, path: Path) -> Trip:
        """This trip, with the recording that has all of the program's steps."""
        return replace(self, path=path, is_recorded=True)

    @property
    def headline(self) -> str:
        """What it is about, in a line."""
        return self.text.partition("\n")[0].lstrip("✗ ")

    @property
    def look(self) -> str | None:
        """The command that shows more of it."""
        if self.path is None:
            return None
        option = "--alarms" if self.what in ("non-finite", "rank") else "--risk"
        return f"astray show {relative_to_cwd(self.path)} {option}"

    def __str__(self) -> str:
        if self.path is None:
            return self.text
        what = "All of it is" if self.is_recorded else "The last steps are"
        return f"{self.text}\n\n{what} in {relative_to_cwd(self.path)}: {self.look}"


class Tripped(AstrayError):  # noqa: N818 - reads as the fact it states
    """A guard has found something wrong. `trip` has what."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(str(trip))
        self.trip = trip


On = Literal["raise", "warn"] | Callable[[Trip], object]
"""What to do at a trip: raise `Tripped`, warn through the logger, or call a function."""


class TripActions:
    """Collects trips, and does for each what `on` says.

    save: writes the steps that a trip is about, and returns the trip with their path.
    """

    def __init__(self, on: On, save: Callable[[Trip], Trip]) -> None:
        self.trips: list[Trip] = []
        self.raises = on == "raise"
        self._on = on
        self._save = save
        self._raised = False

    def act(self, trips: Sequence[Trip]) -> None:
        """Saves and reports trips. The program is stopped once; if it goes on all the same, it is only warned."""
        saved = [self.save(trip) for trip in trips]
        stops = bool(saved) and self.raises and not self._raised
        for trip in saved[stops:]:
            self.report(trip)
        if stops:
            self._raised = True
            raise Tripped(saved[0])

    def save(self, trip: Trip) -> Trip:
        """Writes the steps it is about, and adds it to `trips`."""
        trip = self._save(trip)
        self.trips.append(trip)
        return trip

    def report(self, trip: Trip, going_down: bool = False) -> None:
        """Reports a trip without stopping the program, which may be `going_down` already."""
        if not callable(self._on):
            logger.warning("%s", trip)
            return
        try:
            self._on(trip)
        except Exception as error:
            if not going_down:
                raise
            pass_interrupt(error)
            logger.warning("%s", f"{type(error).__name__} in the function given as on=: {error}")
