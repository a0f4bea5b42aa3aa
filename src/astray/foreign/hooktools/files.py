"""The files of a dump: their paths, their numbers, and the content of a call's file.

`log_dir/{name}_{unixtime}/{forward,backward,gradient}/epoch{E}/step{S}/forward_000017.pt`: any folder of this path can
be opened. Files are numbered through the whole run, in the order in which calls ended, by a `FileSeries` that several
recordings may share; epoch and step are −1 where the program did not give them.

A file that astray wrote holds a dict of plain values and tensors, with hooktools' own keys `input`, `output`,
`module_name` and `classify`: in a backward file `input` has the gradients that the call sends to its inputs, `output`
those that arrive at its outputs. Files of hooktools itself hold a pickled object with attributes of the same names,
which are read as data.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from astray.checkpoints.torch_objects import attributes
from astray.errors import RunError
from astray.foreign.array_files import Nest
from astray.records import Role
from astray.safe_text import parse_json
from astray.store.safe_paths import entries
from astray.wording import numeral

PHASES = ("forward", "backward", "gradient")
INDEX = "module2path_"
"""The prefix of the JSON files in the log_dir that list the files of each module."""

_FILE = re.compile(rf"({'|'.join(PHASES)})_(\d{{1,12}})\.pt")
_LEVEL = re.compile(r"(epoch|step)(-?\d{1,12})")
_RUN = re.compile(r"(.*)_(\d{9,12})(?:_rank(\d{1,6}))?")
_DEEPEST = 4  # a phase, an epoch, a step, a file


class Label(NamedTuple):
    """The program's own numbers of a step."""

    epoch: int = -1
    step: int = -1

    def __str__(self) -> str:
        return f"epoch{self.epoch}/step{self.step}"


class CallFile(NamedTuple):
    """The file of one call."""

    phase: str
    label: Label
    number: int
    path: Path


def run_name(name: str, stamp: int, rank: int | None) -> str:
    """The name of a run's folder; `rank` is None where there is only one."""
    return f"{name}_{stamp}" + ("" if rank is None else f"_rank{rank}")


def file_name(phase: str, number: int) -> str:
    """The name of a call's file."""
    return f"{phase}_{number:06d}.pt"


def recognises(path: Path) -> bool:
    """Whether a folder looks like a dump, or like a log_dir with dumps in it. Reads only names."""
    try:
        return path.is_dir() and (_has_call_file(path) or any(map(_is_run, entries(path))))
    except (OSError, RunError):
        return False


def runs_in(path: Path) -> dict[int, Path]:
    """The folder of each rank of the run at this path. Raises RunError when there is none, or more than one run."""
    if _has_call_file(path):
        return {0: path}
    runs = [entry for entry in entries(path) if _is_run(entry)]
    if len(runs) == 1:
        return {0: runs[0]}
    named = [(_RUN.fullmatch(entry.name), entry) for entry in runs]
    ranks = {int(match[3]): entry for match, entry in named if match and match[3] is not None}
    if runs and len(ranks) == len(runs) and len({match[1] for match, _ in named if match}) == 1:
        return dict(sorted(ranks.items()))
    if not runs:
        raise RunError(f"{path} holds no dump of hooktools.")
    raise RunError(
        f"{path} holds {len(runs)} runs. Open one of them: {', '.join(str(entry) for entry in runs[-3:])}"
        f"{' …' * (len(runs) > 3)}."
    )


def files_in(folder: Path) -> list[CallFile]:
    """The files of a run, or of any folder inside it, ordered by phase, label and number."""
    levels = {"epoch": -1, "step": -1}
    for part in folder.resolve().parts[-2:]:
        match = _LEVEL.fullmatch(part)
        if match:
            levels[match[1]] = int(match[2])
    files = _walk(folder, Label(**levels), _DEEPEST)
    return sorted(files, key=lambda file: (PHASES.index(file.phase), file.label, file.number))


def call_file(path: Path) -> CallFile | None:
    """The file at a path; None when its name is not that of a call's file."""
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    levels = {level[1]: int(level[2]) for level in map(_LEVEL.fullmatch, path.resolve().parts[-3:-1]) if level}
    return CallFile(match[1], Label(**levels), int(match[2]), path)


def _walk(folder: Path, label: Label, depth: int) -> Iterable[CallFile]:
    for entry in entries(folder):
        match, level = _FILE.fullmatch(entry.name), _LEVEL.fullmatch(entry.name)
        if match:
            yield CallFile(match[1], label, int(match[2]), entry)
        elif depth and level and entry.is_dir():
            yield from _walk(entry, label._replace(**{level[1]: int(level[2])}), depth - 1)
        elif depth and entry.name in PHASES and entry.is_dir():
            yield from _walk(entry, label, depth - 1)


