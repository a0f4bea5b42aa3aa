"""Writes a rank's rows as msprobe's files: `step0/rank/dump.json` and those beside it, which msprobe's tools open.

Tensors are written as they come, the JSON files whole each time something is new: a draft that takes their place, so
that a kill leaves the last state that was written and never half a file. An entry is encoded again when it changed. One
that is not asked for uses up its number all the same, so that the others have the names they would have in a full dump.
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
from astray.foreign.msprobe.leaves import Leaf, checksum, is_finite, leaf_of
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import file_name
from astray.wording import did_you_mean

Task = Literal["statistics", "tensor", "md5", "structure", "overflow_check"]
Level = Literal["L0", "L1", "mix", "debug"]

DATA = "dump_tensor_data"
FILES = ("dump.json", "stack.json", "construct.json", "debug.json")
BESIDE = "astray"
"""The key of dump.json under which we keep what msprobe has no word for."""


def translate(
    path: Path,
    rank: int,
    info: RunInfo,
    *,
    overwrite: bool = False,
    task: Task | None = None,
    level: Level | None = None,
    asked: MakesAsked | None = None,
    with_values: Callable[[str], bool] | None = None,
    most: int | None = None,
    extra_info: bool = True,
    rounded: bool = False,
    wrapped: Mapping[str, str] | None = None,
    again: bool = False,
) -> MsprobeTranslator:
    """Make the translator of a rank.

    task: what msprobe is to call it, and what is written: "tensor" has a file for each tensor whose values were kept;
    "md5" is "statistics" with checksums of them; "structure" has no tensors, "overflow_check" only the entries with
    an output that is not finite. By default as the run was recorded: "tensor" if it kept values, else "statistics".
    level: by default as the run was recorded, too.
    asked: makes for each step what says which entries are written; all by default.
    with_values: of which entries, by their names, values are written though the task is "statistics".
    most: how many entries are written of a search for overflow. extra_info: whether stack.json and construct.json are.
    rounded: whether means and norms get the digits that msprobe's have.
    wrapped: what msprobe calls the modules of a model that is wrapped, by their sites.
    again: a step that this rank has been written for already is replaced when it is written again, as msprobe does it
    when a program runs a second time; other steps stay.

    Raises RunExists where this rank has been written already, unless it may be overwritten.
    """
    for given, known in ((task, Task), (level, Level)):
        if given is not None and given not in get_args(known):
            raise UsageError(
                f"{given!r} is none of {', '.join(get_args(known))}.{did_you_mean(given, get_args(known))}"
            )
    chosen: Task = task or ("tensor" if "tensors" in info.words("keep") else "statistics")
    folder = f"rank{rank}" if info.world_size > 1 else "rank"
    _make_room(path, folder, overwrite, again)
    choice = Choice(asked, with_values, most, extra_info)
    form = DumpOptions(chosen, level or _level(info), rounded, wrapped or {}, again)
    return MsprobeTranslator(path, folder, info, form, choice)


def _level(info: RunInfo) -> Level:
    levels = set(info.words("level")) or {"module"}
    if "module" not in levels:
        return "L1"
    return "L0" if levels == {"module"} else "mix"


def _make_room(path: Path, folder: str, overwrite: bool, again: bool) -> None:
    there = [step / folder for step in _steps(path) if (step / folder).exists()]
    if there and not overwrite and not again:
        raise RunExists(f"{there[0]} is there already. Choose another path, or overwrite it with overwrite=True.")
    for one in there if overwrite else ():
        shutil.rmtree(one)
    path.mkdir(parents=True, exist_ok=True)


def _clear(folder: Path) -> None:
    """Remove what an earlier run has left of a step, and nothing else."""
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
    return [one for one in path.iterdir() if re.fullmatch(r"step\d+", one.name) and not one.is_symlink()]


class DumpOptions(NamedTuple):
    """How a dump is to look; see `translate`."""

    task: Task
    level: Level
    rounded: bool = False
    wrapped: Mapping[str, str] = {}
    again: bool = False


class MsprobeTranslator:
    """Writes one rank. It is a `Translator`."""

    def __init__(self, path: Path, folder: str, info: RunInfo, form: DumpOptions, choice: Choice | None = None) -> None:
        self.lost: Counter[str] = Counter()
        self.path = path
        self._form = form
        self._folder, self._version, self._task, self._level = folder, info.astray, form.task, form.level
        self._choice = choice or Choice()
        self._overflow = OverflowFilter(self._choice.most) if form.task == "overflow_check" else None
        self._classes: dict[str, str] = {}
        self._steps: dict[int, _StepWriter] = {}
        self._begun: set[int] = set()

    def take(self, step: int, rows: RankRun) -> None:
        """Some more rows of a step."""
        into = self._steps.get(step)
        if into is None:
            folder = self.path / f"step{step}" / self._folder
            if self._form.again and step not in self._begun:
                _clear(folder)
            self._begun.add(step)
            into = self._steps[step] = _StepWriter(folder, self._classes, self.lost, self._choice, self._form)
        into.is_new = True
        calls, tensors = rows.calls, rows.tensors
        for at in range(len(calls)):
            row = calls.row(at)
            name = into.entries.call(row, rows.stack(row["stack"]) if row["stack"] is not None else ())
            if name is not None:
                into.wants(name)  # asked in the order in which entries begin
        if self._task != "structure":
            for at in range(len(tensors)):
                self._tensor(into, tensors.row(at), rows, at)
        if self._overflow is not None:
            self._overflow.forget()

    def _tensor(self, into: _StepWriter, row: dict[str, Any], rows: RankRun, at: int) -> None:
        partial = row["sampled"] is not None or row["part"] is not None
        by_task = self._task in ("tensor", "md5", "overflow_check") or self._choice.with_values is not None
        wants = by_task or bool(row["inf"] and row["inf"] > 0)
        values = rows.values(at) if wants and not partial else None
        leaf = leaf_of(row, values, self.lost, self._form.rounded)
        place = into.entries.tensor(row, leaf)
        if place is None or not into.wants(place.entry):
            return
        if values is not None and (self._task == "tensor" or self._choice.keeps_values(place.entry)):
            bits = None if row["fingerprint"] is None else (row["fingerprint"], row["dtype"], row["shape"])
            self._write(into, leaf, place.file, array_files.TorchTensor(values, row["dtype"]), bits)
        elif self._overflow is not None:
            tensor = None if values is None else array_files.TorchTensor(values.copy(), row["dtype"])
            is_result = row["role"] in ("output", "gradient")
            for held in self._overflow.take(place.entry, PendingTensor(leaf, place.file, tensor), is_result):
                if held.tensor is not None:
                    self._write(into, held.leaf, held.file, held.tensor)
        elif self._task == "md5":
            leaf["md5"] = None if values is None else checksum(values)
        self._count_lost(row, leaf, partial)

    def _write(
        self, into: _StepWriter, leaf: Leaf, name: str, tensor: array_files.TorchTensor, bits: Hashable | None = None
    ) -> None:
        file = file_name(name, ".pt")
        if file is None:
            self.lost["the values of a tensor whose name no file can have"] += 1
            return
        folder = into.folder / DATA
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file
        if bits is None or not _link(path, into.files.setdefault(bits, path)):
            array_files.write_torch_file(path, tensor)
        leaf["data_name"] = file

    def _count_lost(self, row: dict[str, Any], leaf: Leaf, partial: bool) -> None:
        if "data_name" not in leaf:
            self.lost["std, zeros and counts of a tensor"] += row["count"] is not None
            self.lost["the fingerprint of a tensor"] += row["fingerprint"] is not None
            self.lost["a part or a sample of a tensor's values"] += partial
        self.lost["the device of a tensor"] += row["device"] not in ("", "cpu")
        self.lost["a note on a tensor"] += row["note"] is not None
        for what in [what for what, count in self.lost.items() if not count]:
            del self.lost[what]

    def sync(self) -> None:
        """Bring the files up to date."""
        for step in self._steps.values():
            if step.is_new:
                self._bring_up_to_date(step)
                step.is_new = False

    def end_step(self, step: int) -> None:
        """Write what is left of a step, and forget it."""
        self.sync()
        self._steps.pop(step, None)
        if self._overflow is not None:
            self._overflow.next_step()

    def close(self, end: End) -> None:  # noqa: ARG002 - msprobe has no place for how it ended
        """Write what is left."""
        self.sync()
        self._steps.clear()

    def _bring_up_to_date(self, step: _StepWriter) -> None:
        step.folder.mkdir(parents=True, exist_ok=True)
        entries, place = step.entries, step.folder
        held = place / DATA
        head: dict[str, Any] = {"task": "statistics" if self._task == "md5" else self._task, "level": self._level}
        head |= {"framework": "pytorch", "dump_data_dir": str(held.absolute()) if held.is_dir() else None}
        beside = {"version": self._version, "entries": entries.beside()}
        shown = [] if self._task == "structure" else [name for name in entries.data if self._shows(step, name)]
        if entries.data or not entries.debug:
            lines = ((name, step.encoded(name)) for name in shown)
            _replace(place / "dump.json", _document(head | {BESIDE: beside}, lines))
        if (entries.data or not entries.debug) and self._choice.extra_info:
            pairs = entries.construct() if self._level != "L1" else {}
            _replace(place / "construct.json", _object((name, _json(one)) for name, one in pairs.items()))
            stacks = entries.stacks()
            if self._choice.asked is not None or self._overflow is not None:
                stacks = of_these(stacks, set(shown))
            _replace(place / "stack.json", _object((number, _json(one)) for number, one in stacks.items()))
        if entries.debug:
            saved = ((name, _json(value)) for name, value in entries.debug.items())
            _replace(place / "debug.json", _document(head | {"level": "debug", BESIDE: beside}, saved))

    def _shows(self, step: _StepWriter, name: str) -> bool:
        """Whether an entry is written: of a search for overflow, those with an output that is not finite."""
        return step.wants(name) and (self._overflow is None or name in self._overflow.found)


class _StepWriter:
    """A step that is being written."""

    def __init__(
        self, folder: Path, classes: dict[str, str], lost: Counter[str], choice: Choice, form: DumpOptions
    ) -> None:
        self.folder = folder
        self._asked = choice.asked() if choice.asked is not None else None
        self._wanted: dict[str, bool] = {}
        self.entries = StepEntries(classes, lost, form.wrapped)
        self.files: dict[Hashable, Path] = {}  # where the same bits were written first
        self.is_new = True
        self._encoded: dict[str, str] = {}

    def wants(self, name: str) -> bool:
        """Whether an entry is to be written. What the program saved itself is."""
        if self._asked is None or name in self.entries.debug:
            return True
        if name not in self._wanted:
            self._wanted[name] = self._asked(name, self.entries.around(name))
        return self._wanted[name]

    def encoded(self, name: str) -> str:
        """An entry as JSON, encoded once for as long as it stays as it is."""
        if name in self.entries.changed or name not in self._encoded:
            self._encoded[name] = _json(self.entries.data[name])
            self.entries.changed.discard(name)
        return self._encoded[name]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(pairs: Iterable[tuple[str, str]], indent: str = " ") -> str:
    """One entry a line, for people, and for readers of a file that was cut."""
    lines = ",\n".join(f"{indent}{_json(name)}: {value}" for name, value in pairs)
    return f"{{\n{lines}\n{indent[1:]}}}" if lines else "{}"


def _document(head: dict[str, Any], data: Iterable[tuple[str, str]]) -> str:
    pairs = [(name, _json(value)) for name, value in head.items() if name != BESIDE]
    return _object([*pairs, ("data", _object(data, "  ")), (BESIDE, _json(head[BESIDE]))])


def _link(path: Path, same: Path) -> bool:
    """Give a file that is there another name: a module's output is the next one's input, and half of all bytes."""
    if path == same:
        return False
    try:
        path.unlink(missing_ok=True)
        os.link(same, path)
    except OSError:  # a disk that knows no second names, or one file with too many
        return False
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is either there in full or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(text.encode("utf-8", "replace") + b"\n")
    draft.replace(path)


# -- which entries are written -----------------------------------------------------------------------------------------

EntrySelector = Callable[[str, Sequence[str]], bool]
"""Whether an entry is written, by its name and those of the entries around it. Asked once, in the order they begin."""

MakesAsked = Callable[[], EntrySelector]
"""Makes a new selector for each step."""


class Choice(NamedTuple):
    """What is written; `translate` explains each."""

    asked: MakesAsked | None = None
    with_values: Callable[[str], bool] | None = None
    most: int | None = None
    extra_info: bool = True

    def keeps_values(self, name: str) -> bool:
        return self.with_values is not None and self.with_values(name)


class PendingTensor(NamedTuple):
    """A tensor that waits until it is known whether its entry is written."""

    leaf: Leaf
    file: str
    tensor: TorchTensor | None


class OverflowFilter:
    """Finds the entries of which a result is not finite. The values of an entry are held until its results are known.

    found: their names, in this step. most: how many are looked for, in all of them.
    """

    def __init__(self, most: int | None) -> None:
        self.found: set[str] = set()
        self._most = most
        self._count = 0
        self._held: dict[str, list[PendingTensor]] = {}
        self._finite: set[str] = set()  # entries with results that were

    def take(self, name: str, held: PendingTensor, is_result: bool) -> list[PendingTensor]:
        """One more tensor of an entry. Gives what is to be written now."""
        if is_result and not is_finite(held.leaf) and (self._most is None or self._count < self._most):
            self._count += name not in self.found
            self.found.add(name)
        elif is_result:
            self._finite.add(name)
        self._held.setdefault(name, []).append(held)
        return self._held.pop(name) if name in self.found else []

    def forget(self) -> None:
        """Let go of the entries whose results are there and finite. Those that are still running have none yet."""
        for name in self._finite:
            self._held.pop(name, None)
        self._finite.clear()

    def next_step(self) -> None:
        """A step is over, and names begin anew."""
        self.found.clear()
        self._held.clear()


def of_these(stacks: Mapping[str, Sequence[Sequence[str]]], names: Collection[str]) -> dict[str, list[list[str]]]:
    """The stacks of some entries."""
    kept = [([name for name in called if name in names], list(lines)) for called, lines in stacks.values()]
    return {str(number): [*pair] for number, pair in enumerate(pair for pair in kept if pair[0])}
