"""What made a guard trip, the error that stops the program, and what is done about a trip: reports, snapshots.

A snapshot is a run of the last steps. It is written once for each step and reason, and `MOST_RUNS` times at most. All
ranks of a program write into one folder without communicating: the rank that trips makes the run, and each other rank
looks after each of its steps for runs that it is not part of yet.
`astray check` and `astray run` import this before the script has imported its framework, so it reads nothing of a run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from astray.errors import AstrayError, RecordError
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.process import absolute, relative_to_cwd

if TYPE_CHECKING:
    from astray.nonfinite.alarm import Alarm
    from astray.store import FlightRecorder  # loads numpy

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


# -- snapshots ---------------------------------------------------------------------------------------------------------


DEFAULT_FOLDER = "astray-guard"
MOST_RUNS = 5
"""How often at most a guard that lets the program go on writes the last steps."""

_AFTERMATH = ("exception", "signal")


class SnapshotWriter:
    """Writes the runs of one rank. `writer` holds the steps in memory; None until the recording has begun."""

    def __init__(self, folder: SnapshotFolder) -> None:
        self.writer: FlightRecorder | None = None
        self._folder = folder
        self._written: dict[Path, Path | None] = {}  # None for a run that could not be written

    def write(self, trip: Trip) -> Trip:
        """The trip, with the run into which the last steps were written."""
        if trip.path is not None:
            return trip
        # When one rank trips, the others lose their peer, and end by an exception or a signal: that is part of its run.
        joined = self.join_others(trip.headline) if trip.what in _AFTERMATH else []
        if joined:
            return trip.in_snapshot(joined[-1])
        run = self._folder.run(trip.step, trip.what)
        if run not in self._written and len(self._written) < MOST_RUNS:
            self._dump(run, trip.headline)
        return trip.in_snapshot(self._written.get(run))

    def join_others(self, why: str) -> list[Path]:
        """Adds this rank to the runs that other ranks have begun; returns these runs."""
        runs = self._folder.runs_of_others()
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


class SnapshotFolder:
    """The folder with the runs of one guard. It is made at the first trip."""

    def __init__(self, path: str | os.PathLike[str] | None, rank: int, world_size: int) -> None:
        self.folder = _unused(Path(DEFAULT_FOLDER, _name(world_size)), world_size) if path is None else absolute(path)
        self._is_distributed = world_size > 1
        self._joined: set[str] = set()  # the runs that this rank is part of
        if rank == 0 and self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise RecordError(
                f"{relative_to_cwd(self.folder)} is there already. Choose another path for what this guard may find."
            )

    def run(self, step: int, what: str) -> Path:
        """The path of the run for a trip in this step."""
        name = f"step{step}-{what}"
        self._joined.add(name)
        return self.folder / name

    def runs_of_others(self) -> list[Path]:
        """The runs of other ranks that this one is not part of yet. Each is returned once.

        A folder without its `run.json` is left for the next step: the rank that has tripped is about to write it.
        """
        if not self._is_distributed or not self.folder.is_dir():
            return []
        from astray.store.run_format.folder import RUN_FILE  # and not before: the script is to import numpy itself

        names = sorted(entry.name for entry in os.scandir(self.folder) if Path(entry, RUN_FILE).exists())
        new = [name for name in names if name not in self._joined]
        self._joined.update(new)
        return [self.folder / name for name in new]


def _unused(folder: Path, world_size: int) -> Path:
    """The folder, or a numbered one where a guard has written in this very second. Of several ranks all must agree."""
    folder = absolute(folder)
    if world_size > 1:
        return folder
    names = (folder.with_name(f"{folder.name}-{i}") if i > 1 else folder for i in itertools.count(1))
    return next(name for name in names if not name.exists())


def _name(world_size: int) -> str:
    """A name that is unique to this program, and that each of its ranks computes by itself."""
    if world_size == 1:
        return f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    run, port = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("MASTER_PORT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return "-".join([run, port, *([str(os.getppid())] if on_one_machine else [])])
