"""Writes a rank's rows as msprobe's files: `step0/rank/dump.json` and those beside it, which msprobe's tools open.

Tensors are written as they come. The JSON files are rewritten whole when something is new: a draft replaces the file,
so that a kill leaves the last state and never half a file. An entry is encoded again only when it has changed. An entry
that is not selected uses up its number all the same, so that the others have the names they would have in a full dump.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from astray.errors import RunExists, UsageError
from astray.foreign import array_files
from astray.foreign.array_files import TorchTensor
from astray.foreign.msprobe.entries import StepEntries
from astray.foreign.msprobe.files import DATA, FILES
from astray.foreign.msprobe.leaves import Leaf, checksum, is_finite, leaf_of
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import file_name
from astray.wording import did_you_mean

Task = Literal["statistics", "tensor", "md5", "structure", "overflow_check"]
Level = Literal["L0", "L1", "mix", "debug"]

EXTRAS = "astray"
"""The key of dump.json for what msprobe's format cannot express."""


def translate(
    path: Path,
    rank: int,
    info: RunInfo,
    *,
    overwrite: bool = False,
    task: Task | None = None,
    level: Level | None = None,
    make_selector: MakesSelector | None = None,
    with_values: Callable[[str], bool] | None = None,
    most_overflows: int | None = None,
    extra_info: bool = True,
    rounded: bool = False,
    wrapped: Mapping[str, str] | None = None,
    replace_steps: bool = False,
) -> MsprobeTranslator:
    """Make the translator of a rank.

    task: msprobe's task, which decides what is written: "tensor" has a file for each tensor whose values were kept;
    "md5" is "statistics" with checksums; "structure" has no tensors, "overflow_check" only the entries with an output
    that is not finite. By default as the run was recorded: "tensor" if it kept values, else "statistics".
    level: by default as the run was recorded, too.
    make_selector: makes a selector of entries for each step; by default all are written.
    with_values: the entries, by name, whose values are written though the task is "statistics".
    most_overflows: the most entries that "overflow_check" writes. extra_info: whether to write stack.json and
    construct.json.
    rounded: whether means and norms are rounded to 32-bit floats, as msprobe's are.
    wrapped: msprobe's names of the modules of a wrapped model, by their sites.
    replace_steps: whether a step of this rank that exists is replaced when it is written, as msprobe does when a
    program runs a second time; other steps stay.

    Raises RunExists where this rank has been written already, unless it may be overwritten.
    """
    for given, known in ((task, Task), (level, Level)):
        if given is not None and given not in get_args(known):
            raise UsageError(
                f"{given!r} is none of {', '.join(get_args(known))}.{did_you_mean(given, get_args(known))}"
            )
    chosen: Task = task or ("tensor" if "tensors" in info.words("keep") else "statistics")
    folder = f"rank{rank}" if info.world_size > 1 else "rank"
    _prepare(path, folder, overwrite, replace_steps)
    selection = EntrySelection(make_selector, with_values, most_overflows, extra_info)
    options = DumpOptions(chosen, level or _level(info), rounded, wrapped or {}, replace_steps)
    return MsprobeTranslator(path, folder, info, options, selection)


def _level(info: RunInfo) -> Level:
    levels = set(info.words("level")) or {"module"}
    if "module" not in levels:
        return "L1"
    return "L0" if levels == {"module"} else "mix"


def _prepare(path: Path, folder: str, overwrite: bool, replace_steps: bool) -> None:
    existing = [step / folder for step in _steps(path) if (step / folder).exists()]
    if existing and not overwrite and not replace_steps:
        raise RunExists(f"{existing[0]} is there already. Choose another path, or overwrite it with overwrite=True.")
    for step_folder in existing if overwrite else ():
        shutil.rmtree(step_folder)
    path.mkdir(parents=True, exist_ok=True)


