"""Writes the rows of a recording as the files of hooktools: one for each call and phase, when it has ended.

Files are numbered in the order in which calls ended, which is the order of their first results; so two recordings of
one program have the same numbers, whatever the pieces in which rows come. Files are written atomically. Gradients of a
call may come in several pieces; then its file is read back and rewritten.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import Files, read_whole
from astray.checkpoints.torch_files import open_any
from astray.errors import RunExists
from astray.foreign.array_files import Nest, TorchTensor, write_torch_file
from astray.foreign.hooktools.files import (
    CLASSES,
    NOT_A_MODULE,
    FileSeries,
    Label,
    PathInFile,
    nest,
    path_in_file,
    plain_leaves,
)
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo

VERSION = 1
"""The version of the keys that astray adds to hooktools' own; in each file under `astray`."""

GRADIENTS = "ParameterGradient"
"""The type of the values that `trace_gradient` saves: a parameter and its gradient."""

STACKS = "the Python stack of a call"

HELD_BYTES = 64 << 20
"""How many bytes of values are held before files are written."""

Labels = Callable[[int], Label]
"""The program's epoch and step of a step of the recording."""


def translate(
    path: Path,
    rank: int,
    info: RunInfo,
    *,
    overwrite: bool,
    series: FileSeries | None = None,
    labels: Labels = lambda step: Label(0, step),
) -> HooktoolsTranslator:
    """A translator that writes a rank into a run inside the log_dir `path`.

    series: the run to continue; by default a new one, named after the time of the recording.
    labels: the epoch and step of each step of the recording; by default all are of epoch 0.
    """
    if series is None:
        series = FileSeries(path, "astray", _stamp(info.created))
    series.rank = rank if info.world_size > 1 else None
    if not series.counts and series.folder.exists():
        if not overwrite:
            raise RunExists(f"{series.folder} is there already. Choose another folder, or overwrite it.")
        shutil.rmtree(series.folder)
    return HooktoolsTranslator(series, labels)


def _stamp(created: str) -> int:
    try:
        return int(datetime.datetime.fromisoformat(created).timestamp())
    except (ValueError, OverflowError):
        return int(time.time())


@dataclass
class _PendingFile:
    """The file of a call, until nothing more of the call comes.

    facts: its plain keys. plain: arguments that are not tensors, by part of the file and path. tensors: likewise.
    path: once it has a number. is_new: changed since it was last written. is_loaded: False while the tensors are only
    in the file.
    """

    facts: dict[str, Any]
    phase: str
    label: Label
    seq: int
    parent: int | None
    plain: dict[str, dict[str, Nest]]
    tensors: dict[str, dict[str, TorchTensor | None]] = field(default_factory=dict)
    path: Path | None = None
    has_results: bool = False
    is_new: bool = True
    is_loaded: bool = True


