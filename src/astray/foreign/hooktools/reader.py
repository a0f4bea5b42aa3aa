"""Opens a dump as a run.

Files of ours say what each call was, in which order calls started, and which was inside which. Those of hooktools
itself have a module's repr at most, so sites are what is there, and calls come in the order in which they ended.
Nothing is unpickled: files are read as data, and what only running code could make is named.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from astray.checkpoints.stored_tensor import CheckpointContents, Files, Stored, Unread, printable, read_whole
from astray.checkpoints.torch_files import open_any
from astray.errors import CheckpointError, RunError
from astray.foreign.dump_rows import DumpRank, DumpRows, DumpSource, ValueLocation
from astray.foreign.hooktools.files import (
    CLASSES,
    INDEX,
    PARTS,
    CallFile,
    Numbering,
    file_name,
    files_in,
    role_of,
    runs_in,
    unwrap,
)
from astray.records import Kind, Role
from astray.store import safe_paths as enclosure
from astray.store.run import RunData
from astray.store.run_info import RunInfo
from astray.wording import counted

MOST_TOLD = 10
"""So many files that cannot be read are named one by one."""

LATE: dict[str, Role | None] = {"forward": "output", "backward": "output", "gradient": None}
"""Of each phase, the role of the tensors that are seen when a call ends."""


def open_dump(path: Path) -> RunData:
    """Open a log_dir, a run in it, or any folder inside of that.

    Raises RunError when no file in it can be read, or it holds several runs.
    """
    folders = runs_in(path)
    files = {rank: files_in(folder) for rank, folder in folders.items()}
    gaps = [text for rank, folder in folders.items() for text in _gaps(folder, files[rank])]
    return open_files(path, files, Numbering(file.label for found in files.values() for file in found), gaps)


def open_files(
    path: Path, files: Mapping[int, Sequence[CallFile]], number: Numbering, problems: list[str] | None = None
) -> RunData:
    """Some files of a dump as a run, its steps numbered as told. `path` is what the run is called, and no more."""
    opened = Files()
    ranks = {rank: _open_rank(rank, path, found, number, opened) for rank, found in files.items()}
    settings = {"format": "hooktools", "steps": number.described, "epochs": number.epochs}
    info = RunInfo(
        astray="", created=_modified(path), framework="torch", world_size=max(ranks, default=0) + 1, settings=settings
    )
    return RunData(path, info, dict(ranks), problems)


class HooktoolsRank(DumpRank):
    """One rank, which knows the file of each call."""

    def __init__(self, rank: int, source: DumpSource, files: list[Path]) -> None:
        super().__init__(rank, source)
        self.files = files
        """Of each row of `calls`, its file."""


def _open_rank(rank: int, path: Path, files: Sequence[CallFile], number: Numbering, opened: Files) -> HooktoolsRank:
    rows, placed = DumpRows(), list[Path]()
    steps: dict[int, list[SavedCall]] = {}
    damaged: list[tuple[CallFile, str]] = []
    for file in files:
        try:
            saved = read_file(file, opened)
        except CheckpointError as error:
            damaged.append((file, str(error)))
            continue
        steps.setdefault(number[file.label], []).append(saved)
    for step, calls in sorted(steps.items()):
        _StepReader(rows, step, opened, placed).gather(calls)
    if damaged and not steps:
        raise RunError(f"None of the {counted(len(damaged), 'file')} in {path} can be read. {damaged[0][1]}")
    for text in _told(path, damaged):
        rows.problem(text)
    for text, count in Counter(one for calls in steps.values() for saved in calls for one in saved.problems).items():
        rows.problem(text if count == 1 else f"{text} So it is {count:,} times.")
    return HooktoolsRank(rank, rows.source(complete=not damaged), placed)


class _StepReader:
    """Puts the calls of a step into rows, in the order in which their tensors were seen."""

    def __init__(self, rows: DumpRows, step: int, opened: Files, placed: list[Path]) -> None:
        self._rows, self._step, self._opened, self._placed = rows, step, opened, placed
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: dict[int, int] = {}  # the row of a call by what its file says of its order
        self._open: list[tuple[int, int, SavedCall]] = []  # forward calls whose outputs come later: order, row, file

    def gather(self, calls: list[SavedCall]) -> None:
        """Add every call."""
        for saved in sorted(calls, key=_order):
            order, parent = saved.number("seq"), saved.number("parent")
            is_forward = saved.file.phase == "forward"
            self._close_until(parent if is_forward else None)
            seq = self._call(saved, None if parent is None else self._known.get(parent))
            self._tensors(seq, saved, late=False)
            if order is not None:
                self._known[order] = seq
            if order is not None and is_forward:
                self._open.append((order, seq, saved))
            else:
                self._tensors(seq, saved, late=True)
        self._close_until(None)

    def _close_until(self, order: int | None) -> None:
        """Calls that had ended by the time another one inside `order` started: their outputs were seen before it."""
        while self._open and self._open[-1][0] != order:
            _, seq, saved = self._open.pop()
            self._tensors(seq, saved, late=True)

    def _call(self, saved: SavedCall, parent: int | None) -> int:
        said = saved.ours or {}
        backward = saved.file.phase != "forward"
        number = saved.number("call")
        if number is None:
            number = self._counts[saved.file.phase, saved.site]
            self._counts[saved.file.phase, saved.site] += 1
        self._placed.append(saved.file.path)
        args = said.get("args")
        return self._rows.call(
            saved.site,
            saved.type,
            step=self._step,
            micro=saved.number("micro") or 0,
            kind=saved.kind,
            call=number,
            phase="backward" if backward else "forward",
            parent=parent,
            args=args if isinstance(args, str) else None,
            recompute=said.get("recompute") is True,
        )

    def _tensors(self, seq: int, saved: SavedCall, *, late: bool) -> None:
        """Add the tensors that were seen when the call started, or `late`: when it ended."""
        at_end = LATE[saved.file.phase]
        for role, path, name, stored in saved.tensors:
            if (role == at_end) is late:
                place = f"{saved.file.path} ({printable(name)})"
                values = ValueLocation(place, partial(read_whole, stored, self._opened), stored.spec.nbytes)
                self._rows.tensor(seq, role, path, stored.spec.dtype, stored.spec.shape, values=values)


def _order(saved: SavedCall) -> tuple[int, int, int]:
    """Where in its step a call comes: as its file says, else by phase and number."""
    order = saved.number("seq")
    phase = list(PARTS).index(saved.file.phase)
    return (0, order, phase) if order is not None else (1, phase, saved.file.number)


def _gaps(folder: Path, files: Sequence[CallFile]) -> Iterator[str]:
    """Which files are missing: those of a phase are numbered from 0 on, through all epochs and steps."""
    if not any(file.path.parent.parent.parent.is_relative_to(folder) for file in files):
        return  # an epoch or a step, whose numbers begin anywhere
    for phase in PARTS:
        numbers = {file.number for file in files if file.phase == phase}
        missing = max(numbers) + 1 - len(numbers) if numbers else 0
        if missing:
            first = next(number for number in range(len(numbers) + 1) if number not in numbers)
            yield f"{counted(missing, 'file')} of {folder} are not there, the first of them {file_name(phase, first)}."


def _told(path: Path, damaged: list[tuple[CallFile, str]]) -> Iterator[str]:
    """Which files cannot be read, and of which modules they are where that is written down."""
    if not damaged:
        return
    modules = _modules(path)
    for file, why in damaged[:MOST_TOLD]:
        module = modules.get(_tail(file.path))
        yield why + (f" It is the {file.phase} of {printable(module)}." if module else "")
    if len(damaged) > MOST_TOLD:
        yield f"{len(damaged) - MOST_TOLD:,} more files of {path} cannot be read."


def _modules(path: Path) -> dict[str, str]:
    """The module of each file, from the JSON in the folder that was opened, if there is one."""
    found: dict[str, str] = {}
    for entry in enclosure.entries(path) if path.is_dir() else ():
        if entry.name.startswith(INDEX) and entry.suffix == ".json":
            try:
                said = json.loads(enclosure.text(entry))
            except (RunError, ValueError, RecursionError):
                continue
            for module, paths in said.items() if isinstance(said, dict) else ():
                listed = paths if isinstance(paths, list) else []
                found |= {_tail(Path(one)): module for one in listed if isinstance(one, str)}
    return found


def _tail(path: Path) -> str:
    """What a file's path has in common with the one that was written down, wherever the dump was moved."""
    return "/".join(path.parts[-5:])


