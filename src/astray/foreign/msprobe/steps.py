"""One step of one rank of a dump → rows: the call of each entry, and the role and path of each of its tensors.

An entry's inputs become rows before those of the entries inside of it, its outputs after them, as they were observed.

`CallIdentifier` finds the site, micro step and number of each call, as astray would have recorded them: an entry's name
counts the calls of a function through the step, astray counts those of a site in a micro step. The module around a
function is in construct.json, at level mix. A function without one there was called by the outermost module, which
msprobe
leaves out, or by none: the stacks show which. Where construct.json has no micro steps, `micro_steps` derives them from
the order of forward and backward.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from astray.foreign.dump_rows import DumpRows
from astray.foreign.msprobe.files import frames, outermost_forward
from astray.foreign.msprobe.leaves import DumpTensor, LeafReader, is_tensor, skeleton, walk
from astray.foreign.msprobe.names import Entry, by_keyword, gradient_paths, parse
from astray.records import ROOT, Phase, Role
from astray.wording import counted, numeral


class StepReader:
    """Adds the entries of a step to the rows."""

    def __init__(self, rows: DumpRows, tensors: LeafReader, context: EntryContext, step: int) -> None:
        self.entries: dict[int, str] = {}  # the name of each call's entry
        self._rows, self._tensors, self._context, self._step = rows, tensors, context, step
        self._identities = CallIdentifier(context)
        self._data: dict[str, Any] = {}
        self._seqs: dict[str, int] = {}
        self._stacks: dict[int, int | None] = {}
        self._parameters: dict[str, dict[str, Any]] = {}
        self._unreadable: dict[str, None] = {}

    @property
    def known(self) -> Container[str]:
        """The names of the entries that were read; construct.json may have names of others."""
        return self._data

    def read(self, data: dict[str, Any], late: bool = False) -> None:
        """Read entries: those of dump.json, and later (`late`) those made from files that it does not mention."""
        names = dict.fromkeys([*([] if late else self._context.parents), *data])
        self._identities.add(names, data)
        self._unreadable |= dict.fromkeys(name for name in data if name not in self._identities.entries)
        self._data |= data
        order = dict.fromkeys(name for name in self._context.parents if name in data) if late else {}
        begun = set(self._seqs) if late else set()  # by construct.json, without their tensors
        for name in {**order, **data} or names:  # a dump of structure has only names
            self._begin(name)
            if name in begun:
                self._take_inputs(name)
            self._finish(name)

    def close(self) -> None:
        """Report the names that cannot be read."""
        if self._unreadable:
            self._rows.problem(
                f"{counted(len(self._unreadable), 'name')} of entries in step {self._step} cannot be read, the first "
                f"is {next(iter(self._unreadable))[:100]!r}: they are left out."
            )

    def _begin(self, name: str) -> None:
        """Add the call of an entry and its inputs, after the calls around it."""
        waiting: list[str] = []
        at: str | None = name
        while at is not None and at not in self._seqs and at not in waiting and at in self._identities.entries:
            waiting.append(at)
            at = self._identities.around(at)
        for outer in reversed(waiting):
            self._call(outer)

    def _call(self, name: str) -> None:
        entry = self._identities.entries[name]
        if entry.what == "gradient":
            return
        content = self._content(name)
        identity = self._identities.known[name]
        forward = forward_of(name) if entry.phase == "backward" else None
        parent = self._seqs.get(forward) if forward else self._seqs.get(self._identities.around(name) or "")
        type = self._extra(name, "type")
        seq = self._seqs[name] = self._rows.call(
            identity.site, type if isinstance(type, str) else entry.type,
            step=self._step, micro=identity.micro, kind=entry.kind, call=identity.call, phase=identity.phase,
            parent=parent, stack=self._stack(forward or name), args=_arguments(entry, content),
        )  # fmt: skip
        self.entries[seq] = name
        self._take_inputs(name)

    def _take_inputs(self, name: str) -> None:
        for role, tensor in self._inputs(name, self._identities.entries[name], self._content(name)):
            self._tensors.add(self._seqs[name], role, tensor.path, tensor.leaf)

    def _finish(self, name: str) -> None:
        entry = self._identities.entries.get(name)
        if entry is None:
            return
        content = self._content(name)
        if entry.what == "gradient":
            self._gradients(name, entry, content)
            return
        for tensor in self._outputs(name, entry, content):
            self._tensors.add(self._seqs[name], "output", tensor.path, tensor.leaf)

    def _inputs(self, name: str, entry: Entry, content: dict[str, Any]) -> Iterator[tuple[Role, DumpTensor]]:
        if entry.phase == "backward":
            for tensor in _results(content.get("input"), self._is_tuple(name, "input")):
                yield "input", tensor
            return
        for tensor in walk(content.get("input_args", content.get("input")), ""):
            yield "input", DumpTensor(self._path(name, entry, tensor.path), tensor.leaf)
        for tensor in walk(content.get("input_kwargs"), "kwargs"):
            yield "input", DumpTensor(self._path(name, entry, tensor.path), tensor.leaf)
        for tensor in walk(content.get("parameters"), ""):
            if self._has_changed(entry.path, tensor):
                yield "parameter", tensor

    def _path(self, name: str, entry: Entry, path: str) -> str:
        """The path of an argument in astray's records."""
        if entry.what != "function":
            return path
        arguments = self._extra(name, "arguments")
        head, dot, rest = path.partition(".")
        if head == "kwargs":
            word, dot, rest = rest.partition(".")
            head = f"kwargs.{word}"
        recorded = arguments.get(head) if isinstance(arguments, dict) else None
        return f"{recorded}{dot}{rest}" if isinstance(recorded, str) else by_keyword(entry.path, path)

    def _extra(self, name: str, key: str) -> Any:
        """What astray's writer has added about an entry."""
        extra = self._context.extras.get(name)
        return extra.get(key) if isinstance(extra, dict) else None

    def _has_changed(self, module: str, parameter: DumpTensor) -> bool:
        """Whether a parameter differs from the last call: unlike msprobe, astray records it again only then."""
        measured = {key: value for key, value in parameter.leaf.items() if key != "data_name"}
        name = f"{module}.{parameter.path}"
        if self._parameters.get(name) == measured and measured.get("Max") is not None:
            self._tensors.skip(parameter.leaf)
            return False
        self._parameters[name] = measured
        return True

    def _outputs(self, name: str, entry: Entry, content: dict[str, Any]) -> Iterator[DumpTensor]:
        if entry.phase == "forward":
            yield from _results(content.get("output"), self._is_tuple(name, "output"))
        elif entry.what == "module":
            yield from walk(content.get("output"), "")
        else:
            forward = self._data.get(forward_of(name))
            yield from gradient_paths(entry.path, content, forward, self._context.by_astray, self._extra(name, "nodes"))

    def _is_tuple(self, name: str, role: str) -> bool:
        """Whether a single result, or the single gradient of the results, is in a tuple of one."""
        if self._extra(name, f"{role} is a tuple") is True:
            return True
        results = self._content(forward_of(name)).get("output") if role == "input" else None
        return isinstance(results, (list, dict)) and len(results) > 1 and not is_tensor(results)

    def _gradients(self, name: str, entry: Entry, content: dict[str, Any]) -> None:
        module, identity = self._identities.path(entry.path), self._identities.known[name]
        for parameter, value in content.items():
            site = parameter if module == ROOT else f"{module}.{parameter}"
            for tensor in walk(value, ""):
                seq = self._rows.call(
                    site, "Parameter",
                    step=self._step, micro=identity.micro, kind="parameter", call=identity.call, phase="backward",
                )  # fmt: skip
                self.entries[seq] = name
                self._tensors.add(seq, "gradient", "grad", tensor.leaf)

    def _content(self, name: str) -> dict[str, Any]:
        content = self._data.get(name)
        if not isinstance(content, dict):
            if content is not None:
                self._unreadable[name] = None
            return {}
        return content

    def _stack(self, name: str) -> int | None:
        lines = self._context.stacks.get(name)
        if not lines:
            return None
        if id(lines) not in self._stacks:
            self._stacks[id(lines)] = self._rows.stack(frames(lines))
        return self._stacks[id(lines)]

    # -- values that the program saved -------------------------------------------------------------------------------

    def read_saved(self, data: dict[str, Any]) -> None:
        """Read the entries of debug.json: `name.0.debug`, and `name_grad.0.debug` for its gradient."""
        seqs: dict[str, int] = {}
        for name, value in data.items():
            stem, _, number = name.removesuffix(".debug").rpartition(".")
            count = numeral(number, 9)
            if not name.endswith(".debug") or not stem or count is None:
                self._unreadable[name] = None
                continue
            site = stem.removesuffix("_grad")
            forward = seqs.get(f"{site}.{number}.debug") if site != stem else None
            phase: Phase = "forward" if forward is None else "backward"
            leaves = list(walk(value, "out"))
            if forward is not None and not leaves:
                continue  # msprobe writes an empty entry where no gradient arrived
            seq = seqs[name] = self._rows.call(
                stem if forward is None else site, _class_of(value),
                step=self._step, micro=count_or(self._extra(name, "micro"), 0), kind="custom",
                call=count_or(self._extra(name, "call"), count), phase=phase, parent=forward,
                args=json.dumps({"args": [skeleton(value)]}) if forward is None else None,
            )  # fmt: skip
            self.entries[seq] = name
            for tensor in leaves:
                self._tensors.add(seq, "output" if forward is None else "input", tensor.path, tensor.leaf)


