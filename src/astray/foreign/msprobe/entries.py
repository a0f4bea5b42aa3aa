"""The rows of one step as the entries of msprobe's files: dump.json, construct.json, stack.json and debug.json.

A name counts the calls of a function through the whole step; a backward call bears the number of its forward call.
What the names and construct.json cannot say of a call (its micro step, that it was in the outermost module, which
msprobe leaves out) stands beside the entries under `astray`: msprobe passes over it, and our reader asks for it. In a
recording for these files a function's backward has the gradients of its last node, as msprobe has them, and those of
its arguments that are not among them under `gradients`, which msprobe passes over, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from astray.foreign.msprobe.arguments import NODE, OWN, arrangement, order_of
from astray.foreign.msprobe.leaves import DEEPEST, Leaf, scalar
from astray.foreign.msprobe.names import GRADIENTS, by_keyword, function_stem, module_stem, parse, positional, short
from astray.records import ROOT, Frame, SpelledFrame, Spelling
from astray.safe_text import read_plain
from astray.wording import numeral

Row = dict[str, Any]

MOST_ITEMS = 1 << 16
"""No call has so many arguments; a list is not made that long because a path says so."""

TENSOR = "<tensor>"
"""What stands for a tensor among the arguments of a call."""

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

OPTIMIZER = "optimizer"
"""What msprobe says functions inside of an optimizer's step lie in."""