def _clear(folder: Path) -> None:
    """Remove the files of a dump in the folder of a step, and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    data = folder / DATA
    if data.is_dir() and not data.is_symlink():
        shutil.rmtree(data)


def _steps(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return [entry for entry in path.iterdir() if re.fullmatch(r"step\d+", entry.name) and not entry.is_symlink()]


class DumpOptions(NamedTuple):
    """The form of a dump; see `translate`."""

    task: Task
    level: Level
    rounded: bool = False
    wrapped: Mapping[str, str] = {}
    replace_steps: bool = False


class MsprobeTranslator:
    """Writes one rank. It is a `Translator`."""

    def __init__(
        self, path: Path, folder: str, info: RunInfo, options: DumpOptions, selection: EntrySelection | None = None
    ) -> None:
        self.lost: Counter[str] = Counter()
        self.path = path
        self._options = options
        self._folder, self._version, self._task, self._level = folder, info.astray, options.task, options.level
        self._selection = selection or EntrySelection()
        self._overflow = OverflowFilter(self._selection.most_overflows) if options.task == "overflow_check" else None
        self._classes: dict[str, str] = {}
        self._steps: dict[int, _StepWriter] = {}
        self._begun: set[int] = set()

    def take(self, step: int, rows: RankRun) -> None:
        """Take more rows of a step."""
        writer = self._steps.get(step)
        if writer is None:
            folder = self.path / f"step{step}" / self._folder
            if self._options.replace_steps and step not in self._begun:
                _clear(folder)
            self._begun.add(step)
            writer = self._steps[step] = _StepWriter(folder, self._classes, self.lost, self._selection, self._options)
        writer.is_new = True
        calls, tensors = rows.calls, rows.tensors
        for at in range(len(calls)):
            row = calls.row(at)
            name = writer.entries.call(row, rows.stack(row["stack"]) if row["stack"] is not None else ())
            if name is not None:
                writer.selects(name)  # selectors are asked in the order in which entries begin
        if self._task != "structure":
            for at in range(len(tensors)):
                self._tensor(writer, tensors.row(at), rows, at)
        if self._overflow is not None:
            self._overflow.forget()

    def _tensor(self, writer: _StepWriter, row: dict[str, Any], rows: RankRun, at: int) -> None:
        partial = row["sampled"] is not None or row["part"] is not None
        by_task = self._task in ("tensor", "md5", "overflow_check") or self._selection.with_values is not None
        needs_values = by_task or bool(row["inf"] and row["inf"] > 0)
        values = rows.values(at) if needs_values and not partial else None
        leaf = leaf_of(row, values, self.lost, self._options.rounded)
        position = writer.entries.tensor(row, leaf)
        if position is None or not writer.selects(position.entry):
            return
        if values is not None and (self._task == "tensor" or self._selection.keeps_values(position.entry)):
            bits = None if row["fingerprint"] is None else (row["fingerprint"], row["dtype"], row["shape"])
            self._write(writer, leaf, position.file, array_files.TorchTensor(values, row["dtype"]), bits)
        elif self._overflow is not None:
            tensor = None if values is None else array_files.TorchTensor(values.copy(), row["dtype"])
            is_result = row["role"] in ("output", "gradient")
            pending = PendingTensor(leaf, position.file, tensor)
            for ready in self._overflow.take(position.entry, pending, is_result):
                if ready.tensor is not None:
                    self._write(writer, ready.leaf, ready.file, ready.tensor)
        elif self._task == "md5":
            leaf["md5"] = None if values is None else checksum(values)
        self._count_lost(row, leaf, partial)

    def _write(
        self, writer: _StepWriter, leaf: Leaf, name: str, tensor: array_files.TorchTensor, bits: Hashable | None = None
    ) -> None:
        file = file_name(name, ".pt")
        if file is None:
            self.lost["the values of a tensor whose name no file can have"] += 1
            return
        folder = writer.folder / DATA
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file
        if bits is None or not _link(path, writer.files.setdefault(bits, path)):
            array_files.write_torch_file(path, tensor)
        leaf["data_name"] = file

    def _count_lost(self, row: dict[str, Any], leaf: Leaf, partial: bool) -> None:
        if "data_name" not in leaf:
            self.lost["std, zeros and counts of a tensor"] += row["count"] is not None
            self.lost["the fingerprint of a tensor"] += row["fingerprint"] is not None
            self.lost["a part or a sample of a tensor's values"] += partial
        self.lost["the device of a tensor"] += row["device"] not in ("", "cpu")
        self.lost["a note on a tensor"] += row["note"] is not None
        self.lost += Counter()  # drops the zeros

    def sync(self) -> None:
        """Bring the files up to date."""
        for step in self._steps.values():
            if step.is_new:
                self._write_documents(step)
                step.is_new = False

    def end_step(self, step: int) -> None:
        """Write the rest of a step, and drop its state."""
        self.sync()
        self._steps.pop(step, None)
        if self._overflow is not None:
            self._overflow.next_step()

    def close(self, end: End) -> None:  # noqa: ARG002 - the format does not have it
        """Write the rest."""
        self.sync()
        self._steps.clear()

    def _write_documents(self, step: _StepWriter) -> None:
        step.folder.mkdir(parents=True, exist_ok=True)
        entries, folder = step.entries, step.folder
        data = folder / DATA
        head: dict[str, Any] = {"task": "statistics" if self._task == "md5" else self._task, "level": self._level}
        head |= {"framework": "pytorch", "dump_data_dir": str(data.absolute()) if data.is_dir() else None}
        extras = {"version": self._version, "entries": entries.all_extras()}
        shown = [] if self._task == "structure" else [name for name in entries.data if self._shows(step, name)]
        if entries.data or not entries.debug:
            lines = ((name, step.encoded(name)) for name in shown)
            _replace(folder / "dump.json", _document(head | {EXTRAS: extras}, lines))
        if (entries.data or not entries.debug) and self._selection.extra_info:
            pairs = entries.construct() if self._level != "L1" else {}
            _replace(folder / "construct.json", _object((name, _json(parent)) for name, parent in pairs.items()))
            stacks = entries.stacks()
            if self._selection.make_selector is not None or self._overflow is not None:
                stacks = _stacks_of(stacks, set(shown))
            _replace(folder / "stack.json", _object((number, _json(stack)) for number, stack in stacks.items()))
        if entries.debug:
            saved = ((name, _json(value)) for name, value in entries.debug.items())
            _replace(folder / "debug.json", _document(head | {"level": "debug", EXTRAS: extras}, saved))

    def _shows(self, step: _StepWriter, name: str) -> bool:
        """Whether an entry is written; with "overflow_check", only one with an output that is not finite."""
        return step.selects(name) and (self._overflow is None or name in self._overflow.found)


class _StepWriter:
    """The state of a step that is being written."""

    def __init__(
        self, folder: Path, classes: dict[str, str], lost: Counter[str], selection: EntrySelection, options: DumpOptions
    ) -> None:
        self.folder = folder
        self._selector = selection.make_selector() if selection.make_selector is not None else None
        self._selected: dict[str, bool] = {}
        self.entries = StepEntries(classes, lost, options.wrapped)
        self.files: dict[Hashable, Path] = {}  # by content: where it was written first
        self.is_new = True
        self._encoded: dict[str, str] = {}

    def selects(self, name: str) -> bool:
        """Whether an entry is written. Values that the program saved always are."""
        if self._selector is None or name in self.entries.debug:
            return True
        if name not in self._selected:
            self._selected[name] = self._selector(name, self.entries.around(name))
        return self._selected[name]

    def encoded(self, name: str) -> str:
        """An entry as JSON. Cached until it changes."""
        if name in self.entries.changed or name not in self._encoded:
            self._encoded[name] = _json(self.entries.data[name])
            self.entries.changed.discard(name)
        return self._encoded[name]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(pairs: Iterable[tuple[str, str]], indent: str = " ") -> str:
    """One entry a line, for people and for readers of a cut file."""
    lines = ",\n".join(f"{indent}{_json(name)}: {value}" for name, value in pairs)
    return f"{{\n{lines}\n{indent[1:]}}}" if lines else "{}"


def _document(head: dict[str, Any], data: Iterable[tuple[str, str]]) -> str:
    pairs = [(name, _json(value)) for name, value in head.items() if name != EXTRAS]
    return _object([*pairs, ("data", _object(data, "  ")), (EXTRAS, _json(head[EXTRAS]))])


def _link(path: Path, same: Path) -> bool:
    """Hard-link a file with the same content: a module's output is the next one's input, half of all bytes."""
    if path == same:
        return False
    try:
        path.unlink(missing_ok=True)
        os.link(same, path)
    except OSError:  # a file system without hard links, or a file with too many
        return False
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(text.encode("utf-8", "replace") + b"\n")
    draft.replace(path)


# -- which entries are written -----------------------------------------------------------------------------------------

EntrySelector = Callable[[str, Sequence[str]], bool]
"""Whether an entry is written, by its name and those of the entries around it. Called once for each, when it starts."""

MakesSelector = Callable[[], EntrySelector]
"""Makes a new selector for each step."""


class EntrySelection(NamedTuple):
    """Which entries and files are written; see `translate`."""

    make_selector: MakesSelector | None = None
    with_values: Callable[[str], bool] | None = None
    most_overflows: int | None = None
    extra_info: bool = True

    def keeps_values(self, name: str) -> bool:
        return self.with_values is not None and self.with_values(name)


class PendingTensor(NamedTuple):
    """A tensor that is held until it is known whether its entry is written."""

    leaf: Leaf
    file: str
    tensor: TorchTensor | None


class OverflowFilter:
    """Finds the entries with a result that is not finite. The values of an entry are held until its results are known.

    found: their names, in this step. most: how many are searched for, over all steps.
    """

    def __init__(self, most: int | None) -> None:
        self.found: set[str] = set()
        self._most = most
        self._count = 0
        self._held: dict[str, list[PendingTensor]] = {}
        self._finite: set[str] = set()  # entries with a finite result

    def take(self, name: str, tensor: PendingTensor, is_result: bool) -> list[PendingTensor]:
        """Take a tensor of an entry. Returns those that are to be written now."""
        if is_result and not is_finite(tensor.leaf) and (self._most is None or self._count < self._most):
            self._count += name not in self.found
            self.found.add(name)
        elif is_result:
            self._finite.add(name)
        self._held.setdefault(name, []).append(tensor)
        return self._held.pop(name) if name in self.found else []

    def forget(self) -> None:
        """Drop the entries whose results are known and finite; those still running have none yet."""
        for name in self._finite:
            self._held.pop(name, None)
        self._finite.clear()

    def next_step(self) -> None:
        """Begin another step, whose names start over."""
        self.found.clear()
        self._held.clear()


def _stacks_of(stacks: Mapping[str, Sequence[Sequence[str]]], names: Collection[str]) -> dict[str, list[list[str]]]:
    """The stacks of some entries."""
    kept = [([name for name in callers if name in names], list(lines)) for callers, lines in stacks.values()]
    return {str(number): [*pair] for number, pair in enumerate(pair for pair in kept if pair[0])}
