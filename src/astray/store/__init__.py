"""Records to disk and back: `RunWriter` writes a run while a program runs, `open_run` reads one as a `Run`.

`FlightRecorder` takes the place of the first, and holds the last steps in memory until they are wanted on disk.
The tables of a run are made of `Table` and `Coded`, whatever format it lies in.
"""

from __future__ import annotations

from astray.store.checkpoint_run import CheckpointRank, CheckpointRun
from astray.store.columns import Coded, Table
from astray.store.deferred import Late, Source
from astray.store.formats import open_run
from astray.store.run import RankRun, Run
from astray.store.run_format.tensor_values import Values
from astray.store.run_info import End, Flight, RunInfo
from astray.store.writing.background_writer import Intake
from astray.store.writing.flight_recorder import FlightRecorder
from astray.store.writing.run_writer import RunWriter
from astray.store.writing.snapshot import Dump
from astray.store.writing.step_buffer import StepRows

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