def _modified(path: Path) -> str:
    stamp = path.stat().st_mtime if path.exists() else 0.0
    return datetime.datetime.fromtimestamp(stamp, datetime.timezone.utc).isoformat(timespec="seconds")


# -- one file ----------------------------------------------------------------------------------------------------------

LONGEST_NAME = 100
"""A module's repr beyond this is cut: that of a whole model has thousands of lines."""

KINDS = ("module", "function", "op", "parameter", "collective", "custom")

WAY_OUT = (
    "Where such objects can be loaded, put plain tensors in their place: data = torch.load(file, weights_only=False), "
    "then torch.save({'module_name': data.module_name, 'input': data.input, 'output': …}, file)."
)


class SavedCall(NamedTuple):
    """One file, read: the call, and where its tensors lie."""

    file: CallFile
    kind: Kind
    site: str
    type: str
    tensors: list[tuple[Role, str, str, Stored]]  # role, path, name in the file
    ours: Mapping[str, Any] | None  # what a file of ours says besides
    problems: list[str]

    def number(self, name: str) -> int | None:
        """A number that a file of ours says; None when it does not, or it is none that can be."""
        value = (self.ours or {}).get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def read_file(file: CallFile, opened: Files) -> SavedCall:
    """What a file holds. Raises CheckpointError when it cannot be read."""
    contents = open_any(file.path, opened, unwrap)
    others = contents.others
    name = others.get("module_name")
    if not isinstance(name, str):
        raise CheckpointError(_no_call(file, contents))
    ours = others if isinstance(others.get("astray"), int) else None
    kind, site, type = _named(name, file, others) if ours is None else _as_told(name, others)
    tensors, strange = list[tuple[Role, str, str, Stored]](), list[str]()
    for full, stored in contents.tensors.items():
        place = role_of(file.phase, _as_now(full, file, contents) if ours is None else full)
        if place is None:
            strange.append(full.partition(".")[0])
        else:
            tensors.append((*place, full, stored))
    problems = [
        f"Files such as {file.path} hold {printable(part)!r}, which is no part of a call, and is not read."
        for part in dict.fromkeys(strange)
    ]
    for full, other in others.items():
        if isinstance(other, Unread) and other.tensors:
            problems.append(f"{printable(full)} of {printable(site)} is {other}. {WAY_OUT}")
    return SavedCall(file, kind, site, type, tensors, ours, problems)


