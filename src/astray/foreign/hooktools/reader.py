"""Opens a dump as a run.

Files that astray wrote have each call's site, the order in which calls started, and their parents. Files of hooktools
itself have at most a module's repr, which becomes the site, and their calls are in the order in which they ended.
Nothing
is unpickled: files are read as data, and objects that only running code could make are reported.
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
from astray.store import safe_paths
from astray.store.run import RunData
from astray.store.run_info import RunInfo
from astray.wording import counted

MOST_REPORTED = 10
"""How many unreadable files are reported one by one; the rest is counted."""

ROLE_AT_END: dict[str, Role | None] = {"forward": "output", "backward": "output", "gradient": None}
"""Of each phase, the role of the tensors that are observed when a call ends."""


def open_dump(path: Path) -> RunData:
    """Open a log_dir, a run in it, or any folder inside of that.

    Raises RunError when no file in it can be read, or it holds several runs.
    """
    folders = runs_in(path)
    files = {rank: files_in(folder) for rank, folder in folders.items()}
    gaps = [text for rank, folder in folders.items() for text in _gaps(folder, files[rank])]
    return open_files(path, files, Numbering(file.label for of_rank in files.values() for file in of_rank), gaps)


def open_files(
    path: Path, files: Mapping[int, Sequence[CallFile]], numbering: Numbering, problems: list[str] | None = None
) -> RunData:
    """Some files of a dump as a run, with its steps by `numbering`. `path` is only the name of the run."""
    opened = Files()
    ranks = {rank: _open_rank(rank, path, of_rank, numbering, opened) for rank, of_rank in files.items()}
    settings = {"format": "hooktools", "steps": numbering.described, "epochs": numbering.epochs}
    info = RunInfo(
        astray="", created=_modified(path), framework="torch", world_size=max(ranks, default=0) + 1, settings=settings
    )
    return RunData(path, info, dict(ranks), problems)


class HooktoolsRank(DumpRank):
    """One rank. `files` has the file of each row of `calls`."""

    def __init__(self, rank: int, source: DumpSource, files: list[Path]) -> None:
        super().__init__(rank, source)
        self.files = files


def _open_rank(rank: int, path: Path, files: Sequence[CallFile], numbering: Numbering, opened: Files) -> HooktoolsRank:
    rows, call_files = DumpRows(), list[Path]()
    steps: dict[int, list[DumpedCall]] = {}
    damaged: list[tuple[CallFile, str]] = []
    for file in files:
        try:
            call = read_file(file, opened)
        except CheckpointError as error:
            damaged.append((file, str(error)))
            continue
        steps.setdefault(numbering[file.label], []).append(call)
    for step, calls in sorted(steps.items()):
        _StepBuilder(rows, step, opened, call_files).add(calls)
    if damaged and not steps:
        raise RunError(f"None of the {counted(len(damaged), 'file')} in {path} can be read. {damaged[0][1]}")
    for text in _describe_damaged(path, damaged):
        rows.problem(text)
    problems = Counter(problem for calls in steps.values() for call in calls for problem in call.problems)
    for text, count in problems.items():
        rows.problem(text if count == 1 else f"{text} So it is {count:,} times.")
    return HooktoolsRank(rank, rows.source(complete=not damaged), call_files)


class _StepBuilder:
    """Adds the calls of a step to the rows, in the order in which their tensors were observed."""

    def __init__(self, rows: DumpRows, step: int, opened: Files, call_files: list[Path]) -> None:
        self._rows, self._step, self._opened, self._call_files = rows, step, opened, call_files
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seqs: dict[int, int] = {}  # the number of a call in the rows by that in its file
        self._open: list[
            tuple[int, int, DumpedCall]
        ] = []  # forward calls whose outputs come later: number in the file, in the rows

    def add(self, calls: list[DumpedCall]) -> None:
        """Add every call."""
        for call in sorted(calls, key=_order):
            order, parent = call.number("seq"), call.number("parent")
            is_forward = call.file.phase == "forward"
            self._close_until(parent if is_forward else None)
            seq = self._call(call, None if parent is None else self._seqs.get(parent))
            self._tensors(seq, call, at_end=False)
            if order is not None:
                self._seqs[order] = seq
            if order is not None and is_forward:
                self._open.append((order, seq, call))
            else:
                self._tensors(seq, call, at_end=True)
        self._close_until(None)

    def _close_until(self, order: int | None) -> None:
        """Add the outputs of the calls that ended before a call inside of `order` started."""
        while self._open and self._open[-1][0] != order:
            _, seq, call = self._open.pop()
            self._tensors(seq, call, at_end=True)

    def _call(self, saved: DumpedCall, parent: int | None) -> int:
        extras = saved.extras or {}
        backward = saved.file.phase != "forward"
        number = saved.number("call")
        if number is None:
            number = self._counts[saved.file.phase, saved.site]
            self._counts[saved.file.phase, saved.site] += 1
        self._call_files.append(saved.file.path)
        args = extras.get("args")
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
            recompute=extras.get("recompute") is True,
        )

    def _tensors(self, seq: int, saved: DumpedCall, *, at_end: bool) -> None:
        """Add the tensors that were observed when the call started, or those when it ended."""
        role_at_end = ROLE_AT_END[saved.file.phase]
        for role, path, name, stored in saved.tensors:
            if (role == role_at_end) is at_end:
                place = f"{saved.file.path} ({printable(name)})"
                values = ValueLocation(place, partial(read_whole, stored, self._opened), stored.spec.nbytes)
                self._rows.tensor(seq, role, path, stored.spec.dtype, stored.spec.shape, values=values)


def _order(saved: DumpedCall) -> tuple[int, int, int]:
    """The position of a call in its step: by its file's own number, otherwise by phase and number of the file."""
    order = saved.number("seq")
    phase = list(PARTS).index(saved.file.phase)
    return (0, order, phase) if order is not None else (1, phase, saved.file.number)


