"""The files of a dump: where they lie, how they are numbered, and what the file of a call holds.

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
from astray.safe_text import read_plain
from astray.store.safe_paths import entries
from astray.wording import numeral

PHASES = ("forward", "backward", "gradient")
INDEX = "module2path_"
"""How the JSON files begin that say in which files each module is. They lie in the log_dir."""

_FILE = re.compile(rf"({'|'.join(PHASES)})_(\d{{1,12}})\.pt")
_LEVEL = re.compile(r"(epoch|step)(-?\d{1,12})")
_RUN = re.compile(r"(.*)_(\d{9,12})(?:_rank(\d{1,6}))?")
_DEEPEST = 4  # a phase, an epoch, a step, a file


class Label(NamedTuple):
    """What the program called a step."""

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
    """The folder of a run; `rank` is None where there is only one."""
    return f"{name}_{stamp}" + ("" if rank is None else f"_rank{rank}")


def file_name(phase: str, number: int) -> str:
    """The file of a call."""
    return f"{phase}_{number:06d}.pt"


def recognises(path: Path) -> bool:
    """Whether a folder looks like a dump, or like a log_dir with some in it. Reads nothing but names."""
    try:
        return path.is_dir() and (_holds(path) or any(map(_is_run, entries(path))))
    except (OSError, RunError):
        return False


def runs_in(path: Path) -> dict[int, Path]:
    """The folder of each rank of the run at this path. Raises RunError when there is none, or more than one run."""
    if _holds(path):
        return {0: path}
    found = [entry for entry in entries(path) if _is_run(entry)]
    if len(found) == 1:
        return {0: found[0]}
    named = [(_RUN.fullmatch(entry.name), entry) for entry in found]
    ranks = {int(match[3]): entry for match, entry in named if match and match[3] is not None}
    if found and len(ranks) == len(found) and len({match[1] for match, _ in named if match}) == 1:
        return dict(sorted(ranks.items()))
    if not found:
        raise RunError(f"{path} holds no dump of hooktools.")
    raise RunError(
        f"{path} holds {len(found)} runs. Open one of them: {', '.join(str(entry) for entry in found[-3:])}"
        f"{' …' * (len(found) > 3)}."
    )


def files_in(folder: Path) -> list[CallFile]:
    """The files of a run, or of any folder inside it; those of a phase in their order."""
    levels = {"epoch": -1, "step": -1}
    for part in folder.resolve().parts[-2:]:
        match = _LEVEL.fullmatch(part)
        if match:
            levels[match[1]] = int(match[2])
    found = list(_walk(folder, Label(**levels), _DEEPEST))
    return sorted(found, key=lambda file: (PHASES.index(file.phase), file.label, file.number))


def call_file(path: Path) -> CallFile | None:
    """A file by its own path; None when its name is not that of a call's file."""
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    levels = {found[1]: int(found[2]) for found in map(_LEVEL.fullmatch, path.resolve().parts[-3:-1]) if found}
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


def _holds(folder: Path, depth: int = _DEEPEST) -> bool:
    """Whether there is a file of a call in a folder, or in those that a dump has in it."""
    inside = entries(folder)
    if any(_FILE.fullmatch(entry.name) for entry in inside):
        return True
    return depth > 0 and any(
        _holds(entry, depth - 1)
        for entry in inside
        if (entry.name in PHASES or _LEVEL.fullmatch(entry.name)) and entry.is_dir()
    )


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and _RUN.fullmatch(folder.name) is not None and _holds(folder)


class Numbering:
    """Numbers for the steps of several epochs, in one sequence.

    In the first epoch step S is number S, or S + 1 when there is a step −1. Each further epoch begins behind the last
    step of the one before.

    >>> number = Numbering([Label(0, 0), Label(0, 9), Label(1, 0)])
    >>> number[Label(0, 9)], number[Label(1, 0)], number.described
    (9, 10, {'epoch0': 'step', 'epoch1': 'step + 10'})
    """

    def __init__(self, labels: Iterable[Label]) -> None:
        self._add: dict[int, int] = {}  # to the steps of each epoch
        self._first: dict[int, int] = {}  # the number at which each epoch begins
        steps: dict[int, list[int]] = {}
        for label in labels:
            steps.setdefault(label.epoch, []).append(label.step)
        first = 0
        for epoch, found in sorted(steps.items()):
            self._first[epoch] = first
            self._add[epoch] = first - min(*found, 0)
            first = self._add[epoch] + max(found) + 1

    def __getitem__(self, label: Label) -> int:
        return label.step + self._add[label.epoch]

    def label(self, number: int) -> Label:
        """What the program called the step of this number."""
        epoch = max((one for one, add in self._first.items() if add <= number), key=lambda one: self._first[one])
        return Label(epoch, number - self._add[epoch])

    @property
    def epochs(self) -> list[list[int]]:
        """Of each epoch its number, the number of its first step, and what is added to its steps; for programs."""
        return [[epoch, first, self._add[epoch]] for epoch, first in self._first.items()]

    @property
    def described(self) -> dict[str, str]:
        """How numbers are made, for people."""
        return {f"epoch{epoch}": f"step + {add}" if add else "step" for epoch, add in self._add.items()}


