"""Writes the rows of a recording as the files of hooktools: one for each call and phase, when it has ended.

Files are numbered in the order in which calls ended, which is the order of their first results; so two recordings of
one program have the same numbers, however their rows came in pieces. A file is there in full or not at all. Gradients
may come in several pieces; then the file is read back and written anew.
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
from astray.foreign.hooktools.files import CLASSES, OTHERWISE, FileSeries, Label, NestPath, nest, place_of, plain_leaves
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo

VERSION = 1
"""Of what a file says besides what hooktools wrote. It stands in each under `astray`."""

GRADIENTS = "ParameterGradient"
"""The type of a saved value that is a parameter and its gradient, as `trace_gradient` saves them."""

STACKS = "the Python stack of a call"

HELD_BYTES = 64 << 20
"""So many bytes of values are held before files are written."""

Labels = Callable[[int], Label]
"""What the program called a step of the recording."""


def translate(
    path: Path,
    rank: int,
    info: RunInfo,
    *,
    overwrite: bool,
    series: FileSeries | None = None,
    labels: Labels = lambda step: Label(0, step),
) -> HooktoolsTranslator:
    """What writes a rank into a run inside the log_dir `path`.

    series: the run to go on with; by default a new one, named after when the recording was made.
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
class _Entry:
    """A call on its way into a file."""

    said: dict[str, Any]
    phase: str
    label: Label
    seq: int
    parent: int | None
    plain: dict[str, dict[str, Nest]]  # arguments that are no tensors, of each part of the file, by their paths
    tensors: dict[str, dict[str, TorchTensor | None]] = field(default_factory=dict)  # likewise
    path: Path | None = None  # once it has a number
    has_results: bool = False
    is_new: bool = True  # since it was last written
    is_loaded: bool = True  # False when its tensors are in its file, and no longer here