def _results(value: Any, is_tuple: bool) -> Iterator[DumpTensor]:
    """The tensors of a result. msprobe writes a single result as a list of one, like a tuple of one."""
    if isinstance(value, list) and len(value) == 1 and not is_tuple:
        value = value[0]
    elif isinstance(value, dict) and list(value) == ["0"] and not is_tuple:  # made from the names of files
        value = value["0"]
    yield from walk(value, "out")


def _arguments(entry: Entry, content: dict[str, Any]) -> str | None:
    if entry.phase != "forward" or not content:
        return None
    arguments = {"args": skeleton(content.get("input_args", content.get("input", []))) or []}
    if kwargs := skeleton(content.get("input_kwargs")):
        arguments["kwargs"] = kwargs
    return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False, default=str)


def _class_of(value: Any) -> str:
    if is_tensor(value):
        return "Tensor"
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return str(value["type"])
    return type(value).__name__


# -- which call an entry is --------------------------------------------------------------------------------------------

WRAPPER = "module"
"""The name of a model inside of torch's DistributedDataParallel, which astray leaves out of sites."""

OPTIMIZER = ("optimizer", "clip_grad")
"""The parents in construct.json of what an optimizer does."""


class EntryContext(NamedTuple):
    """What the files say of entries besides their content.

    parents, micros: from construct.json. stacks: from stack.json. extras: what astray's writer has added.
    by_astray: whether astray wrote the dump.
    """

    parents: dict[str, str | None]
    micros: dict[str, int]
    stacks: dict[str, list[str]]
    extras: dict[str, Any]
    by_astray: bool
    framework: str


