"""Writes the last steps as a run when something is wrong: once for each step and reason, and not without end."""

from __future__ import annotations

from pathlib import Path

from astray.guarding.places import Places
from astray.guarding.trip import Trip
from astray.log import logger
from astray.store import FlightRecorder

MOST_RUNS = 5
"""So many times at most the last steps are written, by a guard that lets the program go on."""

_AFTERMATH = ("exception", "signal")


class Dumps:
    """The runs that a rank has written. `writer` is the recorder that holds the steps, once it is there."""

    def __init__(self, places: Places) -> None:
        self.writer: FlightRecorder | None = None
        self._places = places
        self._written: dict[Path, Path | None] = {}  # None where it could not be

    def write(self, trip: Trip) -> Trip:
        """The trip, with the run into which the last steps were written."""
        if trip.path is not None:
            return trip
        # When one rank trips, the others lose it, and end by an exception or a signal: that belongs into its run.
        others = self.join_others(trip.headline) if trip.what in _AFTERMATH else []
        if others:
            return trip.at(others[-1])
        run = self._places.run(trip.step, trip.what)
        if run not in self._written and len(self._written) < MOST_RUNS:
            self._dump(run, trip.headline)
        return trip.at(self._written.get(run))

    def join_others(self, why: str) -> list[Path]:
        """Adds this rank to the runs that others have begun."""
        runs = self._places.of_others()
        for run in runs:
            self._dump(run, why)
        return runs

    def _dump(self, run: Path, why: str) -> None:
        self._written[run] = None
        if self.writer is None:
            return
        failure = self.writer.dump(run, why).failure
        if failure is None:
            self._written[run] = run
        else:
            logger.warning("%s", failure)
