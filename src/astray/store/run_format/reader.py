"""Opens a run in astray's own format, as far as it is complete.

Only a folder that is not a run, or one of another format version, is an error. A missing rank, a file that was cut, a
program that was killed: these are problems, and everything else is read.
"""

from __future__ import annotations

import os
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from astray.errors import RunError, RunVersionError
from astray.records import Blob, Frame, Setup
from astray.safe_text import parse_json
from astray.store import safe_paths
from astray.store.columns import Table
from astray.store.run import RankRun, RunData
from astray.store.run_format.decoder import empty_table, read_table
from astray.store.run_format.folder import END_FILE, RUN_FILE, SETUP_FILE, STACKS_FILE, is_rank, rank_folders
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.store.run_format.shard_file import TensorBytesReader
from astray.store.run_info import FORMAT, End, RunInfo, read_json
from astray.store.validation import matches_row, valid_calls, valid_tensors
from astray.wording import counted

MOST_MISSING = 3
BLOB = ("blob_file", "blob_offset", "blob_bytes")
MOST_LINES = 1 << 30
"""Bytes of a file of JSON lines beyond which astray did not write it: each distinct stack or setting occurs once."""

NOT_ENDED = "it is still being recorded, or the recording was stopped before it ended"


def recognises(path: Path) -> bool:
    """Whether a folder looks like a run of this format, whole or not. Other tools have folders named `rank0` too."""
    return (path / RUN_FILE).exists() or any(is_rank(folder) for folder in rank_folders(path).values())


def open_native(path: Path) -> RunData:
    """Open the run at `path`."""
    info = _read_info(path)
    folders = rank_folders(path)
    sources = {rank: RunFormatRank(folder, path) for rank, folder in folders.items()}
    problems = _missing_ranks(path, info.world_size, set(folders)) + _earlier_launches(info, folders, sources)
    return RunData(path, info, {rank: RankRun(rank, source) for rank, source in sources.items()}, problems)


def _earlier_launches(info: RunInfo, folders: dict[int, Path], sources: dict[int, RunFormatRank]) -> list[str]:
    """A sentence for each rank that was finished before this run began: an older run was overwritten in part."""
    return [
        f"{folders[rank]} is of an earlier launch: it ended {source.end.finished}, and this run began {info.created}."
        for rank, source in sources.items()
        if source.end is not None and source.end.finished and source.end.finished < info.created
    ]


def _missing_ranks(path: Path, world_size: int, present: set[int]) -> list[str]:
    """A sentence for each of the first missing ranks, and one that counts the rest."""
    first = list(islice((rank for rank in range(world_size) if rank not in present), MOST_MISSING))
    named = [f"Rank {rank} of {world_size} is missing: {path / f'rank{rank}'} does not exist." for rank in first]
    rest = world_size - len([rank for rank in present if rank < world_size]) - len(first)
    if rest > 0:
        named.append(f"{rest:,} more rank{'s are' if rest > 1 else ' is'} missing.")
    return named


class _FormatVersion(msgspec.Struct):
    format: int


def _read_info(path: Path) -> RunInfo:
    file = path / RUN_FILE
    if not os.path.lexists(file):
        raise RunError(
            f"{path} has no {RUN_FILE}, so it is not known what ran. Copy it from where the run was recorded."
        )
    version = read_json(file, _FormatVersion).format
    if version > FORMAT:
        raise RunVersionError(
            f"{path} was written in format version {version}; this astray reads up to version {FORMAT}. Update astray."
        )
    return read_json(file, RunInfo)


class _StackLine(msgspec.Struct):
    """A line of stacks.jsonl."""

    id: int
    frames: list[Frame]