def _has_call_file(folder: Path, depth: int = _DEEPEST) -> bool:
    """Whether there is a file of a call in a folder, or in the subfolders of a dump."""
    inside = entries(folder)
    if any(_FILE.fullmatch(entry.name) for entry in inside):
        return True
    return depth > 0 and any(
        _has_call_file(entry, depth - 1)
        for entry in inside
        if (entry.name in PHASES or _LEVEL.fullmatch(entry.name)) and entry.is_dir()
    )


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and _RUN.fullmatch(folder.name) is not None and _has_call_file(folder)


class Numbering:
    """Numbers the steps of several epochs in one sequence.

    In the first epoch step S has the number S, or S + 1 when there is a step −1. Each further epoch continues after the
    last step of the one before.

    >>> numbering = Numbering([Label(0, 0), Label(0, 9), Label(1, 0)])
    >>> numbering[Label(0, 9)], numbering[Label(1, 0)], numbering.described
    (9, 10, {'epoch0': 'step', 'epoch1': 'step + 10'})
    """

    def __init__(self, labels: Iterable[Label]) -> None:
        self._offset: dict[int, int] = {}  # added to the steps of each epoch
        self._first: dict[int, int] = {}  # the number at which each epoch begins
        steps: dict[int, list[int]] = {}
        for label in labels:
            steps.setdefault(label.epoch, []).append(label.step)
        first = 0
        for epoch, of_epoch in sorted(steps.items()):
            self._first[epoch] = first
            self._offset[epoch] = first - min(*of_epoch, 0)
            first = self._offset[epoch] + max(of_epoch) + 1

    def __getitem__(self, label: Label) -> int:
        return label.step + self._offset[label.epoch]

    def label(self, number: int) -> Label:
        """The epoch and step of a number."""
        begun = (epoch for epoch, first in self._first.items() if first <= number)
        epoch = max(begun, key=lambda epoch: self._first[epoch])
        return Label(epoch, number - self._offset[epoch])

    @property
    def epochs(self) -> list[list[int]]:
        """Each epoch as [epoch, number of its first step, offset of its steps]; for programs."""
        return [[epoch, first, self._offset[epoch]] for epoch, first in self._first.items()]

    @property
    def described(self) -> dict[str, str]:
        """The formula of each epoch's numbers, for people."""
        return {f"epoch{epoch}": f"step + {offset}" if offset else "step" for epoch, offset in self._offset.items()}


class FileSeries:
    """Numbers the files of a run, makes their folders, and writes their index; shared by successive recordings.

    calls, micros: how many calls, and micro steps of each label, the recordings before had.
    """

    def __init__(self, log_dir: Path, name: str, stamp: int) -> None:
        self.log_dir, self.name, self.stamp = log_dir, name, stamp
        self.counts: Counter[str] = Counter()  # files by phase
        self.functions: Counter[str] = Counter()  # calls by function
        self.rank: int | None = None
        self._index: dict[str, list[str]] = {}
        self._index_is_new = False
        self.calls = 0
        self.micros: dict[Label, int] = {}
        self._folders: set[Path] = set()
        self._lock = threading.Lock()  # gradients may be saved while a trace is being written

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.log_dir / run_name(self.name, self.stamp, self.rank)

    def add_recording(self, calls: int, micros: dict[Label, int]) -> None:
        """Count the calls of a recording that has ended, and its micro steps by label."""
        self.calls += calls
        for label, count in micros.items():
            self.micros[label] = self.micros.get(label, 0) + count

    def file(self, phase: str, label: Label, module: str) -> Path:
        """The path of the next file of a phase. Makes its folder."""
        folder = self.folder / phase / str(label)
        with self._lock:
            if folder not in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
                self._folders.add(folder)
            path = folder / file_name(phase, self.counts[phase])
            self.counts[phase] += 1
            self._index.setdefault(module, []).append(str(path))
            self._index_is_new = True
        return path

    def write_index(self) -> None:
        """Write the JSON file that lists the files of each module, if there are new ones."""
        with self._lock:
            if not self._index_is_new:
                return
            self._index_is_new = False
            path = self.log_dir / f"{run_name(INDEX[:-1], self.stamp, self.rank)}.json"
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(json.dumps(self._index, ensure_ascii=False), "utf-8", "replace")
            draft.replace(path)


# -- what the file of a call holds -------------------------------------------------------------------------------------

