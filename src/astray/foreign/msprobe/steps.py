"""One step of one rank of a dump → rows: the call of each entry, and the role and path of each of its tensors.

An entry's inputs become rows before those of the entries inside of it, its outputs after them, as they were observed.

`CallIdentifier` finds the site, micro step and number of each call, as astray would have recorded them: an entry's name
counts the calls of a function through the step, astray counts those of a site in a micro step. The module around a
function is in construct.json, at level mix. A function without one there was called by the outermost module, which
msprobe
leaves out, or by none: the stacks tell which. Where construct.json has no micro steps, `micro_steps` derives them from
the order of forward and backward.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from astray.foreign.dump_rows import DumpRows
from astray.foreign.msprobe.arguments import gradient_paths
from astray.foreign.msprobe.files import caller, frames
from astray.foreign.msprobe.leaves import DumpTensor, Tensors, is_tensor, skeleton, walk
from astray.foreign.msprobe.names import Entry, by_keyword, parse
from astray.records import ROOT, Phase, Role
from astray.wording import counted, numeral


class StepReader:
    """Reads the entries of a step."""

    def __init__(self, rows: DumpRows, tensors: Tensors, said: EntryFacts, step: int) -> None:
        self.entries: dict[int, str] = {}  # the name of each call's entry
        self._rows, self._tensors, self._said, self._step = rows, tensors, said, step
        self._identities = CallIdentifier(said)
        self._data: dict[str, Any] = {}
        self._seqs: dict[str, int] = {}
        self._stacks: dict[int, int | None] = {}
        self._parameters: dict[str, dict[str, Any]] = {}
        self._odd: dict[str, None] = {}

    @property
    def known(self) -> Container[str]:
        """The names of the entries that were read. Of others construct.json may tell, and nothing else."""
        return self._data

    def read(self, data: dict[str, Any], late: bool = False) -> None:
        """Read entries: those of dump.json, and later those that files without one were made into."""
        names = dict.fromkeys([*([] if late else self._said.parents), *data])
        self._identities.learn(names, data)
        self._odd |= dict.fromkeys(name for name in data if name not in self._identities.entries)
        self._data |= data
        order = dict.fromkeys(name for name in self._said.parents if name in data) if late else {}
        empty = set(self._seqs) if late else set()  # begun without their tensors
        for name in {**order, **data} or names:  # of a structure alone there are only names
            self._begin(name)
            if name in empty:
                self._take_inputs(name)
            self._finish(name)

    def close(self) -> None:
        """Say which entries were odd."""
        if self._odd:
            self._rows.problem(
                f"{counted(len(self._odd), 'name')} of entries in step {self._step} cannot be read, the first is "
                f"{next(iter(self._odd))[:100]!r}: they are left out."
            )

    def _begin(self, name: str) -> None:
        """Add the call of an entry and what goes into it, after those around it."""
        waiting: list[str] = []
        at: str | None = name
        while at is not None and at not in self._seqs and at not in waiting and at in self._identities.entries:
            waiting.append(at)
            at = self._identities.around(at)
        for one in reversed(waiting):
            self._call(one)

    def _call(self, name: str) -> None:
        entry = self._identities.entries[name]
        if entry.what == "gradient":
            return
        content = self._content(name)
        identity = self._identities.known[name]
        forward = forward_of(name) if entry.phase == "backward" else None
        parent = self._seqs.get(forward) if forward else self._seqs.get(self._identities.around(name) or "")
        type = self._told(name, "type")
        seq = self._seqs[name] = self._rows.call(
            identity.site, type if isinstance(type, str) else entry.type,
            step=self._step, micro=identity.micro, kind=entry.kind, call=identity.call, phase=identity.phase,
            parent=parent, stack=self._stack(forward or name), args=_arguments(entry, content),
        )  # fmt: skip
        self.entries[seq] = name
        self._take_inputs(name)

    def _take_inputs(self, name: str) -> None:
        for role, found in self._inputs(name, self._identities.entries[name], self._content(name)):
            self._tensors.add(self._seqs[name], role, found.path, found.leaf)

    def _finish(self, name: str) -> None:
        entry = self._identities.entries.get(name)
        if entry is None:
            return
        content = self._content(name)
        if entry.what == "gradient":
            self._gradients(name, entry, content)
            return
        for found in self._outputs(name, entry, content):
            self._tensors.add(self._seqs[name], "output", found.path, found.leaf)

    def _inputs(self, name: str, entry: Entry, content: dict[str, Any]) -> Iterator[tuple[Role, DumpTensor]]:
        if entry.phase == "backward":
            for found in _results(content.get("input"), self._is_tuple(name, "input")):
                yield "input", found
            return
        for found in walk(content.get("input_args", content.get("input")), ""):
            yield "input", DumpTensor(self._path(name, entry, found.path), found.leaf)
        for found in walk(content.get("input_kwargs"), "kwargs"):
            yield "input", DumpTensor(self._path(name, entry, found.path), found.leaf)
        for found in walk(content.get("parameters"), ""):
            if self._has_changed(entry.path, found):
                yield "parameter", found

    def _path(self, name: str, entry: Entry, path: str) -> str:
        """The path of an argument as astray sees it."""
        if entry.what != "function":
            return path
        told = self._told(name, "arguments")
        head, dot, rest = path.partition(".")
        if head == "kwargs":
            word, dot, rest = rest.partition(".")
            head = f"kwargs.{word}"
        known = told.get(head) if isinstance(told, dict) else None
        return f"{known}{dot}{rest}" if isinstance(known, str) else by_keyword(entry.path, path)

    def _told(self, name: str, what: str) -> Any:
        """What our own writer has told of an entry."""
        told = self._said.beside.get(name)
        return told.get(what) if isinstance(told, dict) else None

    def _has_changed(self, module: str, found: DumpTensor) -> bool:
        """Whether a parameter is not as it was at the last call: astray, unlike msprobe, has it again only then."""
        measured = {name: one for name, one in found.leaf.items() if name != "data_name"}
        place = f"{module}.{found.path}"
        if self._parameters.get(place) == measured and measured.get("Max") is not None:
            self._tensors.pass_over(found.leaf)
            return False
        self._parameters[place] = measured
        return True

    def _outputs(self, name: str, entry: Entry, content: dict[str, Any]) -> Iterator[DumpTensor]:
        if entry.phase == "forward":
            yield from _results(content.get("output"), self._is_tuple(name, "output"))
        elif entry.what == "module":
            yield from walk(content.get("output"), "")
        else:
            forward = self._data.get(forward_of(name))
            yield from gradient_paths(entry.path, content, forward, self._said.by_us, self._told(name, "nodes"))

    def _is_tuple(self, name: str, role: str) -> bool:
        """Whether a single result, or a single gradient that came to the results, is one of a tuple."""
        told = self._said.beside.get(name)
        if isinstance(told, dict) and told.get(f"{role} is a tuple") is True:
            return True
        results = self._content(forward_of(name)).get("output") if role == "input" else None
        return isinstance(results, (list, dict)) and len(results) > 1 and not is_tensor(results)

    def _gradients(self, name: str, entry: Entry, content: dict[str, Any]) -> None:
        module, identity = self._identities.path(entry.path), self._identities.known[name]
        for parameter, said in content.items():
            site = parameter if module == ROOT else f"{module}.{parameter}"
            for found in walk(said, ""):
                seq = self._rows.call(
                    site, "Parameter",
                    step=self._step, micro=identity.micro, kind="parameter", call=identity.call, phase="backward",
                )  # fmt: skip
                self.entries[seq] = name
                self._tensors.add(seq, "gradient", "grad", found.leaf)

    def _content(self, name: str) -> dict[str, Any]:
        content = self._data.get(name)
        if not isinstance(content, dict):
            if content is not None:
                self._odd[name] = None
            return {}
        return content

    def _stack(self, name: str) -> int | None:
        lines = self._said.stacks.get(name)
        if not lines:
            return None
        if id(lines) not in self._stacks:
            self._stacks[id(lines)] = self._rows.stack(frames(lines))
        return self._stacks[id(lines)]

    # -- what the user saved -----------------------------------------------------------------------------------------

    def read_saved(self, data: dict[str, Any]) -> None:
        """Read the entries of debug.json: `name.0.debug`, and `name_grad.0.debug` for its gradient."""
        seqs: dict[str, int] = {}
        for name, value in data.items():
            stem, _, number = name.removesuffix(".debug").rpartition(".")
            place = numeral(number, 9)
            if not name.endswith(".debug") or not stem or place is None:
                self._odd[name] = None
                continue
            site = stem.removesuffix("_grad")
            forward = seqs.get(f"{site}.{number}.debug") if site != stem else None
            phase: Phase = "forward" if forward is None else "backward"
            told = self._said.beside.get(name)
            told = told if isinstance(told, dict) else {}
            leaves = list(walk(value, "out"))
            if forward is not None and not leaves:
                continue  # msprobe writes an empty one for what no gradient came to
            seq = seqs[name] = self._rows.call(
                stem if forward is None else site, _class_of(value),
                step=self._step, micro=count(told.get("micro"), 0), kind="custom",
                call=count(told.get("call"), place), phase=phase, parent=forward,
                args=json.dumps({"args": [skeleton(value)]}) if forward is None else None,
            )  # fmt: skip
            self.entries[seq] = name
            for found in leaves:
                self._tensors.add(seq, "output" if forward is None else "input", found.path, found.leaf)


def _results(value: Any, is_tuple: bool) -> Iterator[DumpTensor]:
    """The tensors of a result. msprobe has it in a list of one, which a tuple of one is, too."""
    if isinstance(value, list) and len(value) == 1 and not is_tuple:
        value = value[0]
    elif isinstance(value, dict) and list(value) == ["0"] and not is_tuple:  # made from the names of files
        value = value["0"]
    yield from walk(value, "out")


def _arguments(entry: Entry, content: dict[str, Any]) -> str | None:
    if entry.phase != "forward" or not content:
        return None
    said = {"args": skeleton(content.get("input_args", content.get("input", []))) or []}
    if kwargs := skeleton(content.get("input_kwargs")):
        said["kwargs"] = kwargs
    return json.dumps(said, separators=(",", ":"), ensure_ascii=False, default=str)


def _class_of(value: Any) -> str:
    if is_tensor(value):
        return "Tensor"
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return str(value["type"])
    return type(value).__name__


# -- which call an entry is --------------------------------------------------------------------------------------------

WRAPPER = "module"
"""What a model is called inside of torch's DistributedDataParallel; astray sees through that."""

