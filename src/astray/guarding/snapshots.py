"""Writes the last steps as a run when something is wrong: once for each step and reason, and `MOST_RUNS` times at most.

All ranks of a program write into one folder without communicating: the rank that trips makes the run, and each other
rank looks after each of its steps for runs that it is not part of yet.
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
    from astray.store import FlightRecorder  # loads numpy, and `astray check` imports this before the script runs

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
        """The runs of other ranks that this one is not part of yet. Each is returned once."""
        if not self._is_distributed or not self.folder.is_dir():
            return []
        names = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
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