class RunFormatRank:
    """The files of one rank, all of which are in the folder of the run, `home`. It is a `RankSource`."""

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder = folder
        self._home = home
        self._values = TensorBytesReader(folder, home)
        self.problems: list[str] = []
        self.end = self._read_end()

    def calls(self) -> tuple[Table, list[str]]:
        """The calls, and what is wrong with their file."""
        table, problems = self._table("calls", CALLS)
        valid, damaged = valid_calls(table)
        return valid, [*problems, *(f"{self._folder}: {problem}" for problem in damaged)]

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, and what is wrong with their file."""
        read, problems = self._table("tensors", TENSORS)
        table, damaged = valid_tensors(read)
        problems += [f"{self._folder}: {problem}" for problem in damaged]
        return table, [*problems, *self._values.problems(*(table.numbers(name) for name in BLOB))]

    def stack(self, id: int) -> list[Frame]:
        """A Python stack; empty when it is missing."""
        return self._stacks[0].get(id, [])

    def setup(self) -> tuple[list[Setup], list[str]]:
        """The settings of the program, and what is wrong with their file. Runs older than the file have none."""
        file = self._folder / SETUP_FILE
        expected = self.end.setup if self.end is not None else None
        try:
            lines = safe_paths.read_file(file, self._home, MOST_LINES).splitlines()
        except FileNotFoundError:
            return [], [f"{file} is missing; it had {expected:,} lines."] if expected else []
        except RunError as error:
            return [], [f"{error} What the program was set to is not known."]
        except OSError as error:
            return [], [f"{file} cannot be read: {error.strerror}. What the program was set to is not known."]
        rows = list(map(_read_setup, lines))
        unread = rows.count(None)
        settings = [row for row in rows if row is not None]
        if unread == 1 and rows[-1] is None and self.end is None:  # the last line, cut by a kill
            return settings, []
        if unread:
            return settings, [f"{file}: {unread:,} of {len(lines):,} lines cannot be read."]
        if expected is not None and len(settings) != expected:
            return settings, [f"{file} has {len(settings):,} lines; {expected:,} were recorded."]
        return settings, []

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:
        """The bytes of a tensor, mapped from their file; None when they were not kept."""
        file, offset, size = (int(tensors.numbers(name)[row]) for name in BLOB)
        blob = Blob(file, offset, size)
        if blob.file < 0:
            return None
        return self._values.read(blob) if blob.nbytes else np.zeros(0, np.uint8)

    def matches_row(self, tensors: Table, row: int, values: npt.NDArray[Any]) -> bool:
        """Whether kept values are those that a row was measured from."""
        return matches_row(tensors, row, values)

    def stacks(self) -> tuple[dict[int, list[Frame]], list[str]]:
        """All stacks by number, and what is wrong with their file."""
        return self._stacks

    @cached_property
    def _stacks(self) -> tuple[dict[int, list[Frame]], list[str]]:
        file = self._folder / STACKS_FILE
        expected = self.end.stacks if self.end is not None else None
        try:
            lines = safe_paths.read_file(file, self._home, MOST_LINES).splitlines()
        except FileNotFoundError:
            return {}, [f"{file} is missing; it had {counted(expected, 'stack')}."] if expected else []
        except OSError as error:
            return {}, [f"{file} cannot be read: {error.strerror}. From where calls were made is not known."]
        except RunError as error:
            return {}, [f"{error} From where calls were made is not known."]
        read = list(map(_read_stack, lines))
        stacks = dict(filter(None, read))
        unread = read.count(None)
        if unread and not (unread == 1 and read[-1] is None and self.end is None):  # the last may be cut by a kill
            return stacks, [f"{file}: {unread:,} of {counted(len(lines), 'line')} cannot be read."]
        if expected is not None and len(stacks) < expected:
            return stacks, [f"{file} has {counted(len(stacks), 'stack')}; {expected:,} were recorded."]
        return stacks, []

    def _read_end(self) -> End | None:
        file = self._folder / END_FILE
        if not os.path.lexists(file):
            self.problems.append(f"{self._folder} has no {END_FILE}: {NOT_ENDED}.")
            return None
        try:
            end = read_json(file, End, self._home)
        except RunError as error:
            self.problems.append(str(error))
            return None
        if end.failure is not None:
            self.problems.append(end.failure if end.failure.endswith(".") else f"{end.failure}.")
        if end.ended != "normally":
            self.problems.append(f"The program recorded in {self._folder} ended {_ending(end.ended)}.")
        return end

    def _table(self, name: str, columns: tuple[Column, ...]) -> tuple[Table, list[str]]:
        file = self._folder / f"{name}.arrows"
        try:
            read = read_table(file, columns, self._home)
        except RunError as error:
            return empty_table(columns), [f"{error} None of its {name} are there."]
        except OSError as error:
            return empty_table(columns), [f"{file} cannot be read: {error.strerror}. None of its {name} are there."]
        problems = []
        if read.problem is not None:
            problems.append(f"{file} cannot be read in full: {read.problem}.")
        elif read.unread:
            problems.append(
                f"{file} is cut: {len(read.table):,} {name} were read, the last {read.unread:,} of "
                f"{read.size:,} bytes were not."
            )
        problems += self._compare_with_end(name, len(read.table), bool(problems))
        return read.table, problems

    def _compare_with_end(self, name: str, rows: int, known: bool) -> list[str]:
        """A file cut exactly between two batches looks whole; `end.json` says how many rows there were."""
        expected = rows if self.end is None else getattr(self.end, name)
        if rows == expected or known:
            return []
        return [f"{self._folder / name}.arrows has {rows:,} {name}; {expected:,} were recorded."]


def _read_stack(line: bytes) -> tuple[int, list[Frame]] | None:
    """A stack and its number; None for a line cut by a kill, to which no written call refers."""
    try:
        entry = msgspec.json.decode(line, type=_StackLine)
    except (ValueError, RecursionError):
        return None
    return entry.id, entry.frames


def _read_setup(line: bytes) -> Setup | None:
    """A setting of the program; None where the line is damaged."""
    try:
        entry = parse_json(line.decode())
        row = Setup(entry["step"], entry["subject"], entry["site"], entry["values"])
    except (ValueError, KeyError, TypeError):
        return None
    is_valid = type(row.step) is int and isinstance(row.subject, str) and isinstance(row.site, str)
    return row if is_valid and isinstance(row.values, dict) else None


def _ending(ended: str) -> str:
    return ended if ended.startswith("without") else f"with {ended}"
