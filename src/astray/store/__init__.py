"""Records to disk and back: `RunWriter` writes a run while a program runs, `open_run` reads one as a `Run`.

`FlightRecorder` takes the place of the first, and holds the last steps in memory until they are wanted on disk.
The tables of a run are made of `Table` and `Coded`, whatever format it lies in.
"""

from __future__ import annotations

from astray.store.checkpoint import CheckpointRank, CheckpointRun
from astray.store.columns import Coded, Table
from astray.store.formats import open_run
from astray.store.info import End, Flight, RunInfo
from astray.store.late import Late
from astray.store.native.dump import Dump
from astray.store.native.flight import FlightRecorder
from astray.store.native.intake import Intake
from astray.store.native.memory import StepRows
from astray.store.native.values import Values
from astray.store.native.writer import RunWriter
from astray.store.run import RankRun, Run
from astray.store.source import Source

__all__ = [
    "CheckpointRank",
    "CheckpointRun",
    "Coded",
    "Dump",
    "End",
    "Flight",
    "FlightRecorder",
    "Intake",
    "Late",
    "RankRun",
    "Run",
    "RunInfo",
    "RunWriter",
    "Source",
    "StepRows",
    "Table",
    "Values",
    "open_run",
]