class HooktoolsTranslator:
    """Writes one rank. It is a `Translator`."""

    def __init__(self, series: FileSeries, labels: Labels) -> None:
        self.lost: Counter[str] = Counter()
        self._series = series
        self._labels = labels
        self._files: dict[int, _PendingFile] = {}
        self._running: dict[int | None, dict[int, _PendingFile]] = {}  # forward calls without results, by parent
        self._skipped: set[int] = set()  # calls that get no file
        self._calls = 0
        self._micros: dict[Label, int] = {}
        self._first_call, self._first_micros = series.calls, dict(series.micros)  # after those of earlier recordings

    def take(self, step: int, rows: RankRun) -> None:
        """Write the calls that have ended, and hold the others."""
        touched: dict[int, _PendingFile] = {}
        for row in range(len(rows.calls)):
            call = rows.calls.row(row)
            file = self._new_file(step, call)
            if file is None:
                self._skipped.add(call["seq"])
                continue
            self._files[file.seq] = touched[file.seq] = file
            if file.phase == "forward":
                self._running.setdefault(file.parent, {})[file.seq] = file
        names, held = ("seq", "role", "path", "dtype"), 0
        for row, (seq, *cells) in enumerate(zip(*(rows.tensors[name].tolist() for name in names), strict=True)):
            pending = self._files.get(seq)
            if pending is not None:
                values = _values(rows, row)
                self._tensor(pending, *cells, values=values)
                touched[seq] = pending
                held += 0 if values is None else values.nbytes
                if held > HELD_BYTES:
                    self._write_or_copy(touched)
                    held = 0
            elif seq not in self._skipped:
                self.lost["a tensor of a call that has begun two steps before"] += 1
        self._write_or_copy(touched)

    def _write_or_copy(self, touched: dict[int, _PendingFile]) -> None:
        """Write calls that have ended, and copy the values of the others, which are only valid during `take`."""
        for file in touched.values():
            if file.has_results:
                self._write(file)
            else:
                _copy_values(file)
        touched.clear()

    def sync(self) -> None:
        """Write the index: every call that has ended is in its file already."""
        self._series.write_index()

    def end_step(self, step: int) -> None:  # noqa: ARG002 - of Translator
        """Write the calls that have not ended, or had no results, as they are."""
        for file in list(self._files.values()):
            if file.path is None and file.phase == "forward":
                self._write(file)
            else:  # a backward without any gradient gets no file
                del self._files[file.seq]
        self._skipped.clear()

    def close(self, end: End) -> None:  # noqa: ARG002
        """Write the rest."""
        self.end_step(0)
        self._series.add_recording(self._calls, self._micros)
        self._series.write_index()

    def _new_file(self, step: int, row: dict[str, Any]) -> _PendingFile | None:
        """The file of a call; None when hooktools has none for such calls."""
        label, kind = self._labels(step), row["kind"]
        if row["phase"] == "update" or kind == "optimizer":
            self.lost["a call of an optimizer"] += 1
            return None
        facts = {
            "astray": VERSION,
            "module_name": row["site"],
            "module_type": row["type"],
            "classify": CLASSES.get(kind, NOT_A_MODULE),
            "kind": kind,
            "call": row["call"],
            "args": row["args"],
        }
        if kind == "custom" and row["type"] == GRADIENTS:  # saved afterwards: not ordered among other calls
            facts |= {"module_type": "Parameter", "classify": CLASSES["parameter"], "kind": "parameter", "args": None}
            return _PendingFile(facts, "gradient", label, row["seq"], None, {})
        facts |= {
            "micro": row["micro"] + self._first_micros.get(label, 0),
            "seq": row["seq"] + self._first_call,
            "parent": None if row["parent"] is None else row["parent"] + self._first_call,
            "recompute": bool(row["recompute"]),
        }
        self._calls = max(self._calls, row["seq"] + 1)
        self._micros[label] = max(self._micros.get(label, 0), row["micro"] + 1)
        if kind == "function" and row["phase"] == "forward":
            self._series.functions[row["type"]] += 1
        if row["stack"] is not None:
            self.lost[STACKS] += 1
        phase = "gradient" if kind == "parameter" else row["phase"]
        plain = plain_leaves(row["args"]) if phase == "forward" and kind != "custom" else {}
        return _PendingFile(facts, phase, label, row["seq"], row["parent"], plain)

    def _tensor(self, file: _PendingFile, role: str, path: str, dtype: str, *, values: npt.NDArray[Any] | None) -> None:
        position = _position(file, role, path)
        if position is None:
            self.lost[f"a tensor of the role {role} in a {file.phase}"] += 1
            return
        self._load(file)
        if file.phase != "forward" or role == "output":
            self._number(file)
            file.has_results = True
        if values is None:
            self.lost["a tensor whose values were not kept as a whole"] += 1
        leaf = None if values is None else TorchTensor(values, dtype)
        file.tensors.setdefault(position.part, {})[position.path] = leaf
        file.is_new = True

    def _number(self, file: _PendingFile) -> None:
        """Assign a path. Calls inside of this one without results have ended before it, so they are written first."""
        if file.path is not None:
            return
        if file.phase == "forward":
            self._running.get(file.parent, {}).pop(file.seq, None)
            for inner in self._running.pop(file.seq, {}).values():
                self._write(inner)
        file.path = self._series.file(file.phase, file.label, file.facts["module_name"])

    def _write(self, file: _PendingFile) -> None:
        if not file.is_new:
            return
        self._number(file)
        assert file.path is not None
        content: dict[str, Nest] = dict(file.facts)
        for part in dict.fromkeys((*file.plain, *file.tensors)):
            leaves = file.plain.get(part, {}) | file.tensors.get(part, {})
            if leaves:
                content[part] = nest(leaves)
        write_torch_file(file.path, content)
        file.is_new, file.is_loaded = False, False
        file.tensors = {}

    def _load(self, file: _PendingFile) -> None:
        """Read the tensors back from the file, since more of the call has come."""
        if file.is_loaded:
            return
        assert file.path is not None
        file.is_loaded = True
        files = Files()
        try:
            contents = open_any(file.path, files)
            for name, stored in contents.tensors.items():
                part, _, path = name.partition(".")
                tensor = TorchTensor(read_whole(stored, files), stored.spec.dtype)
                file.tensors.setdefault(part, {})[path] = tensor
        finally:
            files.close()


def _values(rows: RankRun, row: int) -> npt.NDArray[Any] | None:
    """The values of a tensor, if all of them were kept."""
    whole = rows.tensors.numbers("sampled")[row] < 0 and rows.tensors["part"][row] is None
    return rows.values(row) if whole else None


def _position(file: _PendingFile, role: str, path: str) -> PathInFile | None:
    if file.phase != "gradient":
        return path_in_file(file.phase, role, path)
    if role == "output":  # of a saved value: `out.gradient`, `out.gradient_grad`
        return PathInFile(path.removeprefix("out."), "")
    return path_in_file(file.phase, role, path)


def _copy_values(file: _PendingFile) -> None:
    """Copy the values of a call that goes on."""
    for leaves in file.tensors.values():
        for path, leaf in leaves.items():
            if leaf is not None:
                leaves[path] = TorchTensor(np.array(leaf.array), leaf.dtype)
