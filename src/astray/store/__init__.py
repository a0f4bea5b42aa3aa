"""Records to disk and back: `RunWriter` writes a run while a program runs, `open_run` reads one as `RunData`.

`FlightRecorder` takes the place of a `RunWriter` and holds the last steps in memory until a snapshot is requested.
The tables of a run are made of `Table` and `DictionaryColumn`, whatever its format.

run.py, run_info.py   an open run: `RunData` and `RankRun`; `run.json` and `end.json`
formats.py            which format a path has, and what writes each
convert.py            from one format to another
run_format/           astray's own format
writing/              the records of a running program → files, or the last steps in memory
columns.py, arrow.py  tables in memory, and as Arrow
checkpoint_run.py     a checkpoint as a run, over `measured_table.py`
deferred.py           bytes and measurements that come after their rows
safe_paths.py         keeps readers inside the run's folder
validation.py         drops rows and values that a damaged file holds
"""

from __future__ import annotations

from astray.store.checkpoint_run import CheckpointData, CheckpointRank
from astray.store.columns import DictionaryColumn, Table
from astray.store.deferred import DeferredBytes, DeferredMeasurements, TensorBytes
from astray.store.formats import open_run
from astray.store.run import RankRun, RunData
from astray.store.run_info import End, Flight, RunInfo
from astray.store.writing.background_writer import BackgroundWriter
from astray.store.writing.flight_recorder import FlightRecorder
from astray.store.writing.run_writer import RunWriter
from astray.store.writing.snapshot import Snapshot
from astray.store.writing.step_buffer import BufferedStep

__all__ = [
    "BackgroundWriter",
    "BufferedStep",
    "CheckpointData",
    "CheckpointRank",
    "DeferredBytes",
    "DeferredMeasurements",
    "DictionaryColumn",
    "End",
    "Flight",
    "FlightRecorder",
    "RankRun",
    "RunData",
    "RunInfo",
    "RunWriter",
    "Snapshot",
    "Table",
    "TensorBytes",
    "open_run",
]
