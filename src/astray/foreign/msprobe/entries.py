"""The rows of one step as the entries of msprobe's files: dump.json, construct.json, stack.json and debug.json.

A name counts the calls of a function through the whole step; a backward call has the number of its forward call. What
names and construct.json cannot express (a call's micro step, or that it was in the outermost module, which msprobe
leaves out) is kept beside the entries under the key `astray`, which msprobe ignores and astray's reader reads. In a
recording for these files the backward entry of a function has the gradients of its last autograd node, like msprobe's,
and under `gradients`, which msprobe ignores too, those of its arguments that are not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from astray.foreign.msprobe.leaves import MOST_ITEMS, TENSOR_MARK, Leaf, is_invalid_path, put, scalar
from astray.foreign.msprobe.names import (
    ARGUMENT_GRADIENTS,
    GRADIENTS,
    NODE,
    arrangement,
    by_keyword,
    function_stem,
    module_stem,
    order_of,
    parse,
    positional,
    short,
)
from astray.records import GENERATOR, ROOT, Frame, SpelledFrame, Spelling
from astray.safe_text import parse_json
from astray.wording import numeral

Row = dict[str, Any]

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

OPTIMIZER = "optimizer"
"""The parent that msprobe gives functions inside of an optimizer's step."""


class TensorPosition(NamedTuple):
    """The entry of a tensor, and the name of its file, without suffix."""

    entry: str
    file: str