CLASSES = {"module": "nn.module", "parameter": "gradient"}
"""The value of `classify` by kind of call; `NOT_A_MODULE` for all others."""

NOT_A_MODULE = "non nn.module"

DEEPEST = 32
"""How many parts of a path become nesting; the rest is one key with dots. No call has arguments so deep."""

PARTS: dict[str, dict[str, tuple[Role, str]]] = {
    "forward": {
        "input": ("input", ""),
        "kwargs": ("input", "kwargs"),
        "parameters": ("parameter", ""),
        "buffers": ("state", ""),
        "output": ("output", "out"),
    },
    "backward": {
        "output": ("input", "out"),
        "input": ("output", ""),
        "kwargs": ("output", "kwargs"),
    },
    "gradient": {
        "gradient": ("parameter", "value"),
        "gradient_grad": ("gradient", "grad"),
        "gradient_added": ("gradient", "added"),
    },
}
"""Of each phase, the parts of a file: the role of their tensors, and the prefix of their paths."""


class PathInFile(NamedTuple):
    """The position of a tensor in a file."""

    part: str
    path: str


def path_in_file(phase: str, role: str, path: str) -> PathInFile | None:
    """The position of a tensor with this role and path; None when a file of the phase has none for it.

    >>> path_in_file("forward", "output", "out.logits"), path_in_file("backward", "input", "out")
    (PathInFile(part='output', path='logits'), PathInFile(part='output', path=''))
    """
    best: PathInFile | None = None
    for part, (role_of_part, prefix) in PARTS[phase].items():
        if role_of_part == role and (not prefix or path == prefix or path.startswith(f"{prefix}.")):
            position = PathInFile(part, path[len(prefix) :].lstrip(".") if prefix else path)
            best = position if best is None or prefix else best  # `kwargs.mask` is in `kwargs`, not in `input`
    return best


def role_of(phase: str, name: str) -> tuple[Role, str] | None:
    """The role and path of a tensor by its name in a file; None when it is not in a part of a call.

    >>> role_of("forward", "output.logits"), role_of("forward", "input.0")
    (('output', 'out.logits'), ('input', '0'))
    """
    part, _, rest = name.partition(".")
    if part not in PARTS[phase]:
        return None
    role, prefix = PARTS[phase][part]
    if not prefix and not rest:
        return role, "0"  # a single tensor in place of a tuple of one
    return role, ".".join(filter(None, (prefix, rest)))


def nest(leaves: Mapping[str, Nest], depth: int = 0) -> Nest:
    """Nested containers with each leaf at its path: tuples where all keys are indices, otherwise dicts.

    >>> nest({"0": 1, "2.a": 3})
    (1, None, {'a': 3})
    """
    if "" in leaves:
        return leaves[""]
    groups: dict[str, dict[str, Nest]] = {}
    for path, leaf in leaves.items():
        first, _, rest = path.partition(".") if depth < DEEPEST else (path, "", "")
        if rest and first in leaves:
            groups[path] = {"": leaf}  # a leaf below another leaf: its key had a dot
        else:
            groups.setdefault(first, {})[rest] = leaf
    indices = [numeral(key) for key in groups]
    if groups and all(index is not None and str(index) == key for key, index in zip(groups, indices, strict=True)):
        length = max(index for index in indices if index is not None) + 1
        if length <= 2 * len(groups) + 64:  # a dict with a few large integer keys is not a tuple
            inner = (groups.get(str(index)) for index in range(length))
            return tuple(None if group is None else nest(group, depth + 1) for group in inner)
    return {key: nest(group, depth + 1) for key, group in groups.items()}


def plain_leaves(args: str | None) -> dict[str, dict[str, Nest]]:
    """The arguments of a call that are not tensors, of `input` and of `kwargs`, by their paths."""
    try:
        content = parse_json(args) if args else {}
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    parts = {"input": content.get("args", []), "kwargs": content.get("kwargs", {})}
    return {part: dict(_leaves(value, "")) for part, value in parts.items()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Nest]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path and value != "<tensor>":
        yield path, value


def unwrap(content: Any) -> Any:
    """The dict of a file, also where hooktools has pickled an object with these attributes.

    Its newer objects are modules with a parameter registered as `gradient`, and its gradient as `gradient_grad`; older
    ones have only the gradient, as `gradient`.
    """
    fields = attributes(content)
    if fields is None or "module_name" not in fields:
        return content
    if "gradient" in content.state and "gradient_grad" not in fields:
        fields["gradient_grad"] = fields.pop("gradient")
    return {key: value for key, value in fields.items() if not key.startswith("_")}
