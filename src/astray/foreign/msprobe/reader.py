"""Opens a dump of msprobe as a run.

An entry's tensors are told in the order in which they were seen: its inputs before whatever lies in it (construct.json
says what that is), its outputs where dump.json has the entry, which is after it. What the dump does not tell, such as
the module around a function at level L1, is not made up.

msprobe writes a tensor as soon as it sees it and its JSON files now and then: a program that was killed leaves files
that no entry mentions. Entries are made from their names (`entries_of`).
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
    form,
    places,
    read_construct,
    read_document,
    read_stacks,
)
from astray.foreign.msprobe.leaves import Tensors
from astray.foreign.msprobe.names import parse
from astray.foreign.msprobe.steps import EntryFacts, StepReader
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
        found, _ = places(folder)
    except RunError:
        return False
    return any(one.folder != folder or _looks_like_a_rank(folder) for one in found)


def _folder(path: Path) -> Path:
    """The folder that is meant: msprobe's users give the dump.json in it."""
    return path.parent if path.name in ("dump.json", "debug.json") and path.is_file() else path


def _looks_like_a_rank(folder: Path) -> bool:
    """Whether the folder of a rank is msprobe's: others may have a debug.json, too."""
    return (folder / DATA).is_dir() or any(b'"task"' in _start(folder / name) for name in ("dump.json", "debug.json"))


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError:
        return b""


def open_dump(path: Path) -> RunData:
    """Open a dump: the folder that was given as `dump_path`, that of one of its steps or ranks, or a rank's dump.json.

    Raises RunError when there is nothing of a dump. What is cut or damaged is said in the run's problems.
    """
    path = _folder(path)
    found, problems = places(path)
    if not found:
        raise RunError(f"{path} is no dump of msprobe: it has no step0/rank0 with a dump.json in it.")
    reader = _DumpReader()
    ranks: dict[int, RankRun] = {}
    for rank in sorted({place.rank for place in found}):
        ranks[rank] = reader.rank(rank, [place for place in found if place.rank == rank])
    return RunData(path, reader.info(found, len(ranks)), ranks, problems)


class MsprobeRank(DumpRank):
    """One rank of a dump. `entries` has the name of each call's entry, by the call's number, as the dump has it."""

    def __init__(self, rank: int, source: RankSource, entries: dict[int, str]) -> None:
        super().__init__(rank, source)
        self.entries = entries


class _DumpReader:
    """Reads the ranks of a dump, and remembers what the dump says of itself."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}

    def rank(self, rank: int, steps: list[StepFolder]) -> RankRun:
        rows = DumpRows()
        entries: dict[int, str] = {}
        checksums: set[str] = set()
        complete = True
        for place in sorted(steps):
            try:
                complete &= self._step(rows, place, entries, checksums)
            except RunError as error:  # noqa: PERF203 - a step that cannot be read leaves the others
                rows.problem(str(error))
                complete = False
        ended = "normally" if complete else "in the middle of writing its dump"
        found = MsprobeRank(rank, rows.source(complete=complete, ended=ended), entries)
        if checksums:
            found.fingerprints = f"{NAME} {' and '.join(sorted(checksums))}"
        return found

    def _step(self, rows: DumpRows, place: StepFolder, entries: dict[int, str], checksums: set[str]) -> bool:
        documents = {name: self._document(rows, place.folder, name) for name in FILES}
        said = {name: {} if one is None else one.content for name, one in documents.items()}
        if all(one is None for one in documents.values()) and not (place.folder / DATA).is_dir():
            raise RunError(f"{place.folder} has no dump.json, and nothing else of a dump that can be read.")
        for head in (said["debug.json"], said["dump.json"]):
            self._heads |= {key: head[key] for key in ("task", "level", "framework") if isinstance(head.get(key), str)}
        tensors = Tensors(rows, place.folder)
        reader = StepReader(rows, tensors, self._told(said), place.step)
        reader.read(_data(rows, place.folder / "dump.json", said["dump.json"]))
        reader.read_saved(_data(rows, place.folder / "debug.json", said["debug.json"]))
        left = tensors.left()
        if left:
            reader.read(entries_of(left, place.folder, rows, reader.known), late=True)
        reader.close()
        entries |= reader.entries
        tensors.close()
        checksums |= tensors.checksums
        return not left and all(one is None or one.whole for one in documents.values())

    def _document(self, rows: DumpRows, folder: Path, name: str) -> Document | None:
        try:
            found = read_document(folder, name)
        except RunError as error:
            rows.problem(str(error))
            return None
        if found is not None and not found.whole:
            data = found.content.get("data", {}) if name in ("dump.json", "debug.json") else found.content
            entries = len(data) if isinstance(data, dict) else 0
            rows.problem(
                f"{folder / name} was cut in the middle: the {entries:,} entries before the cut were read, the rest "
                "is lost."
            )
        return found

    def _told(self, said: dict[str, dict[str, Any]]) -> EntryFacts:
        parents, micros = read_construct(said["construct.json"])
        beside: dict[str, Any] = {}
        by_us = False
        for name in ("dump.json", "debug.json"):
            ours = said[name].get("astray")
            if isinstance(ours, dict):
                by_us = True
                beside |= ours["entries"] if isinstance(ours.get("entries"), dict) else {}
        framework = said["dump.json"].get("framework")
        stacks = read_stacks(said["stack.json"])
        return EntryFacts(
            parents, micros, stacks, beside, by_us, framework if isinstance(framework, str) else "pytorch"
        )

    def info(self, found: list[StepFolder], ranks: int) -> RunInfo:
        """What is known of the dump as a whole."""
        times = [_changed(place.folder) for place in found]
        framework = self._heads.get("framework", "pytorch")
        settings = {"format": NAME} | {key: self._heads[key] for key in ("task", "level") if key in self._heads}
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


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


# -- files of tensors that dump.json does not mention ------------------------------------------------------------------

_OF_CALL = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?)\.(input|output|kwargs|parameters)\.(.+)\.(?:pt|npy)")
_GRADIENT = re.compile(r"(.+\.parameters_grad(?:\.\d+)?)\.(.+)\.(?:pt|npy)")


def entries_of(files: list[str], folder: Path, rows: DumpRows, known: Container[str]) -> dict[str, dict[str, Any]]:
    """The entries that these files belong to, without those that are known. What is odd becomes a problem of `rows`."""
    found: dict[str, dict[str, Any]] = {}
    unread = added = 0
    for file in files:
        place = _place(file)
        if place is None or place[0] in known or parse(place[0]) is None:
            unread += 1
            continue
        name, group, path = place
        try:
            leaf = form(folder / DATA / file)
        except RunError as error:
            rows.problem(str(error))
            continue
        added += 1
        found.setdefault(name, {}).setdefault(group, {})[path] = leaf
    if added:
        rows.problem(
            f"{folder / 'dump.json'} does not tell of {counted(added, 'file')} in {DATA}: the program was stopped "
            f"before it had written that. {counted(len(found), 'call')} were made from their names."
        )
    if unread:
        rows.problem(f"{folder / DATA} holds {counted(unread, 'file')} of no entry, left out.")
    return found


def _place(file: str) -> tuple[str, str, str] | None:
    """The entry, the group of its tensors and the path in it that a file's name tells."""
    if match := _OF_CALL.fullmatch(file):
        name, group, path = match.groups()
        backward = ".backward" in name
        groups = {"input": "input" if backward else "input_args", "kwargs": "input_kwargs"}
        return name, groups.get(group, group), path
    if match := _GRADIENT.fullmatch(file):
        return match[1], match[2], "0"
    return None
