"""Opens a dump of msprobe as a run.

An entry's tensors become rows in the order of observation: its inputs before everything inside it (by construct.json),
its outputs where dump.json has the entry, which is after that. What the dump does not contain, such as the module
around a function at level L1, is not made up.

msprobe writes a tensor as soon as it sees it, but its JSON files only now and then: a program that was killed leaves
files that no entry mentions. Their entries are reconstructed from their names (`entries_of_files`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRank, DumpRows
from astray.foreign.msprobe.files import (
    DATA,
    FILES,
    Document,
    StepFolder,
    describe,
    read_construct,
    read_document,
    read_stacks,
    step_folders,
)
from astray.foreign.msprobe.leaves import LeafReader
from astray.foreign.msprobe.names import parse
from astray.foreign.msprobe.steps import EntryContext, StepReader
from astray.store.run import RankRun, RankSource, RunData
from astray.store.run_info import RunInfo
from astray.wording import counted

NAME = "msprobe"


def recognises(path: Path) -> bool:
    """Whether a folder is a dump, or one of its steps or ranks, by the names in it; or a dump.json in such a folder."""
    folder = _folder(path)
    if not folder.is_dir():
        return False
    try:
        folders, _ = step_folders(folder)
    except RunError:
        return False
    return any(step.folder != folder or _looks_like_a_rank(folder) for step in folders)


def _folder(path: Path) -> Path:
    """The folder of a dump.json or debug.json, which msprobe's users pass; any other path as it is."""
    return path.parent if path.name in ("dump.json", "debug.json") and path.is_file() else path


def _looks_like_a_rank(folder: Path) -> bool:
    """Whether the folder of a rank is msprobe's: other tools may write a debug.json, too."""
    return (folder / DATA).is_dir() or any(
        b'"task"' in _first_bytes(folder / name) for name in ("dump.json", "debug.json")
    )


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError:
        return b""


def open_dump(path: Path) -> RunData:
    """Open a dump: the folder that was given as `dump_path`, that of one of its steps or ranks, or a rank's dump.json.

    Raises RunError when there is no dump. What is cut or damaged is listed in the run's problems.
    """
    path = _folder(path)
    folders, problems = step_folders(path)
    if not folders:
        raise RunError(f"{path} is not a dump of msprobe: it has no step0/rank0 with a dump.json in it.")
    reader = _DumpReader()
    ranks: dict[int, RankRun] = {}
    for rank in sorted({step.rank for step in folders}):
        ranks[rank] = reader.rank(rank, [step for step in folders if step.rank == rank])
    return RunData(path, reader.info(folders, len(ranks)), ranks, problems)


class MsprobeRank(DumpRank):
    """One rank of a dump. `entries` has the name of each call's entry in the dump, by the call's number."""

    def __init__(self, rank: int, source: RankSource, entries: dict[int, str]) -> None:
        super().__init__(rank, source)
        self.entries = entries


