"""The rows of one step as the entries of msprobe's files: dump.json, construct.json, stack.json and debug.json.

A name counts the calls of a function through the whole step; a backward call bears the number of its forward call.
What the names and construct.json cannot say of a call (its micro step, that it was in the outermost module, which
msprobe leaves out) stands beside the entries under `astray`: msprobe passes over it, and our reader asks for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from astray.record import ROOT, Frame
from astray.store.msprobe.gradients import order_of
from astray.store.msprobe.leaves import Leaf, scalar
from astray.store.msprobe.names import GRADIENTS, function_stem, module_stem, positional, short

Row = dict[str, Any]

MOST_ITEMS = 1 << 16
"""No call has so many arguments; a list is not made that long because a path says so."""

OUTSIDE = ("optimizer", "op")
"""Kinds of calls that msprobe knows nothing of."""

OPTIMIZER = "optimizer"
"""What msprobe says functions inside of an optimizer's step lie in."""


class Place(NamedTuple):
    """Where a tensor stands: the entry, and the name that its file has there."""

    entry: str
    file: str


class StepEntries:
    """The entries of one step of one rank.

    >>> step = StepEntries(classes := {}, lost := Counter())
    >>> step.call(rows.calls.row(0), frames)
    >>> step.tensor(rows.tensors.row(0), leaf)
    Place(entry='Module.head.Linear.forward.0', file='Module.head.Linear.forward.0.input.0.pt')
    >>> step.data, step.construct(), step.stacks(), step.debug, step.told

    classes: the class of each module by its site, kept from step to step.
    changed: the entries of `data` that are not as they were; whoever writes them clears it.
    """

    def __init__(self, classes: dict[str, str], lost: Counter[str]) -> None:
        self.data: dict[str, dict[str, Any]] = {}
        self.debug: dict[str, Any] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.changed: set[str] = set()
        self._classes, self._lost = classes, lost
        self._calls: dict[int, Row] = {}
        self._names: dict[int, str | None] = {}  # of the entry of each call; None where it has none
        self._named: dict[tuple[str, int, int], str] = {}  # forward entries by site, micro step and call
        self._within: dict[int, str | None] = {}  # the entry of the module that a call is or lies in
        self._parents: dict[str, str | None] = {}
        self._stacks: dict[tuple[str, ...], list[str]] = {}
        self._numbers: Counter[str] = Counter()
        self._read: Counter[str] = Counter()  # how many calls of a site a reader would have counted
        self._tuples: set[str] = set()

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, row: Row, frames: Sequence[Frame]) -> str | None:
        """Take a call, before its tensors, and give the name of its entry; None where it has none of its own."""
        seq = row["seq"]
        if seq in self._calls:
            return self._names[seq]
        self._calls[seq] = row
        name = self._names[seq] = self._name(row, frames[0].code if frames else "")
        is_module = row["kind"] == "module"
        around = self._within.get(row["parent"]) if row["parent"] is not None else None
        if row["phase"] == "update" and around is None:
            around = OPTIMIZER
        self._within[seq] = name if is_module and row["phase"] == "forward" else around
        if is_module and row["site"] != ROOT:
            self._classes[row["site"]] = row["type"]
        if name is None or row["recompute"] or row["kind"] in ("custom", "parameter"):
            return name
        self._parents.setdefault(name, around if row["phase"] != "backward" else self._backward_parent(name))
        if row["phase"] != "backward":
            self._tell(name, row, around)
            self._begin(name, row)
            if frames:
                lines = tuple(f"File {one.file}, line {one.line}, in {one.function}, \n {one.code}" for one in frames)
                self._stacks.setdefault(lines, []).append(name)
        return name

    def _name(self, row: Row, code: str) -> str | None:
        kind, site, phase = row["kind"], row["site"], row["phase"]
        if kind == "custom":
            return self._saved(row)
        if kind == "parameter":
            return None  # its entry is its module's; see `_gradient`
        if kind in OUTSIDE:
            self._lost[f"a call of kind {kind}"] += 1
            return None
        if row["recompute"]:
            self._lost["a call that was made again for the backward"] += 1
            return self._named.get((site, row["micro"], row["call"]))
        if kind == "module" and site == ROOT:
            self._lost["a call of the outermost module"] += 1
            return None
        if phase == "backward":
            forward = self._forward(row)
            if forward is None:
                self._lost["a backward call whose forward call is not there"] += 1
            return forward and _turned(forward)
        line = "" if phase == "update" else code  # which is that of `optimizer.step()`
        stem = module_stem(site, row["type"]) if kind == "module" else function_stem(row["type"], line)
        if stem is None:
            self._lost["a call of a function that is not torch's"] += 1
            return None
        number = self._numbers[stem]
        self._numbers[stem] += 1
        name = f"{stem}.forward.{number}" if kind == "module" else f"{stem}.{number}.forward"
        self._named[site, row["micro"], row["call"]] = name
        return name

    def _forward(self, row: Row) -> str | None:
        if row["parent"] in self._names:
            return self._names[row["parent"]]
        return self._named.get((row["site"], row["micro"], row["call"]))

    def _backward_parent(self, name: str) -> str | None:
        parent = self._parents.get(_turned(name, back=True))
        return parent and _turned(parent)

    def _tell(self, name: str, row: Row, around: str | None) -> None:
        """Note what a reader could not tell from the name."""
        if row["kind"] == "module":
            guess = row["site"], 0, int(name.rpartition(".")[2])
        else:
            module = around.rpartition(".forward.")[0].partition(".")[2].rpartition(".")[0] if around else ""
            module = around if around == OPTIMIZER else module
            site = f"{module}/{short(row['type'])}"
            guess = site, 0, self._read[site]
            self._read[site] += 1
        if guess != (row["site"], row["micro"], row["call"]):
            self.told[name] = {"site": row["site"], "micro": row["micro"], "call": row["call"]}
        if row["phase"] == "update":
            self.told.setdefault(name, {})["phase"] = "update"  # construct.json may not be there to say it

    def _begin(self, name: str, row: Row) -> None:
        """An entry with the arguments of its call that are no tensors."""
        try:
            said = json.loads(row["args"] or "{}")
        except (ValueError, RecursionError):
            said = {}
        said = said if isinstance(said, dict) else {}
        args, kwargs = said.get("args"), said.get("kwargs")
        args = args if isinstance(args, list) else []
        kwargs = kwargs if isinstance(kwargs, dict) else {}
        function = short(row["type"]) if row["kind"] == "function" else ""
        self.changed.add(name)
        self.data[name] = {
            "input_args": [self._plain(one) for one in args],
            "input_kwargs": {
                word: self._plain(one)
                for word, one in kwargs.items()
                if one != "<tensor>" or positional(function, f"kwargs.{word}").startswith("kwargs.")
            },
            "output": [],
        } | ({"parameters": {}} if row["kind"] == "module" else {})

    def _plain(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._plain(one) for one in value]
        if isinstance(value, dict):
            return {word: self._plain(one) for word, one in value.items()}
        return None if value == "<tensor>" else scalar(value, self._lost)

    def _saved(self, row: Row) -> str:
        suffix = "_grad" if row["phase"] == "backward" else ""
        stem = f"{row['site']}{suffix}"
        number = self._numbers[f"debug {stem}"]
        self._numbers[f"debug {stem}"] += 1
        name = f"{stem}.{number}.debug"
        self.debug.setdefault(name, None)
        if (row["micro"], row["call"]) != (0, number):
            self.told[name] = {"site": row["site"], "micro": row["micro"], "call": row["call"]}
        return name

    # -- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, row: Row, leaf: Leaf) -> Place | None:
        """Put a tensor in its place, and give it; None where msprobe has no place for it, which is counted."""
        call = self._calls.get(row["seq"])
        if call is None:
            self._lost["a tensor whose call is not there"] += 1
            return None
        if call["kind"] == "parameter":
            return self._gradient(call, row["path"], leaf)
        name = self._names[row["seq"]]
        if name is None or call["recompute"]:  # its call has been counted
            return None
        if call["kind"] == "custom":
            return self._put_saved(name, row["path"], leaf)
        category, parts = self._where(call, row["role"], row["path"])
        if not parts or any(part.isdigit() and int(part) >= MOST_ITEMS for part in parts):
            self._lost[category] += 1
            return None
        self.changed.add(name)
        entry = self.data.setdefault(name, {"input": [], "output": []})
        keys = {"input": ("input_args" if call["phase"] != "backward" else "input"), "kwargs": "input_kwargs"}
        _put(entry.setdefault(keys.get(category, category), []), parts, leaf)
        if row["role"] == "output":  # in the order in which they end: a module after what is inside of it
            self.data[name] = self.data.pop(name)
        return Place(name, f"{name}.{category}.{'.'.join(parts)}")

    def _where(self, call: Row, role: str, path: str) -> tuple[str, list[str]]:
        """The category of a file's name and the path in it; of what msprobe has no place for, what it is."""
        forward = call["phase"] != "backward"
        if role == "parameter":
            return "parameters", [path]
        if role not in ("input", "output"):
            return "a buffer of a module" if role == "state" else f"a tensor of role {role}", []
        if path == "out" or path.startswith("out."):
            rest = path.split(".")[1:]
            if rest and rest[0] == "0":
                self._tuples.add(f"{self._names[call['seq']]} {role}")
            return role, rest if rest and rest[0].isdigit() else ["0", *rest]
        if call["kind"] == "function":
            order = order_of(short(call["type"])) if not forward else None
            is_ordered = order is not None and path in order
            path = str(order.index(path)) if order and is_ordered else positional(short(call["type"]), path)
        if not path.startswith("kwargs."):
            return role, path.split(".")
        return ("kwargs", path.split(".")[1:]) if forward else ("the gradient of an argument given by keyword", [])

    def _gradient(self, call: Row, path: str, leaf: Leaf) -> Place | None:
        if path != "grad":
            self._lost["what one backward added to a gradient"] += 1
            return None
        module, _, parameter = call["site"].rpartition(".")
        while module and module not in self._classes:
            module, _, inner = module.rpartition(".")
            parameter = f"{inner}.{parameter}"
        if not module:
            self._lost["the gradient of a parameter whose module has no entry"] += 1
            return None
        stem = f"{module_stem(module, self._classes[module])}.{GRADIENTS}"
        number = self._numbers[f"gradient {call['site']}"]
        self._numbers[f"gradient {call['site']}"] += 1
        name = f"{stem}.{number}"
        self.changed.add(name)
        self.data.setdefault(name, {})[parameter] = [leaf]
        if (call["micro"], call["call"]) != (0, number):
            self.told[name] = {"micro": call["micro"], "call": call["call"]}
        return Place(name, f"{name}.{parameter}")

    def _put_saved(self, name: str, path: str, leaf: Leaf) -> Place:
        rest = path.split(".")[1:]
        holder = [self.debug[name]]
        _put(holder, ["0", *rest], leaf)
        self.debug[name] = holder[0]
        return Place(name, ".".join([name, *rest]))

    # -- the other files ---------------------------------------------------------------------------------------------

    def construct(self) -> dict[str, str | None]:
        """Which entry lies in which."""
        known = {*self._parents, OPTIMIZER}
        return {name: parent if parent in known else None for name, parent in self._parents.items()}

    def around(self, name: str) -> list[str]:
        """The entries that an entry lies in, the innermost first."""
        found: list[str] = []
        parent = self._parents.get(name)
        while parent is not None and parent not in found:
            found.append(parent)
            parent = self._parents.get(parent)
        return found

    def stacks(self) -> dict[str, list[list[str]]]:
        """The lines of each distinct stack, and the entries that were called from there."""
        return {str(number): [names, list(lines)] for number, (lines, names) in enumerate(self._stacks.items())}

    def beside(self) -> dict[str, dict[str, Any]]:
        """What names do not tell of an entry."""
        found = {name: dict(told) for name, told in self.told.items()}
        for one in sorted(self._tuples):
            name, _, role = one.rpartition(" ")
            if len(self.data.get(name, {}).get(role, ())) == 1:
                found.setdefault(name, {})[f"{role} is a tuple"] = True
        return found


def _turned(name: str, back: bool = False) -> str:
    """The backward entry of a forward one, or the other way round."""
    old, new = ("backward", "forward") if back else ("forward", "backward")
    head, found, tail = name.rpartition(f".{old}")
    return f"{head}.{new}{tail}" if found else name


def _put(into: Any, parts: Sequence[str], leaf: Leaf) -> None:
    """Put a leaf where a path leads, making lists and dicts on the way."""
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if isinstance(into, list):
            if not part.isdigit():
                return  # a structure that its own skeleton contradicts
            index: Any = int(part)
            into.extend([None] * (index + 1 - len(into)))
            held = into[index]
        else:
            index, held = part, into.get(part)
        if last:
            into[index] = leaf
            return
        if not isinstance(held, (list, dict)) or "dtype" in held:
            held = into[index] = [] if parts[place + 1].isdigit() else {}
        into = held