class HooktoolsTranslator:
    """Writes one rank. It is a `Translator`."""

    def __init__(self, series: FileSeries, labels: Labels) -> None:
        self.lost: Counter[str] = Counter()
        self._series = series
        self._labels = labels
        self._entries: dict[int, _Entry] = {}
        self._running: dict[int | None, dict[int, _Entry]] = {}  # forward calls without a file, by what they are in
        self._without: set[int] = set()  # calls that get no file
        self._calls = 0
        self._micros: dict[Label, int] = {}
        self._first, self._before = series.calls, dict(series.micros)  # what earlier recordings had

    def take(self, step: int, rows: RankRun) -> None:
        """Write the calls that have ended, and hold the others."""
        touched: dict[int, _Entry] = {}
        for row in range(len(rows.calls)):
            said = rows.calls.row(row)
            entry = self._call(step, said)
            if entry is None:
                self._without.add(said["seq"])
                continue
            self._entries[entry.seq] = touched[entry.seq] = entry
            if entry.phase == "forward":
                self._running.setdefault(entry.parent, {})[entry.seq] = entry
        names, held = ("seq", "role", "path", "dtype"), 0
        for row, (seq, *cells) in enumerate(zip(*(rows.tensors[name].tolist() for name in names), strict=True)):
            found = self._entries.get(seq)
            if found is not None:
                values = _values(rows, row)
                self._tensor(found, *cells, values=values)
                touched[seq] = found
                held += 0 if values is None else values.nbytes
                if held > HELD_BYTES:
                    held = self._put_away(touched)
            elif seq not in self._without:
                self.lost["a tensor of a call that has begun two steps before"] += 1
        self._put_away(touched)

    def _put_away(self, touched: dict[int, _Entry]) -> int:
        """Write calls that have ended, and hold the others. Gives how many bytes of what was handed over are held."""
        for entry in touched.values():
            if entry.has_results:
                self._write(entry)
            else:
                _keep(entry)
        touched.clear()
        return 0

    def sync(self) -> None:
        """Write the index: every call that has ended is in its file already."""
        self._series.write_index()

    def step_over(self, step: int) -> None:  # noqa: ARG002 - as a Translator has it
        """Write the calls that have not ended, or had no results, as they are."""
        for entry in list(self._entries.values()):
            if entry.path is None and entry.phase == "forward":
                self._write(entry)
            else:  # a backward without any gradient has nothing to tell
                del self._entries[entry.seq]
        self._without.clear()

    def close(self, end: End) -> None:  # noqa: ARG002
        """Write what is left."""
        self.step_over(0)
        self._series.ended(self._calls, self._micros)
        self._series.write_index()

    def _call(self, step: int, row: dict[str, Any]) -> _Entry | None:
        """A call that is to have a file; None when hooktools has no such files."""
        label, kind = self._labels(step), row["kind"]
        if row["phase"] == "update" or kind == "optimizer":
            self.lost["a call of an optimizer"] += 1
            return None
        said = {
            "astray": VERSION,
            "module_name": row["site"],
            "module_type": row["type"],
            "classify": CLASSES.get(kind, OTHERWISE),
            "kind": kind,
            "call": row["call"],
            "args": row["args"],
        }
        if kind == "custom" and row["type"] == GRADIENTS:  # saved after the fact: in no order with other calls
            said |= {"module_type": "Parameter", "classify": CLASSES["parameter"], "kind": "parameter", "args": None}
            return _Entry(said, "gradient", label, row["seq"], None, {})
        said |= {
            "micro": row["micro"] + self._before.get(label, 0),
            "seq": row["seq"] + self._first,
            "parent": None if row["parent"] is None else row["parent"] + self._first,
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
        return _Entry(said, phase, label, row["seq"], row["parent"], plain)

    def _tensor(self, entry: _Entry, role: str, path: str, dtype: str, *, values: npt.NDArray[Any] | None) -> None:
        place = _place(entry, role, path)
        if place is None:
            self.lost[f"a tensor of the role {role} in a {entry.phase}"] += 1
            return
        self._load(entry)
        if entry.phase != "forward" or role == "output":
            self._number(entry)
            entry.has_results = True
        if values is None:
            self.lost["a tensor whose values were not kept as a whole"] += 1
        leaf = None if values is None else TorchTensor(values, dtype)
        entry.tensors.setdefault(place.part, {})[place.path] = leaf
        entry.is_new = True

    def _number(self, entry: _Entry) -> None:
        """Give a call its file. What was called inside of it, and had no results, ended before."""
        if entry.path is not None:
            return
        if entry.phase == "forward":
            self._running.get(entry.parent, {}).pop(entry.seq, None)
            for other in self._running.pop(entry.seq, {}).values():
                self._write(other)
        entry.path = self._series.file(entry.phase, entry.label, entry.said["module_name"])

    def _write(self, entry: _Entry) -> None:
        if not entry.is_new:
            return
        self._number(entry)
        assert entry.path is not None
        content: dict[str, Nest] = dict(entry.said)
        for part in dict.fromkeys((*entry.plain, *entry.tensors)):
            leaves = entry.plain.get(part, {}) | entry.tensors.get(part, {})
            if leaves:
                content[part] = nest(leaves)
        write_torch_file(entry.path, content)
        entry.is_new, entry.is_loaded = False, False
        entry.tensors = {}

    def _load(self, entry: _Entry) -> None:
        """Bring back what was written of a call of which there is more."""
        if entry.is_loaded:
            return
        assert entry.path is not None
        entry.is_loaded = True
        files = Files()
        try:
            contents = open_any(entry.path, files)
            for name, stored in contents.tensors.items():
                part, _, path = name.partition(".")
                tensor = TorchTensor(read_whole(stored, files), stored.spec.dtype)
                entry.tensors.setdefault(part, {})[path] = tensor
        finally:
            files.close()


def _values(rows: RankRun, row: int) -> npt.NDArray[Any] | None:
    """The values of a tensor, if all of them were kept."""
    whole = rows.tensors.numbers("sampled")[row] < 0 and rows.tensors["part"][row] is None
    return rows.values(row) if whole else None


def _place(entry: _Entry, role: str, path: str) -> NestPath | None:
    if entry.phase != "gradient":
        return place_of(entry.phase, role, path)
    if role == "output":  # of a saved value: `out.gradient`, `out.gradient_grad`
        return NestPath(path.removeprefix("out."), "")
    return place_of(entry.phase, role, path)


def _keep(entry: _Entry) -> None:
    """Copy the values of a call that goes on: those that were handed over are there only for now."""
    for leaves in entry.tensors.values():
        for path, leaf in leaves.items():
            if leaf is not None:
                leaves[path] = TorchTensor(np.array(leaf.array), leaf.dtype)