class _DumpReader:
    """Reads the ranks of a dump, and keeps the header of its JSON files."""

    def __init__(self) -> None:
        self._header: dict[str, str] = {}

    def rank(self, rank: int, steps: list[StepFolder]) -> RankRun:
        rows = DumpRows()
        entries: dict[int, str] = {}
        checksums: set[str] = set()
        complete = True
        for step_folder in sorted(steps):
            try:
                complete &= self._step(rows, step_folder, entries, checksums)
            except RunError as error:  # noqa: PERF203 - a step that cannot be read leaves the others
                rows.problem(str(error))
                complete = False
        ended = "normally" if complete else "in the middle of writing its dump"
        run = MsprobeRank(rank, rows.source(complete=complete, ended=ended), entries)
        if checksums:
            run.fingerprints = f"{NAME} {' and '.join(sorted(checksums))}"
        return run

    def _step(self, rows: DumpRows, step_folder: StepFolder, entries: dict[int, str], checksums: set[str]) -> bool:
        """Read one step. Returns whether it is complete."""
        folder = step_folder.folder
        documents = {name: self._document(rows, folder, name) for name in FILES}
        contents = {name: {} if document is None else document.content for name, document in documents.items()}
        if all(document is None for document in documents.values()) and not (folder / DATA).is_dir():
            raise RunError(f"{folder} has no dump.json, and nothing else of a dump that can be read.")
        for content in (contents["debug.json"], contents["dump.json"]):
            self._header |= {
                key: content[key] for key in ("task", "level", "framework") if isinstance(content.get(key), str)
            }
        tensors = LeafReader(rows, folder)
        reader = StepReader(rows, tensors, self._context(contents), step_folder.step)
        reader.read(_data(rows, folder / "dump.json", contents["dump.json"]))
        reader.read_saved(_data(rows, folder / "debug.json", contents["debug.json"]))
        unmentioned = tensors.unmentioned()
        if unmentioned:
            reader.read(entries_of_files(unmentioned, folder, rows, reader.known), late=True)
        reader.close()
        entries |= reader.entries
        tensors.close()
        checksums |= tensors.checksums
        return not unmentioned and all(document is None or document.is_whole for document in documents.values())

    def _document(self, rows: DumpRows, folder: Path, name: str) -> Document | None:
        try:
            document = read_document(folder, name)
        except RunError as error:
            rows.problem(str(error))
            return None
        if document is not None and not document.is_whole:
            content = document.content
            data = content.get("data", {}) if name in ("dump.json", "debug.json") else content
            entries = len(data) if isinstance(data, dict) else 0
            rows.problem(
                f"{folder / name} was cut in the middle: the {entries:,} entries before the cut were read, the rest "
                "is lost."
            )
        return document

    def _context(self, contents: dict[str, dict[str, Any]]) -> EntryContext:
        parents, micros = read_construct(contents["construct.json"])
        extras: dict[str, Any] = {}
        by_astray = False
        for name in ("dump.json", "debug.json"):
            section = contents[name].get("astray")
            if isinstance(section, dict):
                by_astray = True
                extras |= section["entries"] if isinstance(section.get("entries"), dict) else {}
        framework = contents["dump.json"].get("framework")
        stacks = read_stacks(contents["stack.json"])
        return EntryContext(
            parents, micros, stacks, extras, by_astray, framework if isinstance(framework, str) else "pytorch"
        )

    def info(self, folders: list[StepFolder], ranks: int) -> RunInfo:
        """The facts about the dump as a whole."""
        times = [_modified(step.folder) for step in folders]
        framework = self._header.get("framework", "pytorch")
        settings = {"format": NAME} | {key: self._header[key] for key in ("task", "level") if key in self._header}
        return RunInfo(
            astray="",
            created=datetime.datetime.fromtimestamp(max(times), datetime.timezone.utc).isoformat(timespec="seconds"),
            framework="torch" if framework == "pytorch" else framework,
            world_size=ranks,
            settings=settings,
        )


def _data(rows: DumpRows, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    data = content.get("data", {})
    if isinstance(data, dict):
        return data
    rows.problem(f"{path} has a {type(data).__name__} under `data`, where msprobe has an object. It is not read.")
    return {}


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


# -- entries from files that dump.json does not mention ----------------------------------------------------------------

_OF_CALL = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?)\.(input|output|kwargs|parameters)\.(.+)\.(?:pt|npy)")
_GRADIENT = re.compile(r"(.+\.parameters_grad(?:\.\d+)?)\.(.+)\.(?:pt|npy)")


def entries_of_files(
    files: list[str], folder: Path, rows: DumpRows, known: Container[str]
) -> dict[str, dict[str, Any]]:
    """The entries that these files belong to, except known ones. Adds what cannot be read to the problems of `rows`."""
    made: dict[str, dict[str, Any]] = {}
    unread = added = 0
    for file in files:
        position = _position(file)
        if position is None or position[0] in known or parse(position[0]) is None:
            unread += 1
            continue
        name, group, path = position
        try:
            leaf = describe(folder / DATA / file)
        except RunError as error:
            rows.problem(str(error))
            continue
        added += 1
        made.setdefault(name, {}).setdefault(group, {})[path] = leaf
    if added:
        rows.problem(
            f"{folder / 'dump.json'} does not mention {counted(added, 'file')} in {DATA}: the program was stopped "
            f"before it had written that. {counted(len(made), 'call')} were made from their names."
        )
    if unread:
        rows.problem(f"{folder / DATA} holds {counted(unread, 'file')} of no entry, left out.")
    return made


def _position(file: str) -> tuple[str, str, str] | None:
    """The entry, the group of tensors and the path in it, from the name of a file."""
    if match := _OF_CALL.fullmatch(file):
        name, group, path = match.groups()
        backward = ".backward" in name
        groups = {"input": "input" if backward else "input_args", "kwargs": "input_kwargs"}
        return name, groups.get(group, group), path
    if match := _GRADIENT.fullmatch(file):
        return match[1], match[2], "0"
    return None
