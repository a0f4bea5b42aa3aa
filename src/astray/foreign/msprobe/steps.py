"""One step of one rank of a dump, made into rows: the call of each entry, and which of its tensors is which.

`identities` says which call an entry is. Its inputs become rows before those of the entries inside of it, its outputs
after them, as they were seen.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from typing import Any

from astray.foreign.dump_rows import DumpRows
from astray.foreign.msprobe.arguments import gradient_paths
from astray.foreign.msprobe.files import frames
from astray.foreign.msprobe.identities import CallIdentifier, EntryFacts, count, forward_of
from astray.foreign.msprobe.names import Entry, by_keyword
from astray.foreign.msprobe.tensors import DumpTensor, Tensors, is_tensor, skeleton, walk
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