def _gaps(folder: Path, files: Sequence[CallFile]) -> Iterator[str]:
    """Sentences about missing files: those of a phase are numbered from 0 on, through all epochs and steps."""
    if not any(file.path.parent.parent.parent.is_relative_to(folder) for file in files):
        return  # the folder of an epoch or a step, whose numbers do not begin at 0
    for phase in PARTS:
        numbers = {file.number for file in files if file.phase == phase}
        missing = max(numbers) + 1 - len(numbers) if numbers else 0
        if missing:
            first = next(number for number in range(len(numbers) + 1) if number not in numbers)
            yield f"{counted(missing, 'file')} of {folder} are not there, the first of them {file_name(phase, first)}."


def _describe_damaged(path: Path, damaged: list[tuple[CallFile, str]]) -> Iterator[str]:
    """Sentences about files that cannot be read, with their modules where the index has them."""
    if not damaged:
        return
    modules = _modules(path)
    for file, why in damaged[:MOST_REPORTED]:
        module = modules.get(_tail(file.path))
        yield why + (f" It is the {file.phase} of {printable(module)}." if module else "")
    if len(damaged) > MOST_REPORTED:
        yield f"{len(damaged) - MOST_REPORTED:,} more files of {path} cannot be read."


def _modules(path: Path) -> dict[str, str]:
    """The module of each file, from the index in the opened folder, if there is one."""
    modules: dict[str, str] = {}
    for entry in safe_paths.entries(path) if path.is_dir() else ():
        if entry.name.startswith(INDEX) and entry.suffix == ".json":
            try:
                index = json.loads(safe_paths.read_text_file(entry))
            except (RunError, ValueError, RecursionError):
                continue
            for module, paths in index.items() if isinstance(index, dict) else ():
                listed = paths if isinstance(paths, list) else []
                modules |= {_tail(Path(file)): module for file in listed if isinstance(file, str)}
    return modules


def _tail(path: Path) -> str:
    """The end of a file's path, which stays the same when the dump is moved."""
    return "/".join(path.parts[-5:])


def _modified(path: Path) -> str:
    stamp = path.stat().st_mtime if path.exists() else 0.0
    return datetime.datetime.fromtimestamp(stamp, datetime.timezone.utc).isoformat(timespec="seconds")


