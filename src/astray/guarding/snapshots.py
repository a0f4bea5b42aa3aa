"""Writes the last steps as a run when something is wrong: once for each step and reason, and `MOST_RUNS` times at most.

All ranks of a program write into one folder without talking to each other: the rank that trips makes the run, and the
others look at the end of each of their steps whether there is a run that they are not part of yet.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from astray.errors import RecordError
from astray.guarding.trip import Trip
from astray.log import logger
from astray.process import absolute, relative_to_cwd

if TYPE_CHECKING:
    from astray.store import FlightRecorder  # which loads numpy: `astray check` looks here before the script runs

HOME = "astray-guard"
MOST_RUNS = 5
"""How often at most a guard that lets the program go on writes the last steps."""

_AFTERMATH = ("exception", "signal")


class SnapshotWriter:
    """The runs that a rank has written. `writer` is the recorder that holds the steps, once it is there."""

    def __init__(self, places: SnapshotFolder) -> None:
        self.writer: FlightRecorder | None = None
        self._places = places
        self._written: dict[Path, Path | None] = {}  # None where it could not be

    def write(self, trip: Trip) -> Trip:
        """The trip, with the run into which the last steps were written."""
        if trip.path is not None:
            return trip
        # When one rank trips, the others lose it, and end by an exception or a signal: that belongs to its run.
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


class SnapshotFolder:
    """The runs of one guard, all in one folder, which is made at the first trip."""

    def __init__(self, path: str | os.PathLike[str] | None, rank: int, world_size: int) -> None:
        self.folder = (
            absolute(path) if path is not None else _unused(absolute(Path(HOME, _name(world_size))), world_size)
        )
        self._several = world_size > 1
        self._mine: set[str] = set()  # the runs that this rank is part of
        if rank == 0 and self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise RecordError(
                f"{relative_to_cwd(self.folder)} is there already. Choose another path for what this guard may find."
            )

    def run(self, step: int, what: str) -> Path:
        """Where to write what was found in a step."""
        name = f"step{step}-{what}"
        self._mine.add(name)
        return self.folder / name

    def of_others(self) -> list[Path]:
        """The runs of other ranks that this one is not part of yet."""
        if not self._several or not self.folder.is_dir():
            return []
        names = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        found = [name for name in names if name not in self._mine]
        self._mine.update(found)
        return [self.folder / name for name in found]


def _unused(folder: Path, world_size: int) -> Path:
    """The folder, or one beside it that no earlier guard of this second has written to. Ranks have to agree on one."""
    folder = absolute(folder)
    if world_size > 1:
        return folder
    names = (folder.with_name(f"{folder.name}-{i}") if i > 1 else folder for i in itertools.count(1))
    return next(name for name in names if not name.exists())


def _name(world_size: int) -> str:
    """A name that is unique to this program, and that each of its ranks finds by itself."""
    if world_size == 1:
        return f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    run, port = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("MASTER_PORT", "0")
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return "-".join([run, port, *([str(os.getppid())] if on_one_machine else [])])