OPTIMIZER = ("optimizer", "clip_grad")
"""What construct.json calls the surroundings of what an optimizer does."""


class EntryFacts(NamedTuple):
    """What the files beside dump.json say of its entries."""

    parents: dict[str, str | None]
    micros: dict[str, int]
    stacks: dict[str, list[str]]
    beside: dict[str, Any]
    """What our own writer adds to that."""
    by_us: bool
    framework: str


class CallIdentity(NamedTuple):
    """Which call an entry is."""

    site: str
    micro: int
    call: int
    phase: Phase


class CallIdentifier:
    """Tells which calls entries are, once it has been told of all of them."""

    def __init__(self, said: EntryFacts) -> None:
        self.entries: dict[str, Entry] = {}
        self.known: dict[str, CallIdentity] = {}
        self._said = said
        self._micros = dict(said.micros)
        self._strip = False
        self._callers: set[tuple[str, ...]] = set()
        self._spellings: defaultdict[str, set[str]] = defaultdict(set)
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def learn(self, names: Iterable[str], in_order: Iterable[str]) -> None:
        """Take more names; `in_order` are those of dump.json, in its order."""
        names = list(names)
        self.entries |= {name: entry for name in names if (entry := parse(name, self._said.framework)) is not None}
        modules = [entry.path for entry in self.entries.values() if entry.what != "function"]
        self._strip = bool(modules) and all(path.split(".")[0] == WRAPPER for path in modules)
        self._callers = {
            found
            for name, entry in self.entries.items()
            if entry.what == "module" and self._said.parents.get(name, "") is None
            and (found := caller(self._said.stacks.get(name, []))) is not None
        }  # fmt: skip
        for name, entry in self.entries.items():
            if entry.what == "function":
                self._spellings[entry.path].add(name.rsplit(".", 2)[0])
        if not self._micros and not self._said.by_us:
            self._micros = micro_steps(in_order, self.entries, self._said.parents)
        for name in names:
            self._identify(name)

    def around(self, name: str) -> str | None:
        """The entry that another lies in, by construct.json."""
        return self._said.parents.get(name)

    def path(self, path: str) -> str:
        """A module's path, without that of a wrapper around the model."""
        if not self._strip:
            return path
        return path[len(WRAPPER) + 1 :] or ROOT

    def _identify(self, name: str) -> None:
        entry = self.entries.get(name)
        if entry is None or name in self.known:
            return
        forward = forward_of(name) if entry.phase == "backward" and entry.what != "gradient" else None
        if forward is not None and forward in self.entries:
            self._identify(forward)
            self.known[name] = self.known[forward]._replace(phase="backward")
            return
        micro = self._micros.get(name, 0)
        site = self._site(entry, name)
        counter = site, micro, entry.what
        call = self._counts[counter] if self._counts_within_sites(name, entry) else entry.number
        self._counts[counter] += 1
        told = self._said.beside.get(name)
        phase: Phase = "update" if self.around(name) in OPTIMIZER else entry.phase
        if isinstance(told, dict):
            phase = told["phase"] if told.get("phase") in ("update", "backward") else phase
            site = told["site"] if isinstance(told.get("site"), str) else site
            micro, call = count(told.get("micro"), micro), count(told.get("call"), call)
        self.known[name] = CallIdentity(site, micro, call, phase)

    def _counts_within_sites(self, name: str, entry: Entry) -> bool:
        """Whether the number in the name is of more, or of fewer, than the calls of its site."""
        if name in self._micros:
            return True
        return entry.what == "function" and (bool(self._said.parents) or len(self._spellings[entry.path]) > 1)

    def _site(self, entry: Entry, name: str) -> str:
        if entry.what != "function":
            return self.path(entry.path)
        around = self.around(name)
        parent = self.entries.get(around) if around else None
        if parent is not None:
            return f"{self.path(parent.path)}/{entry.path}"
        if around in OPTIMIZER:
            return f"{around}/{entry.path}"
        in_outermost = name in self._said.parents and caller(self._said.stacks.get(name, [])) in self._callers
        return f"{ROOT if in_outermost else ''}/{entry.path}"