class FileSeries:
    """The numbers, folders and index of the files of a run. Several recordings may write them one after another."""

    def __init__(self, log_dir: Path, name: str, stamp: int) -> None:
        self.log_dir, self.name, self.stamp = log_dir, name, stamp
        self.counts: Counter[str] = Counter()  # of the files of each phase
        self.functions: Counter[str] = Counter()  # calls of each
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

    def ended(self, calls: int, micros: dict[Label, int]) -> None:
        """A recording is over that had so many calls, and so many micro steps in each step."""
        self.calls += calls
        for label, count in micros.items():
            self.micros[label] = self.micros.get(label, 0) + count

    def file(self, phase: str, label: Label, module: str) -> Path:
        """The place of the next file of a phase."""
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
        """Write the JSON that says in which files each module is, if there are new ones."""
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
"""What `classify` says of each kind of call; of all others it says that they are no nn.module."""

OTHERWISE = "non nn.module"

DEEPEST = 32
"""Beyond so many steps a path is a name with dots in it: nothing that was called had arguments so deep."""

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
"""Of each phase, the parts of a file: the role of their tensors, and how the paths of these begin."""


class NestPath(NamedTuple):
    """Where a tensor stands in a file."""

    part: str
    path: str


def place_of(phase: str, role: str, path: str) -> NestPath | None:
    """Where a tensor of this role and path is put; None when such a file has no place for it.

    >>> place_of("forward", "output", "out.logits"), place_of("backward", "input", "out")
    (Place(part='output', path='logits'), Place(part='output', path=''))
    """
    best: NestPath | None = None
    for part, (of, beginning) in PARTS[phase].items():
        if of == role and (not beginning or path == beginning or path.startswith(f"{beginning}.")):
            place = NestPath(part, path[len(beginning) :].lstrip(".") if beginning else path)
            best = place if best is None or beginning else best  # `kwargs.mask` is no input called so
    return best


def role_of(phase: str, name: str) -> tuple[Role, str] | None:
    """The role and the path of a tensor by its name in a file; None when it is not one of a call.

    >>> role_of("forward", "output.logits"), role_of("forward", "input.0")
    (('output', 'out.logits'), ('input', '0'))
    """
    part, _, rest = name.partition(".")
    if part not in PARTS[phase]:
        return None
    role, beginning = PARTS[phase][part]
    if not beginning and not rest:
        return role, "0"  # a lone tensor where a tuple is meant
    return role, ".".join(filter(None, (beginning, rest)))


def nest(leaves: Mapping[str, Nest], depth: int = 0) -> Nest:
    """A nest in which each leaf stands at its path: tuples where all steps are numbers, else dicts.

    >>> nest({"0": 1, "2.a": 3})
    (1, None, {'a': 3})
    """
    if "" in leaves:
        return leaves[""]
    groups: dict[str, dict[str, Nest]] = {}
    for path, leaf in leaves.items():
        first, _, rest = path.partition(".") if depth < DEEPEST else (path, "", "")
        if rest and first in leaves:
            groups[path] = {"": leaf}  # one leaf below another: it had a dot in its key
        else:
            groups.setdefault(first, {})[rest] = leaf
    places = [numeral(key) for key in groups]
    if groups and all(place is not None and str(place) == key for key, place in zip(groups, places, strict=True)):
        length = max(place for place in places if place is not None) + 1
        if length <= 2 * len(groups) + 64:  # a dict of a few large numbers is no tuple
            inner = (groups.get(str(place)) for place in range(length))
            return tuple(None if group is None else nest(group, depth + 1) for group in inner)
    return {key: nest(group, depth + 1) for key, group in groups.items()}


def plain_leaves(args: str | None) -> dict[str, dict[str, Nest]]:
    """The arguments of a call that are no tensors, of `input` and of `kwargs`, by their paths."""
    try:
        found = read_plain(args) if args else {}
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    parts = {"input": found.get("args", []), "kwargs": found.get("kwargs", {})}
    return {part: dict(_leaves(value, "")) for part, value in parts.items()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Nest]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path and value != "<tensor>":
        yield path, value


def unwrap(content: Any) -> Any:
    """The dict of a file, also where hooktools has pickled an object with these attributes.

    Its newer objects are modules, which have a parameter registered as `gradient`, and its gradient as `gradient_grad`;
    the older ones had only the gradient, and called it `gradient`.
    """
    found = attributes(content)
    if found is None or "module_name" not in found:
        return content
    if "gradient" in content.state and "gradient_grad" not in found:
        found["gradient_grad"] = found.pop("gradient")
    return {key: value for key, value in found.items() if not key.startswith("_")}