# -- one file ----------------------------------------------------------------------------------------------------------

LONGEST_NAME = 100
"""The most characters of a module's repr: that of a whole model has thousands of lines."""

KINDS = ("module", "function", "op", "parameter", "collective", "custom")

SUGGESTION = (
    "Where such objects can be loaded, put plain tensors in their place: data = torch.load(file, weights_only=False), "
    "then torch.save({'module_name': data.module_name, 'input': data.input, 'output': …}, file)."
)


class DumpedCall(NamedTuple):
    """The content of one file: the call, and the locations of its tensors."""

    file: CallFile
    kind: Kind
    site: str
    type: str
    tensors: list[tuple[Role, str, str, Stored]]  # role, path, name in the file
    extras: Mapping[str, Any] | None  # the other keys of a file that astray wrote
    problems: list[str]

    def number(self, name: str) -> int | None:
        """A number in a file that astray wrote; None when it is missing or impossible."""
        value = (self.extras or {}).get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def read_file(file: CallFile, opened: Files) -> DumpedCall:
    """Read a file. Raises CheckpointError when it cannot be read."""
    contents = open_any(file.path, opened, unwrap)
    others = contents.others
    name = others.get("module_name")
    if not isinstance(name, str):
        raise CheckpointError(_no_call(file, contents))
    extras = others if isinstance(others.get("astray"), int) else None
    kind, site, type = _identify_original(name, file, others) if extras is None else _identify(name, others)
    tensors, unknown = list[tuple[Role, str, str, Stored]](), list[str]()
    for full, stored in contents.tensors.items():
        place = role_of(file.phase, _normalise(full, file, contents) if extras is None else full)
        if place is None:
            unknown.append(full.partition(".")[0])
        else:
            tensors.append((*place, full, stored))
    problems = [
        f"Files such as {file.path} hold {printable(part)!r}, which is not a part of a call, and is not read."
        for part in dict.fromkeys(unknown)
    ]
    for full, other in others.items():
        if isinstance(other, Unread) and other.tensors:
            problems.append(f"{printable(full)} of {printable(site)} is {other}. {SUGGESTION}")
    return DumpedCall(file, kind, site, type, tensors, extras, problems)


def _normalise(full: str, file: CallFile, contents: CheckpointContents) -> str:
    """The name of a tensor in a file of hooktools as in a file of astray.

    hooktools has gradients in a tuple, even the gradient of a single output; astray has that without the tuple.
    """
    if file.phase != "backward" or full != "output.0":
        return full
    several = sum(name.startswith("output.") for name in (*contents.tensors, *contents.others)) > 1
    return full if several else "output"


def _identify(name: str, content: Mapping[str, Any]) -> tuple[Kind, str, str]:
    """Kind, site and type of a call in a file that astray wrote."""
    kind = content.get("kind")
    type = content.get("module_type")
    return cast(Kind, kind if kind in KINDS else "module"), name, type if isinstance(type, str) else ""


def _identify_original(name: str, file: CallFile, content: Mapping[str, object]) -> tuple[Kind, str, str]:
    """Kind, site and type from hooktools' own name: a repr, the full name of a function, or that of a parameter."""
    if file.phase == "gradient":
        return "parameter", name, "Parameter"
    if "(" not in name and content.get("classify") != CLASSES["module"]:
        return "function", f"/{name.rpartition('.')[2]}", name
    line = " ".join(name.split())
    if len(line) > LONGEST_NAME:  # with a checksum, since others may begin alike
        line = f"{line[:LONGEST_NAME]}… {zlib.crc32(name.encode(errors='replace')):08x}"
    return "module", printable(line, 2 * LONGEST_NAME), name.partition("(")[0]


def _no_call(file: CallFile, contents: CheckpointContents) -> str:
    for what in contents.others.values():
        if isinstance(what, Unread) and what.why:
            return f"{file.path} holds {what}. {SUGGESTION}"
    return f"{file.path} holds no call of hooktools: it has no module_name."
