"""The formats of runs: `open_run` recognises the one a path is in and opens it; `WRITABLE` says what writes each.

A format is written only by its `Translator`: `foreign/live_writer.py` feeds it from a running program, `convert.py`
from a run on disk, and both hand over the same rows in the same order. Modules of other tools' formats are imported
only when a path has to be recognised or a run is written.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from astray import checkpoints
from astray.errors import RunError
from astray.records import MissedTensor
from astray.store.checkpoint_run import open_as_run
from astray.store.run import RankRun, RunData
from astray.store.run_format import reader
from astray.store.run_format.folder import listing
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import entries


class Format(NamedTuple):
    """One way to store a run. `recognises` looks at a path without reading much of it."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], RunData]


class Translator(Protocol):
    """Writes one rank in a format. Its methods are called by one thread, which may not be the program's."""

    lost: Counter[str]
    """What the format cannot hold, in a few words, and how often it occurred: "std of a tensor", "a micro step"."""

    def take(self, step: int, rows: RankRun) -> None:
        """Take more rows of a step, in their order.

        A step may come in several pieces, and so may the tensors of a call; a tensor's call is in the same piece or in
        an earlier one. Values can be read only during this call: `rows.values(row)`.
        """

    def sync(self) -> None:
        """Bring the files up to date with all that was taken: any reader may open them, and a kill loses nothing.

        Called now and then in the middle of a step, and when the program flushes. Cheap where nothing is new.
        """

    def end_step(self, step: int) -> None:
        """The step is over: no more of its rows will follow."""

    def close(self, end: End) -> None:
        """The rank is complete: no more rows will follow."""


class TranslatorFactory(Protocol):
    """Makes the translator of a rank. Raises RunError or RunExists where it cannot write at `path`."""

    def __call__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> Translator: ...


FOREIGN = ("msprobe", "torch_npu", "saving_hook", "hooktools")
"""The formats of other tools: each a package of `astray.foreign` with `recognises`, `open_dump` and `translate`."""


def formats() -> Iterator[Format]:
    """Every format, in the order in which they are tried."""
    yield Format("astray", lambda path: path.is_dir() and reader.recognises(path), reader.open_native)
    for name in FOREIGN:
        module = _foreign(name)
        yield Format(name, module.recognises, module.open_dump)
    yield Format("checkpoint", lambda path: path.is_dir() and checkpoints.recognises(path), open_as_run)


def _foreign(name: str) -> Any:
    return importlib.import_module(f"astray.foreign.{name}")


def _write_native(path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> Translator:
    from astray.store.convert import RunTranslator  # which imports this module

    return RunTranslator(path, rank, info, overwrite=overwrite)


def _foreign_factory(name: str) -> TranslatorFactory:
    def make(path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> Translator:
        translator: Translator = _foreign(name).translate(path, rank, info, overwrite=overwrite)
        return translator

    return make


WRITABLE: Mapping[str, TranslatorFactory] = {
    "astray": _write_native,
    **{name: _foreign_factory(name) for name in FOREIGN},
}
"""The factory of the translator of each format that can be written."""


def open_run(path: str | os.PathLike[str]) -> RunData:
    """Open a recording, whatever wrote it, or a checkpoint as if it were one.

    >>> open_run("runs/a")
    <Run runs/a: torch, 20 steps, 1 rank, 3,480 calls, 9,120 tensors, complete>
    >>> open_run("gpt2/model.safetensors")
    <CheckpointRun gpt2/model.safetensors: safetensors, 148 tensors, 497.8 MB>

    Raises RunError when there is no run. A run that was killed or cut opens; see its `complete` and `problems`.
    """
    folder = Path(path)
    if not folder.exists():
        raise RunError(f"{folder} does not exist.{_nearby(folder)}")
    if not folder.is_dir() and reader.recognises(folder.parent):
        raise RunError(f"{folder} is a file; a run is a folder. Give the folder it lies in.")
    format = format_of(folder)
    if format is not None:
        return format.open(folder)
    if not folder.is_dir():
        return open_as_run(folder)  # which says what is wrong with it
    names = sorted(entry.name for entry in folder.iterdir())
    contents = f"it holds {listing(names)}" if names else "it is empty"
    raise RunError(f"{folder} is not a run: {contents}. {_suggestion(folder)}")


def format_of(path: Path) -> Format | None:
    """The format that a path is in; None when it is not a run."""
    return next((format for format in formats() if format.recognises(path)), None)


def _suggestion(folder: Path) -> str:
    """Guess what was meant: the folder above, or one of those inside."""
    if _is_run(folder.resolve().parent):
        return f"The folder above it is one: {folder.resolve().parent}."
    inside = _runs_in(folder)
    weights = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(checkpoints.ENDINGS))
    if weights and not inside:
        return f"If it is a checkpoint, give the file: {listing([str(folder / name) for name in weights])}."
    return f"Runs inside it: {listing(inside)}." if inside else "Record one with astray.record or `astray run`."


def _nearby(folder: Path) -> str:
    inside = _runs_in(folder.parent) if folder.parent.is_dir() else []
    return f" Runs in {folder.parent}: {listing(inside)}." if inside else ""


def _runs_in(folder: Path) -> list[str]:
    return [entry.name for entry in entries(folder) if entry.is_dir() and _is_run(entry)]


def _is_run(folder: Path) -> bool:
    return format_of(folder) is not None


def lost_as_missed(lost: Counter[str], format: str) -> list[MissedTensor]:
    """What a format could not hold, as the `missed` rows of a run."""
    return [MissedTensor(what, f"{format} has no place for it", count) for what, count in sorted(lost.items())]