def forward_of(name: str) -> str:
    """The forward entry of a backward one."""
    head, found, tail = name.rpartition(".backward")
    return f"{head}.forward{tail}" if found else name


def count(said: object, otherwise: int) -> int:
    """A count that a dump tells, if it is one."""
    is_count = isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 1 << 31
    return said if is_count else otherwise  # type: ignore[return-value]


def micro_steps(
    names: Iterable[str], entries: Mapping[str, Entry], parents: Mapping[str, str | None]
) -> dict[str, int]:
    """The micro steps of entries in the order of dump.json; empty where there is only one.

    A dump counts calls through the whole step. Where the model's first module runs again after a backward, another
    forward of the model has begun: a new micro step. Forwards without a backward between them stay in one, since they
    may be two calls in one forward; those that activation checkpointing repeats begin with another module. Backward
    calls have the micro step of their forward call, and are not in the result.
    """
    known = [name for name in names if name in entries]
    blocks = [
        (backward, list(block)) for backward, block in groupby(known, lambda name: entries[name].phase == "backward")
    ]
    outermost = {name: _outermost(name, entries, parents) for name in known}
    first = next((entry.path for entry in outermost.values() if entry is not None), None)
    found: dict[str, int] = {}
    micro, after_backward, last = 0, False, -1
    for backward, block in blocks:
        numbers = [entry.number for name in block if (entry := outermost[name]) is not None and entry.path == first]
        if after_backward and -1 < last < max(numbers, default=-1):
            micro += 1
        last = max([last, *numbers])
        after_backward |= backward
        found |= {name: micro for name in block if not backward or entries[name].what == "gradient"}
    return found if micro else {}


def _outermost(name: str, entries: Mapping[str, Entry], parents: Mapping[str, str | None]) -> Entry | None:
    """The outermost module around a forward entry; None of others."""
    seen = set()
    while name not in seen and (parent := parents.get(name)) is not None and parent in entries:
        seen.add(name)
        name = parent
    entry = entries[name]
    return entry if entry.what == "module" and entry.phase == "forward" else None