class EntryPlace(NamedTuple):
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
    wrapped: what msprobe calls the modules of a model that is wrapped, such as `module.head` for `head`.
    only_names: nothing is put into entries, for those who ask what things are called and no more.
    changed: the entries of `data` that are not as they were; whoever writes them clears it.
    """

    def __init__(
        self,
        classes: dict[str, str],
        lost: Counter[str],
        wrapped: Mapping[str, str] | None = None,
        only_names: bool = False,
    ) -> None:
        self.data: dict[str, dict[str, Any]] = {}
        self.debug: dict[str, Any] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.changed: set[str] = set()
        self._classes, self._lost, self._wrapped = classes, lost, wrapped or {}
        self._only_names = only_names
        self._calls: dict[int, Row] = {}
        self._names: dict[int, str | None] = {}  # of the entry of each call; None where it has none
        self._named: dict[tuple[str, int, int], str] = {}  # forward entries by site, micro step and call
        self._within: dict[int, str | None] = {}  # the entry of the module that a call is or lies in
        self._parents: dict[str, str | None] = {}
        self._stacks: dict[tuple[str, ...], list[str]] = {}
        self._numbers: Counter[str] = Counter()
        self._read: Counter[str] = Counter()  # how many calls of a site a reader would have counted
        self._tuples: set[str] = set()
        self._given: dict[int, dict[str, str]] = {}  # where msprobe has the arguments of a call, by where we have them
        self._nodes: dict[str, _Node] = {}  # of backward entries

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, row: Row, frames: Sequence[Frame]) -> str | None:
        """Take a call, before its tensors, and give the name of its entry; None where it has none of its own."""
        seq = row["seq"]
        if seq in self._calls:
            return self._names[seq]
        self._calls[seq] = row
        spelling = frames[0].spelling if frames and isinstance(frames[0], SpelledFrame) else None
        arguments = NO_ARGUMENTS if self._only_names and spelling is None else _arguments(row)
        name = self._names[seq] = self._name(row, frames[0].code if frames else "", arguments, spelling)
        is_module = row["kind"] == "module"
        around = self._within.get(row["parent"]) if row["parent"] is not None else None
        if row["phase"] == "update" and around is None:
            around = OPTIMIZER
        self._within[seq] = name if is_module and row["phase"] == "forward" else around
        if is_module and (row["site"] != ROOT or ROOT in self._wrapped):
            self._classes[row["site"]] = row["type"]
        if name is None or row["recompute"] or row["kind"] in ("custom", "parameter"):
            return name
        ahead = row["phase"] != "backward" or row["kind"] == "op"
        self._parents.setdefault(name, around if ahead else self._backward_parent(name))
        if ahead and not self._only_names:
            self._begin(name, row, arguments, spelling)
            self._tell(name, row, around)
            if frames:
                lines = tuple(f"File {one.file}, line {one.line}, in {one.function}, \n {one.code}" for one in frames)
                self._stacks.setdefault(lines, []).append(name)
        return name

    def _name(self, row: Row, code: str, arguments: EntryArguments, spelling: Spelling | None) -> str | None:
        kind, site, phase = row["kind"], row["site"], row["phase"]
        if kind == "custom":
            return self._saved(row)
        if kind == "parameter":
            return None  # its entry is its module's; see `_gradient`
        if kind == "optimizer":
            self._lost["a call of kind optimizer"] += 1
            return None
        if row["recompute"]:
            self._lost["a call that was made again for the backward"] += 1
            return self._named.get((site, row["micro"], row["call"]))
        if kind == "module" and site == ROOT and ROOT not in self._wrapped:
            self._lost["a call of the outermost module"] += 1
            return None
        if phase == "backward" and kind != "op":
            forward = self._forward(row)
            if forward is None:
                self._lost["a backward call whose forward call is not there"] += 1
            return (forward and not self._drops_nothing(row) and _turned(forward)) or None
        line = "" if phase == "update" else code  # which is that of `optimizer.step()`
        number_follows = len(arguments.args) > 1 and arguments.args[1] != TENSOR
        if kind == "module":
            stem: str | None = module_stem(self._wrapped.get(site, site), row["type"])
        else:
            stem = function_stem(row["type"], line, spelling, number_follows)
        if stem is None:
            self._lost["a call of a function that is not torch's"] += 1
            return None
        number = self._numbers[stem]
        self._numbers[stem] += 1
        name = f"{stem}.forward.{number}" if kind == "module" else f"{stem}.{number}.forward"
        if phase != "backward":
            self._named[site, row["micro"], row["call"]] = name
        return name

    def _forward(self, row: Row) -> str | None:
        if row["parent"] in self._names:
            return self._names[row["parent"]]
        return self._named.get((row["site"], row["micro"], row["call"]))

    def _drops_nothing(self, row: Row) -> bool:
        """Whether it is the backward of a dropout of nothing, which msprobe leaves out: it hands on what it got."""
        forward = self._calls.get(row["parent"])
        name = short(row["type"])
        return forward is not None and name in DROPOUTS and _arguments(forward).kwargs.get("p") == 0

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
        if row["phase"] in ("update", "backward"):
            self.told.setdefault(name, {})["phase"] = row["phase"]  # construct.json may not be there to say it
        entry = parse(name)
        if entry is not None and row["kind"] != "module" and entry.type != row["type"]:
            self.told.setdefault(name, {})["type"] = row["type"]
        given = self._given.get(row["seq"], {})
        odd = {there: here for here, there in given.items() if by_keyword(short(row["type"]), there) != here}
        if odd:
            self.told.setdefault(name, {})["arguments"] = odd

    def _begin(self, name: str, row: Row, arguments: EntryArguments, spelling: Spelling | None) -> None:
        """An entry with the arguments of its call that are no tensors."""
        args, kwargs = arguments
        given = arrangement(spelling, len(args), kwargs) if row["kind"] == "function" else None
        if given is not None:
            self._given[row["seq"]] = given
            placed = {there: self._at(here, arguments) for here, there in given.items()}
            args = [placed[str(place)] for place in range(sum(not there.startswith("kwargs.") for there in placed))]
            kwargs = {there[len("kwargs.") :]: one for there, one in placed.items() if there.startswith("kwargs.")}
        elif row["kind"] == "function":
            function = short(row["type"])
            kwargs = {
                word: one
                for word, one in kwargs.items()
                if one != TENSOR or positional(function, f"kwargs.{word}").startswith("kwargs.")
            }
        self.changed.add(name)
        self.data[name] = {
            "input_args": [self._plain(one) for one in args],
            "input_kwargs": {word: self._plain(one, word) for word, one in kwargs.items()},
            "output": [],
        } | ({"parameters": {}} if row["kind"] == "module" else {})

    @staticmethod
    def _at(path: str, arguments: EntryArguments) -> Any:
        word = path.removeprefix("kwargs.")
        return arguments.kwargs[word] if word != path else arguments.args[int(path)]

    def _plain(self, value: Any, word: str = "") -> Any:
        if isinstance(value, list):
            return [self._plain(one) for one in value]
        if isinstance(value, dict):
            return {word: self._plain(one) for word, one in value.items()}
        return None if value == TENSOR else scalar(value, self._lost, word)

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

    def tensor(self, row: Row, leaf: Leaf) -> EntryPlace | None:
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
            parts = row["path"].split(".")[1:]
            if _leads_nowhere(parts):
                self._lost["a tensor at a place that no argument has"] += 1
                return None
            return self._put_saved(name, parts, leaf)
        if call["kind"] == "function" and call["phase"] == "backward":
            place = self._put_of_node(name, row, leaf)
            if place is not NOT_OF_NODE:
                return place  # type: ignore[return-value]
        category, parts = self._where(call, row["role"], row["path"])
        if not parts:
            self._lost[category] += 1
            return None
        if _leads_nowhere(parts):
            self._lost["a tensor at a place that no argument has"] += 1
            return None
        if self._only_names:
            return EntryPlace(name, f"{name}.{category}.{'.'.join(parts)}")
        self.changed.add(name)
        entry = self.data.setdefault(name, {"input": [], "output": []})
        ahead = call["phase"] != "backward" or call["kind"] == "op"
        keys = {"input": "input_args" if ahead else "input", "kwargs": "input_kwargs"}
        _put(entry.setdefault(keys.get(category, category), []), parts, leaf)
        if row["role"] == "output":  # in the order in which they end: a module after what is inside of it
            self.data[name] = self.data.pop(name)
        return EntryPlace(name, f"{name}.{category}.{'.'.join(parts)}")

    def _where(self, call: Row, role: str, path: str) -> tuple[str, list[str]]:
        """The category of a file's name and the path in it; of what msprobe has no place for, what it is."""
        forward = call["phase"] != "backward" or call["kind"] == "op"
        if role == "parameter":
            return "parameters", [path]
        if role not in ("input", "output"):
            return "a buffer of a module" if role == "state" else f"a tensor of role {role}", []
        if path == "out" or path.startswith("out."):
            rest = path.split(".")[1:]
            if rest and rest[0] == "0":
                self._tuples.add(f"{self._names[call['seq']]} {role}")
            return role, rest if rest and numeral(rest[0]) is not None else ["0", *rest]
        given = self._given.get(call["seq"])
        if given is not None:
            head, dot, inside = path.partition(".")
            if head == "kwargs":
                word, dot, inside = inside.partition(".")
                head = f"kwargs.{word}"
            path = f"{given.get(head, head)}{dot}{inside}"
        elif call["kind"] == "function":
            order = order_of(short(call["type"])) if not forward else None
            is_ordered = order is not None and path in order
            path = str(order.index(path)) if order and is_ordered else positional(short(call["type"]), path)
        if not path.startswith("kwargs."):
            return role, path.split(".")
        return ("kwargs", path.split(".")[1:]) if forward else ("the gradient of an argument given by keyword", [])

    def _put_of_node(self, name: str, row: Row, leaf: Leaf) -> EntryPlace | object | None:
        """Put a gradient of a function's last node in its place, and those that are not among them beside it."""
        role, path = row["role"], row["path"]
        value = row.get("value"), str(row.get("shape")), str(row.get("stride"))  # views are of one value
        node = self._nodes.get(name)
        if role == "output" and path.startswith(NODE) and path.count(".") == 3:
            index, sends, gets = (numeral(part, 9) for part in path.split(".")[1:])
            if index is None or sends is None or gets is None or not index < sends < MOST_ITEMS or gets >= MOST_ITEMS:
                self._lost["the place of a gradient"] += 1
                return None
            if node is None:
                node = self._nodes[name] = _Node()
            node.places.setdefault(value, []).append(index)
            entry = self.data.setdefault(name, {"input": [], "output": []})
            for key, count in (("input", gets), ("output", sends)):
                entry[key].extend([None] * (count - len(entry[key])))
            entry["output"][index] = leaf
            self.changed.add(name)
            self.data[name] = self.data.pop(name)  # in the order in which they end
            return EntryPlace(name, f"{name}.output.{index}")
        if node is None:
            return NOT_OF_NODE
        if role == "input":  # which the node has had already
            return None
        if value[0] is not None and node.places.get(value):  # both of a sum are sent the same, in their order
            node.paths[node.places[value].pop(0)] = path
            return None
        self.changed.add(name)
        self.data[name].setdefault(OWN, {})[path] = leaf
        return EntryPlace(name, f"{name}.{OWN}.{path}")

    def _gradient(self, call: Row, path: str, leaf: Leaf) -> EntryPlace | None:
        if path != "grad":
            self._lost["what one backward added to a gradient"] += 1
            return None
        module, _, parameter = call["site"].rpartition(".")
        while module and module not in self._classes:
            module, _, inner = module.rpartition(".")
            parameter = f"{inner}.{parameter}"
        module = module or ROOT
        if module not in self._classes:
            self._lost["the gradient of a parameter whose module has no entry"] += 1
            return None
        stem = f"{module_stem(self._wrapped.get(module, module), self._classes[module])}.{GRADIENTS}"
        number = self._numbers[f"gradient {call['site']}"]
        self._numbers[f"gradient {call['site']}"] += 1
        name = f"{stem}.{number}"
        self.changed.add(name)
        self.data.setdefault(name, {})[parameter] = [leaf]
        if (call["micro"], call["call"]) != (0, number):
            self.told[name] = {"micro": call["micro"], "call": call["call"]}
        return EntryPlace(name, f"{name}.{parameter}")

    def _put_saved(self, name: str, parts: list[str], leaf: Leaf) -> EntryPlace:
        holder = [self.debug[name]]
        _put(holder, ["0", *parts], leaf)
        self.debug[name] = holder[0]
        return EntryPlace(name, ".".join([name, *parts]))

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
        for name, node in self._nodes.items():
            found.setdefault(name, {})["nodes"] = {str(index): path for index, path in node.paths.items()}
        for one in sorted(self._tuples):
            name, _, role = one.rpartition(" ")
            if len(self.data.get(name, {}).get(role, ())) == 1:
                found.setdefault(name, {})[f"{role} is a tuple"] = True
        return found