class StepEntries:
    """The entries of one step of one rank.

    >>> step = StepEntries(classes := {}, lost := Counter())
    >>> step.call(rows.calls.row(0), frames)
    >>> step.tensor(rows.tensors.row(0), leaf)
    TensorPosition(entry='Module.head.Linear.forward.0', file='Module.head.Linear.forward.0.input.0.pt')
    >>> step.data, step.construct(), step.stacks(), step.debug, step.extras

    classes: the class of each module by its site, kept from step to step.
    wrapped: msprobe's names of the modules of a wrapped model by their sites, such as `module.head` for `head`.
    only_names: only names are computed, and no entries filled.
    changed: the entries of `data` that have changed; the writer removes those it has written.
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
        self.extras: dict[str, dict[str, Any]] = {}  # what the names do not show of an entry
        self.changed: set[str] = set()
        self._classes, self._lost, self._wrapped = classes, lost, wrapped or {}
        self._only_names = only_names
        self._calls: dict[int, Row] = {}
        self._names: dict[int, str | None] = {}  # of the entry of each call; None where it has none
        self._forward_names: dict[tuple[str, int, int], str] = {}  # forward entries by site, micro step and call
        self._modules: dict[int, str | None] = {}  # the entry of the module that a call is, or is in
        self._parents: dict[str, str | None] = {}
        self._stacks: dict[tuple[str, ...], list[str]] = {}
        self._numbers: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()  # calls of a site as the reader would count them
        self._tuples: set[str] = set()
        self._argument_paths: dict[int, dict[str, str]] = {}  # of a call: msprobe's path by astray's
        self._nodes: dict[str, _NodeGradients] = {}  # of backward entries

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, row: Row, frames: Sequence[Frame]) -> str | None:
        """Add a call, before its tensors. Returns the name of its entry; None where it has none of its own."""
        seq = row["seq"]
        if seq in self._calls:
            return self._names[seq]
        self._calls[seq] = row
        spelling = frames[0].spelling if frames and isinstance(frames[0], SpelledFrame) else None
        arguments = NO_ARGUMENTS if self._only_names and spelling is None else _arguments(row)
        name = self._names[seq] = self._entry_name(row, frames[0].code if frames else "", arguments, spelling)
        is_module = row["kind"] == "module"
        around = self._modules.get(row["parent"]) if row["parent"] is not None else None
        if row["phase"] == "update" and around is None:
            around = OPTIMIZER
        self._modules[seq] = name if is_module and row["phase"] == "forward" else around
        if is_module and (row["site"] != ROOT or ROOT in self._wrapped):
            self._classes[row["site"]] = row["type"]
        if name is None or row["recompute"] or row["kind"] in ("custom", "parameter"):
            return name
        is_forward = row["phase"] != "backward" or row["kind"] == "op"
        self._parents.setdefault(name, around if is_forward else self._backward_parent(name))
        if is_forward and not self._only_names:
            self._begin(name, row, arguments, spelling)
            self._add_extras(name, row, around)
            if frames:
                lines = tuple(
                    f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}" for frame in frames
                )
                self._stacks.setdefault(lines, []).append(name)
        return name

    def _entry_name(self, row: Row, code: str, arguments: EntryArguments, spelling: Spelling | None) -> str | None:
        kind, site, phase = row["kind"], row["site"], row["phase"]
        if kind == "custom":
            return self._saved(row)
        if kind == "parameter":
            return None  # its gradient goes to the entry of its module; see `_gradient`
        if kind == "optimizer":
            self._lost["a call of kind optimizer"] += 1
            return None
        if row["recompute"]:
            self._lost["a call that was made again for the backward"] += 1
            return self._forward_names.get((site, row["micro"], row["call"]))
        if kind == "module" and site == ROOT and ROOT not in self._wrapped:
            self._lost["a call of the outermost module"] += 1
            return None
        if phase == "backward" and kind != "op":
            forward = self._forward(row)
            if forward is None:
                self._lost["a backward call whose forward call is not there"] += 1
            return (forward and not self._is_idle_dropout(row) and _backward_name(forward)) or None
        line = "" if phase == "update" else code  # the line of `optimizer.step()` is not that of the call
        number_follows = len(arguments.args) > 1 and arguments.args[1] != TENSOR_MARK
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
            self._forward_names[site, row["micro"], row["call"]] = name
        return name

    def _forward(self, row: Row) -> str | None:
        if row["parent"] in self._names:
            return self._names[row["parent"]]
        return self._forward_names.get((row["site"], row["micro"], row["call"]))

    def _is_idle_dropout(self, row: Row) -> bool:
        """Whether it is the backward of a dropout with p=0, which msprobe leaves out: it returns its input."""
        forward = self._calls.get(row["parent"])
        name = short(row["type"])
        return forward is not None and name in DROPOUTS and _arguments(forward).kwargs.get("p") == 0

    def _backward_parent(self, name: str) -> str | None:
        parent = self._parents.get(_forward_name(name))
        return parent and _backward_name(parent)

    def _add_extras(self, name: str, row: Row, around: str | None) -> None:
        """Note what a reader cannot derive from the name."""
        if row["kind"] == "module":
            guess = row["site"], 0, int(name.rpartition(".")[2])
        else:
            module = around.rpartition(".forward.")[0].partition(".")[2].rpartition(".")[0] if around else ""
            module = around if around == OPTIMIZER else module
            site = f"{module}/{short(row['type'])}"
            guess = site, 0, self._counted[site]
            self._counted[site] += 1
        if guess != (row["site"], row["micro"], row["call"]):
            self.extras[name] = {"site": row["site"], "micro": row["micro"], "call": row["call"]}
        if row["phase"] in ("update", "backward"):
            self.extras.setdefault(name, {})["phase"] = row["phase"]  # construct.json may be missing
        entry = parse(name)
        if entry is not None and row["kind"] != "module" and entry.type != row["type"]:
            self.extras.setdefault(name, {})["type"] = row["type"]
        paths = self._argument_paths.get(row["seq"], {})
        function = short(row["type"])
        underivable = {theirs: ours for ours, theirs in paths.items() if by_keyword(function, theirs) != ours}
        if underivable:
            self.extras.setdefault(name, {})["arguments"] = underivable

    def _begin(self, name: str, row: Row, arguments: EntryArguments, spelling: Spelling | None) -> None:
        """Make an entry with the arguments of its call that are not tensors."""
        args, kwargs = arguments
        paths = arrangement(spelling, len(args), kwargs) if row["kind"] == "function" else None
        if paths is not None:
            self._argument_paths[row["seq"]] = paths
            values = {theirs: self._at(ours, arguments) for ours, theirs in paths.items()}
            positional_count = sum(not path.startswith("kwargs.") for path in values)
            args = [values[str(position)] for position in range(positional_count)]
            kwargs = {path[len("kwargs.") :]: value for path, value in values.items() if path.startswith("kwargs.")}
        elif row["kind"] == "function":
            function = short(row["type"])
            kwargs = {
                word: value
                for word, value in kwargs.items()
                if value != TENSOR_MARK or positional(function, f"kwargs.{word}").startswith("kwargs.")
            }
        self.changed.add(name)
        self.data[name] = {
            "input_args": [self._plain(value) for value in args],
            "input_kwargs": {word: self._plain(value, word) for word, value in kwargs.items()},
            "output": [],
        } | ({"parameters": {}} if row["kind"] == "module" else {})

    @staticmethod
    def _at(path: str, arguments: EntryArguments) -> Any:
        word = path.removeprefix("kwargs.")
        return arguments.kwargs[word] if word != path else arguments.args[int(path)]

    def _plain(self, value: Any, word: str = "") -> Any:
        if isinstance(value, list):
            return [self._plain(inner) for inner in value]
        if isinstance(value, dict):
            return {key: self._plain(inner) for key, inner in value.items()}
        return None if value == TENSOR_MARK else scalar(value, self._lost, word)

    def _saved(self, row: Row) -> str:
        suffix = "_grad" if row["phase"] == "backward" else ""
        stem = f"{row['site']}{suffix}"
        number = self._numbers[f"debug {stem}"]
        self._numbers[f"debug {stem}"] += 1
        name = f"{stem}.{number}.debug"
        self.debug.setdefault(name, None)
        if (row["micro"], row["call"]) != (0, number):
            self.extras[name] = {"site": row["site"], "micro": row["micro"], "call": row["call"]}
        return name

    # -- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, row: Row, leaf: Leaf) -> TensorPosition | None:
        """Add a tensor to its entry. Returns its position; None, counted as lost, where msprobe has none."""
        call = self._calls.get(row["seq"])
        if call is None:
            self._lost["a tensor whose call is not there"] += 1
            return None
        if call["kind"] == "parameter":
            return self._gradient(call, row["path"], leaf)
        name = self._names[row["seq"]]
        if name is None or call["recompute"]:  # its call has been counted as lost
            return None
        if call["kind"] == "custom":
            parts = row["path"].split(".")[1:]
            if is_invalid_path(parts):
                self._lost["a tensor at a place that no argument has"] += 1
                return None
            return self._put_saved(name, parts, leaf)
        if call["kind"] == "function" and call["phase"] == "backward":
            position = self._put_node_gradient(name, row, leaf)
            if position is not NOT_OF_NODE:
                return position  # type: ignore[return-value]
        category, parts = self._category(call, row["role"], row["path"])
        if not parts:
            self._lost[category] += 1
            return None
        if is_invalid_path(parts):
            self._lost["a tensor at a place that no argument has"] += 1
            return None
        if self._only_names:
            return TensorPosition(name, f"{name}.{category}.{'.'.join(parts)}")
        self.changed.add(name)
        entry = self.data.setdefault(name, {"input": [], "output": []})
        is_forward = call["phase"] != "backward" or call["kind"] == "op"
        keys = {"input": "input_args" if is_forward else "input", "kwargs": "input_kwargs"}
        put(entry.setdefault(keys.get(category, category), []), parts, leaf)
        if row["role"] == "output":  # entries are ordered by their end: a module after what is inside of it
            self.data[name] = self.data.pop(name)
        return TensorPosition(name, f"{name}.{category}.{'.'.join(parts)}")

    def _category(self, call: Row, role: str, path: str) -> tuple[str, list[str]]:
        """The category of a tensor and the path in it; a description and no path where msprobe has none for it."""
        is_forward = call["phase"] != "backward" or call["kind"] == "op"
        if role == "parameter":
            return "parameters", [path]
        if path in GENERATOR and role == "state":
            return "the state of a random generator", []
        if role not in ("input", "output"):
            return "a buffer of a module" if role == "state" else f"a tensor of role {role}", []
        if path == "out" or path.startswith("out."):
            rest = path.split(".")[1:]
            if rest and rest[0] == "0":
                self._tuples.add(f"{self._names[call['seq']]} {role}")
            return role, rest if rest and numeral(rest[0]) is not None else ["0", *rest]
        paths = self._argument_paths.get(call["seq"])
        if paths is not None:
            head, dot, inside = path.partition(".")
            if head == "kwargs":
                word, dot, inside = inside.partition(".")
                head = f"kwargs.{word}"
            path = f"{paths.get(head, head)}{dot}{inside}"
        elif call["kind"] == "function":
            order = order_of(short(call["type"])) if not is_forward else None
            is_ordered = order is not None and path in order
            path = str(order.index(path)) if order and is_ordered else positional(short(call["type"]), path)
        if not path.startswith("kwargs."):
            return role, path.split(".")
        return ("kwargs", path.split(".")[1:]) if is_forward else ("the gradient of an argument given by keyword", [])

    def _put_node_gradient(self, name: str, row: Row, leaf: Leaf) -> TensorPosition | object | None:
        """Add a gradient of a function's last node to its entry, or one of an argument that is not among them.

        Returns NOT_OF_NODE where the node of the entry was not recorded.
        """
        role, path = row["role"], row["path"]
        value = row.get("value"), str(row.get("shape")), str(row.get("stride"))  # views of one value differ
        node = self._nodes.get(name)
        if role == "output" and path.startswith(NODE) and path.count(".") == 3:
            index, sent, received = (numeral(part, 9) for part in path.split(".")[1:])
            is_valid = index is not None and sent is not None and index < sent < MOST_ITEMS
            if index is None or sent is None or received is None or not is_valid or received >= MOST_ITEMS:
                self._lost["the place of a gradient"] += 1
                return None
            if node is None:
                node = self._nodes[name] = _NodeGradients()
            node.indices.setdefault(value, []).append(index)
            entry = self.data.setdefault(name, {"input": [], "output": []})
            for key, count in (("input", received), ("output", sent)):
                entry[key].extend([None] * (count - len(entry[key])))
            entry["output"][index] = leaf
            self.changed.add(name)
            self.data[name] = self.data.pop(name)  # entries are ordered by their end
            return TensorPosition(name, f"{name}.output.{index}")
        if node is None:
            return NOT_OF_NODE
        if role == "input":  # already an input of the node
            return None
        if value[0] is not None and node.indices.get(value):  # a sum sends the same value to both arguments, in order
            node.paths[node.indices[value].pop(0)] = path
            return None
        self.changed.add(name)
        self.data[name].setdefault(ARGUMENT_GRADIENTS, {})[path] = leaf
        return TensorPosition(name, f"{name}.{ARGUMENT_GRADIENTS}.{path}")

    def _gradient(self, call: Row, path: str, leaf: Leaf) -> TensorPosition | None:
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
            self.extras[name] = {"micro": call["micro"], "call": call["call"]}
        return TensorPosition(name, f"{name}.{parameter}")

    def _put_saved(self, name: str, parts: list[str], leaf: Leaf) -> TensorPosition:
        root = [self.debug[name]]
        put(root, ["0", *parts], leaf)
        self.debug[name] = root[0]
        return TensorPosition(name, ".".join([name, *parts]))

    # -- the other files ---------------------------------------------------------------------------------------------

    def construct(self) -> dict[str, str | None]:
        """The parent of each entry."""
        known = {*self._parents, OPTIMIZER}
        return {name: parent if parent in known else None for name, parent in self._parents.items()}

    def around(self, name: str) -> list[str]:
        """The entries around an entry, the innermost first."""
        outer: list[str] = []
        parent = self._parents.get(name)
        while parent is not None and parent not in outer:
            outer.append(parent)
            parent = self._parents.get(parent)
        return outer

    def stacks(self) -> dict[str, list[list[str]]]:
        """The lines of each distinct stack, and the entries that were called from there."""
        return {str(number): [names, list(lines)] for number, (lines, names) in enumerate(self._stacks.items())}

    def all_extras(self) -> dict[str, dict[str, Any]]:
        """What is kept beside the entries, by their names."""
        extras = {name: dict(extra) for name, extra in self.extras.items()}
        for name, node in self._nodes.items():
            extras.setdefault(name, {})["nodes"] = {str(index): path for index, path in node.paths.items()}
        for entry_and_role in sorted(self._tuples):
            name, _, role = entry_and_role.rpartition(" ")
            if len(self.data.get(name, {}).get(role, ())) == 1:
                extras.setdefault(name, {})[f"{role} is a tuple"] = True
        return extras


class _NodeGradients:
    """The gradients of a function's last node: the indices of each value, and the argument path of each index."""

    def __init__(self) -> None:
        self.indices: dict[tuple[int | None, str, str], list[int]] = {}
        self.paths: dict[int, str] = {}


NOT_OF_NODE = object()


class EntryArguments(NamedTuple):
    """The arguments of a call: plain values, and `TENSOR_MARK` for tensors."""

    args: list[Any]
    kwargs: dict[str, Any]


NO_ARGUMENTS = EntryArguments([], {})


def _arguments(row: Row) -> EntryArguments:
    try:
        content = parse_json(row["args"] or "{}")
    except ValueError:
        content = {}
    content = content if isinstance(content, dict) else {}
    args, kwargs = content.get("args"), content.get("kwargs")
    return EntryArguments(args if isinstance(args, list) else [], kwargs if isinstance(kwargs, dict) else {})


def _backward_name(name: str) -> str:
    """The backward entry of a forward one."""
    head, separator, tail = name.rpartition(".forward")
    return f"{head}.backward{tail}" if separator else name


def _forward_name(name: str) -> str:
    """The forward entry of a backward one."""
    head, separator, tail = name.rpartition(".backward")
    return f"{head}.forward{tail}" if separator else name