class CallIdentity(NamedTuple):
    """Which call an entry is."""

    site: str
    micro: int
    call: int
    phase: Phase


class CallIdentifier:
    """Identifies the calls of entries, given the names of all of them."""

    def __init__(self, context: EntryContext) -> None:
        self.entries: dict[str, Entry] = {}
        self.known: dict[str, CallIdentity] = {}
        self._context = context
        self._micros = dict(context.micros)
        self._is_wrapped = False
        self._outermost_forwards: set[tuple[str, ...]] = set()
        self._stems: defaultdict[str, set[str]] = defaultdict(set)
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def add(self, names: Iterable[str], in_order: Iterable[str]) -> None:
        """Add names; `in_order` are those of dump.json, in its order."""
        names = list(names)
        self.entries |= {name: entry for name in names if (entry := parse(name, self._context.framework)) is not None}
        modules = [entry.path for entry in self.entries.values() if entry.what != "function"]
        self._is_wrapped = bool(modules) and all(path.split(".")[0] == WRAPPER for path in modules)
        self._outermost_forwards = {
            forward
            for name, entry in self.entries.items()
            if entry.what == "module" and self._context.parents.get(name, "") is None
            and (forward := outermost_forward(self._context.stacks.get(name, []))) is not None
        }  # fmt: skip
        for name, entry in self.entries.items():
            if entry.what == "function":
                self._stems[entry.path].add(name.rsplit(".", 2)[0])
        if not self._micros and not self._context.by_astray:
            self._micros = micro_steps(in_order, self.entries, self._context.parents)
        for name in names:
            self._identify(name)

    def around(self, name: str) -> str | None:
        """The entry that another lies in, by construct.json."""
        return self._context.parents.get(name)

    def path(self, path: str) -> str:
        """A module's path without the wrapper around the model."""
        if not self._is_wrapped:
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
        extra = self._context.extras.get(name)
        phase: Phase = "update" if self.around(name) in OPTIMIZER else entry.phase
        if isinstance(extra, dict):
            phase = extra["phase"] if extra.get("phase") in ("update", "backward") else phase
            site = extra["site"] if isinstance(extra.get("site"), str) else site
            micro, call = count_or(extra.get("micro"), micro), count_or(extra.get("call"), call)
        self.known[name] = CallIdentity(site, micro, call, phase)

    def _counts_within_sites(self, name: str, entry: Entry) -> bool:
        """Whether calls are counted here, because the number in the name does not count the calls of its site."""
        if name in self._micros:
            return True
        return entry.what == "function" and (bool(self._context.parents) or len(self._stems[entry.path]) > 1)

    def _site(self, entry: Entry, name: str) -> str:
        if entry.what != "function":
            return self.path(entry.path)
        around = self.around(name)
        parent = self.entries.get(around) if around else None
        if parent is not None:
            return f"{self.path(parent.path)}/{entry.path}"
        if around in OPTIMIZER:
            return f"{around}/{entry.path}"
        in_outermost = (
            name in self._context.parents
            and outermost_forward(self._context.stacks.get(name, [])) in self._outermost_forwards
        )
        return f"{ROOT if in_outermost else ''}/{entry.path}"