class _Node:
    """The gradients of a function's last node: which value is where, and which of them belongs to which argument."""

    def __init__(self) -> None:
        self.places: dict[tuple[int | None, str, str], list[int]] = {}
        self.paths: dict[int, str] = {}


NOT_OF_NODE = object()


class EntryArguments(NamedTuple):
    """The arguments of a call: plain values as they are, a mark for tensors."""

    args: list[Any]
    kwargs: dict[str, Any]


NO_ARGUMENTS = EntryArguments([], {})


def _arguments(row: Row) -> EntryArguments:
    try:
        said = read_plain(row["args"] or "{}")
    except ValueError:
        said = {}
    said = said if isinstance(said, dict) else {}
    args, kwargs = said.get("args"), said.get("kwargs")
    return EntryArguments(args if isinstance(args, list) else [], kwargs if isinstance(kwargs, dict) else {})


def _turned(name: str, back: bool = False) -> str:
    """The backward entry of a forward one, or the other way round."""
    old, new = ("backward", "forward") if back else ("forward", "backward")
    head, found, tail = name.rpartition(f".{old}")
    return f"{head}.{new}{tail}" if found else name


def _leads_nowhere(parts: Sequence[str]) -> bool:
    """Whether a path is longer than any, or has a number in it of a place that no list is made for."""
    places = [(part, numeral(part)) for part in parts]
    too_far = (part.isdecimal() if place is None else place >= MOST_ITEMS for part, place in places)
    return len(parts) > DEEPEST or any(too_far)


def _put(into: Any, parts: Sequence[str], leaf: Leaf) -> None:
    """Put a leaf where a path leads, making lists and dicts on the way."""
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if isinstance(into, list):
            index: Any = numeral(part)
            if index is None:
                return  # a structure that its own skeleton contradicts
            into.extend([None] * (index + 1 - len(into)))
            held = into[index]
        else:
            index, held = part, into.get(part)
        if last:
            into[index] = leaf
            return
        if not isinstance(held, (list, dict)) or "dtype" in held:
            held = into[index] = [] if numeral(parts[place + 1]) is not None else {}
        into = held
