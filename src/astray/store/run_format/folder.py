"""The folders of a run on disk: claims one for each rank, and clears an older run where it may be overwritten.

Ranks of one launch start in any order, so each manages only its own `rankN`, and rank 0 also `run.json`. Only files
that astray writes are ever removed, by name; a folder that holds anything else is left alone, also with `overwrite`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from astray.errors import RunError, RunExists
from astray.interrupts import pass_interrupt
from astray.process import reason
from astray.store.run_info import RunInfo, read_json, write_json
from astray.store.safe_paths import entries

RUN_FILE = "run.json"
END_FILE = "end.json"
SETUP_FILE = "setup.jsonl"
STACKS_FILE = "stacks.jsonl"
RANK_FOLDER = re.compile(r"rank(0|[1-9][0-9]{0,8})")
RANK_FILES = re.compile(
    r"(calls|tensors)\.arrows|(stacks|setup)\.jsonl|\.?values-\d+\.safetensors|end\.json|\.end\.json\.\d+"
)


def claim(path: Path, rank: int, info: RunInfo, overwrite: bool) -> Path:
    """Make the folder of `rank` inside the run at `path`, remove earlier files from it, and return it."""
    check_recordable(path, rank, overwrite)
    folder = path / f"rank{rank}"
    with recording_errors(path):
        _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for number, stale in rank_folders(path).items():
                if number >= info.world_size:
                    _clear(stale)
            write_json(path / RUN_FILE, info)
    return folder


def claim_or_join(path: Path, rank: int, info: RunInfo, overwrite: bool) -> Path:
    """Like `claim`, for a flight recording, which each rank writes on its own when something triggers it.

    The first rank that calls this writes `run.json`; later ones find it, and add their folders.
    """
    folder = path / f"rank{rank}"
    with recording_errors(path):
        _reject_foreign(path)
        exists = (path / RUN_FILE).exists()  # checked before it is read: other ranks write at this moment
        is_ours = exists and _is_of_this_launch(path / RUN_FILE, info)
        if not overwrite and (folder.exists() or (exists and not is_ours)):
            _raise_exists(path)
        _clear(folder)
        path.mkdir(parents=True, exist_ok=True)
        if not is_ours:
            write_json(path / RUN_FILE, info, f"rank{rank}")
        folder.mkdir(exist_ok=True)
    return folder


def _is_of_this_launch(file: Path, info: RunInfo) -> bool:
    """Whether another rank of this launch has written this `run.json`: it did so after this one began to record."""
    try:
        known = read_json(file, RunInfo)
    except RunError:
        return False
    is_after = known.flight is not None and known.flight.written >= info.created
    return is_after and known.world_size == info.world_size


def release(path: Path, rank: int) -> None:
    """Undo `claim`, and remove what was written since. Folders that hold something else stay."""
    _clear(path / f"rank{rank}")
    if rank == 0:
        (path / RUN_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other ranks are in it
        path.rmdir()


def move_ranks(path: Path, source: Path, world_size: int) -> None:
    """Move the ranks that were recorded in `source` into the run at `path`, whose own folders of them have no calls."""
    with recording_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        ranks = rank_folders(source)
        if (source / RUN_FILE).exists():
            (source / RUN_FILE).replace(path / RUN_FILE)
        elif (path / RUN_FILE).exists():
            info = read_json(path / RUN_FILE, RunInfo)
            write_json(path / RUN_FILE, msgspec.structs.replace(info, world_size=world_size))
        for number, folder in ranks.items():
            _clear(path / f"rank{number}")
            folder.replace(path / f"rank{number}")
        source.rmdir()


def discard(path: Path) -> None:
    """Remove a run of ours with all of its ranks. A folder that holds something else stays."""
    with recording_errors(path):
        for folder in rank_folders(path).values():
            _clear(folder)
        (path / RUN_FILE).unlink(missing_ok=True)
        for note in path.glob("process-*.json"):
            note.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            path.rmdir()


def check_recordable(path: Path, rank: int, overwrite: bool) -> None:
    """Raise RunError or RunExists when `rank` may not record into `path`."""
    with recording_errors(path):
        _reject_foreign(path)
        if not overwrite:
            _reject_run(path, rank)


@contextlib.contextmanager
def recording_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors of recording into `path` into a RunError."""
    try:
        yield
    except OSError as error:
        pass_interrupt(error)
        what = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise RunError(
            f"{path} cannot be recorded into: {reason(error)}{what}. Choose a folder that can be written to."
        ) from None


def rank_folders(path: Path) -> dict[int, Path]:
    """The folders of ranks inside a run, by number, without links that lead out of it."""
    found = ((RANK_FOLDER.fullmatch(entry.name), entry) for entry in entries(path) if entry.is_dir())
    return dict(sorted((int(match[1]), entry) for match, entry in found if match))


def is_rank(folder: Path) -> bool:
    """Whether the folder of a rank is one of ours, by its contents: a file that we write, or nothing yet."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return True  # reading it says what is wrong
    return not names or any(RANK_FILES.fullmatch(name) for name in names)


def _reject_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file. Choose a folder to record into.")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if names and not any(_is_ours(name) for name in names):
        raise RunError(
            f"{path} is not empty and holds no run ({listing(names)}). It is left as it is; choose another folder."
        )


def _is_ours(name: str) -> bool:
    return name.lstrip(".").startswith(RUN_FILE) or RANK_FOLDER.fullmatch(name) is not None


def _reject_run(path: Path, rank: int) -> None:
    """Rank 0 owns the run; another rank may find `run.json` of its own launch, but not its own folder."""
    known = path / RUN_FILE
    taken = (path / f"rank{rank}").exists() or (rank == 0 and known.exists())
    if not taken and known.exists():
        taken = read_json(known, RunInfo).world_size <= rank  # another launch's: it has no such rank
    if taken:
        _raise_exists(path)


def _raise_exists(path: Path) -> NoReturn:
    raise RunExists(
        f"{path} already holds a run{_contents(path)}. Choose another folder, or pass overwrite=True (--force on "
        "the command line)."
    )


def _contents(path: Path) -> str:
    from astray.store.run_format.reader import open_native  # which imports this module

    try:
        run = open_native(path)
        calls = sum(len(rank.calls) for rank in run.ranks.values())
        steps = len(run.steps)
    except RunError:
        return ""
    return f" ({steps:,} step{'s' * (steps != 1)}, {calls:,} call{'s' * (calls != 1)})"


def _clear(folder: Path) -> None:
    """Remove what astray wrote into a rank's folder, and the folder when nothing else is in it."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if RANK_FILES.fullmatch(entry.name):
            entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def listing(names: list[str], most: int = 4) -> str:
    """A few names for a message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