def forward_of(name: str) -> str:
    """The forward entry of a backward one."""
    head, separator, tail = name.rpartition(".backward")
    return f"{head}.forward{tail}" if separator else name


def count_or(value: object, default: int) -> int:
    """A value from a dump if it is a count, otherwise the default."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return value if is_count else default  # type: ignore[return-value]


def micro_steps(
    names: Iterable[str], entries: Mapping[str, Entry], parents: Mapping[str, str | None]
) -> dict[str, int]:
    """The micro steps of entries, by the order of dump.json; empty where there is only one.

    A dump counts calls through the whole step. Where the model's first module runs again after a backward, another
    forward of the model has begun: a new micro step. Forwards without a backward between them stay in one micro step,
    since they may be two calls in one forward; those that activation checkpointing repeats begin with another module.
    Backward calls have the micro step of their forward call, and are not in the result.
    """
    known = [name for name in names if name in entries]
    blocks = [
        (backward, list(block)) for backward, block in groupby(known, lambda name: entries[name].phase == "backward")
    ]
    outermost = {name: _outermost(name, entries, parents) for name in known}
    first = next((entry.path for entry in outermost.values() if entry is not None), None)
    micro_of: dict[str, int] = {}
    micro, after_backward, last = 0, False, -1
    for backward, block in blocks:
        numbers = [entry.number for name in block if (entry := outermost[name]) is not None and entry.path == first]
        if after_backward and -1 < last < max(numbers, default=-1):
            micro += 1
        last = max([last, *numbers])
        after_backward |= backward
        micro_of |= {name: micro for name in block if not backward or entries[name].what == "gradient"}
    return micro_of if micro else {}


def _outermost(name: str, entries: Mapping[str, Entry], parents: Mapping[str, str | None]) -> Entry | None:
    """The outermost module around a forward entry; None for other entries."""
    seen = set()
    while name not in seen and (parent := parents.get(name)) is not None and parent in entries:
        seen.add(name)
        name = parent
    entry = entries[name]
    return entry if entry.what == "module" and entry.phase == "forward" else None