def _as_now(full: str, file: CallFile, contents: CheckpointContents) -> str:
    """The name of a tensor in a file of hooktools as ours would have it.

    Gradients came in a tuple, even the one gradient of a lone output: that is the output itself.
    """
    if file.phase != "backward" or full != "output.0":
        return full
    several = sum(name.startswith("output.") for name in (*contents.tensors, *contents.others)) > 1
    return full if several else "output"


def _as_told(name: str, said: Mapping[str, Any]) -> tuple[Kind, str, str]:
    kind = said.get("kind")
    type = said.get("module_type")
    return cast(Kind, kind if kind in KINDS else "module"), name, type if isinstance(type, str) else ""


def _named(name: str, file: CallFile, said: Mapping[str, object]) -> tuple[Kind, str, str]:
    """What a call was, from what hooktools wrote: a repr, the full name of a function, or that of a parameter."""
    if file.phase == "gradient":
        return "parameter", name, "Parameter"
    if "(" not in name and said.get("classify") != CLASSES["module"]:
        return "function", f"/{name.rpartition('.')[2]}", name
    line = " ".join(name.split())
    if len(line) > LONGEST_NAME:  # the rest tells it from others that begin alike
        line = f"{line[:LONGEST_NAME]}… {zlib.crc32(name.encode(errors='replace')):08x}"
    return "module", printable(line, 2 * LONGEST_NAME), name.partition("(")[0]


def _no_call(file: CallFile, contents: CheckpointContents) -> str:
    for what in contents.others.values():
        if isinstance(what, Unread) and what.why:
            return f"{file.path} holds {what}. {WAY_OUT}"
    return f"{file.path} holds no call of hooktools: it has no module_name."
