"""The calls of a run as msprobe's entries: the names of their tensors, and their arguments that are not tensors.

Names are those of the dump that the run was read from, otherwise those that `entries.py` would write. Read by the table
of a comparison and by the user's mapping of entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from astray.foreign.msprobe.entries import StepEntries
from astray.foreign.msprobe.leaves import TENSOR_MARK
from astray.foreign.msprobe.names import positional, short
from astray.records import Frame
from astray.safe_text import parse_json
from astray.store import Table
from astray.store.run import RankRun

Row = dict[str, Any]

_TENSOR_KEY = ("seq", "role", "path")
_CALL = ("seq", "step", "micro", "kind", "site", "type", "call", "phase", "parent", "stack", "args", "recompute")


class EntryName(NamedTuple):
    """The names of a tensor: of its entry, its own (which begins with that), and of its file."""

    entry: str
    full: str
    file: str


class EntryNames:
    """The names of one rank's rows.

    >>> EntryNames(run.ranks[0]).tensors[0]
    EntryName(entry='Functional.linear.0.forward', full='Functional.linear.0.forward.input.0', …)

    tensors: of each row of `tensors`. stacks: the stack of its call. calls: the row of `calls` for each step and entry.
    """

    def __init__(self, rank: RankRun) -> None:
        self.tensors: list[EntryName] = []
        self.stacks: list[int | None] = []
        self.calls: dict[tuple[int, str], int] = {}
        self._dumped: dict[int, str] = getattr(rank, "entries", {})  # entries by call, as the dump has them
        self._steps: dict[int, StepEntries] = {}
        self._rows: dict[int, Row] = {}
        classes: dict[str, str] = {}
        columns = {name: _column(rank.calls, name) for name in _CALL}
        frames: dict[int, Sequence[Frame]] = {}
        for at, cells in enumerate(zip(*columns.values(), strict=True)):
            row = dict(zip(columns, cells, strict=True))
            self._rows[row["seq"]] = row
            step = self._steps.get(row["step"])
            if step is None:
                step = self._steps[row["step"]] = StepEntries(classes, Counter(), only_names=True)
            stack = row["stack"]
            if stack is not None and stack not in frames:
                frames[stack] = rank.stack(stack)
            name = step.call(row, frames[stack] if stack is not None else ())
            entry = self._dumped.get(row["seq"], name)
            if entry is not None:
                self.calls.setdefault((row["step"], entry), at)
        named: dict[tuple[int, str, str], EntryName] = {}
        for key in zip(*(rank.tensors[name].tolist() for name in _TENSOR_KEY), strict=True):
            call = self._rows.get(key[0])  # in a run that was cut, the last may be missing
            if key not in named:
                _, role, path = key
                own = f"{role}.{path}"
                named[key] = self._name(call, role, path) if call else EntryName("", own, own)
            self.tensors.append(named[key])
            self.stacks.append(call["stack"] if call else None)

    def _name(self, call: Row, role: str, path: str) -> EntryName:
        seq = call["seq"]
        place = self._steps[call["step"]].tensor({"seq": seq, "role": role, "path": path}, {})
        if place is None:  # msprobe has no entries for the outermost module, buffers and operators
            own = f"{call['kind'].capitalize()}.{call['site']}.{call['type']}.{call['phase']}.{call['call']}"
            entry = self._dumped.get(seq, own)
            return EntryName(entry, f"{entry}.{role}.{path}", f"{entry}.{role}.{path}")
        entry = self._dumped.get(seq, place.entry)
        rest = place.file[len(place.entry) :]
        rest = rest.replace(".output.node.", ".output.")  # the gradient of an autograd node
        return EntryName(entry, entry + rest.replace(".kwargs.", ".input.", 1), entry + rest)


def _column(table: Table, name: str) -> list[Any]:
    """A column as objects, missing cells as None."""
    cells = table[name].tolist()
    return [cell if known else None for cell, known in zip(cells, table.valid(name).tolist(), strict=True)]


class ScalarArgument(NamedTuple):
    """An argument of a call; `path` as in msprobe's names, without the category."""

    path: str
    value: Any


class ScalarArguments:
    """The arguments of the calls of one rank, in their order; tensors among them are `TENSOR_MARK`."""

    def __init__(self, rank: RankRun) -> None:
        self._calls = rank.call_rows.tolist()
        self._args = rank.calls.coded("args").tolist()
        self._kinds, self._types, self._phases = (rank.calls.coded(name).tolist() for name in ("kind", "type", "phase"))

    def of(self, row: int) -> tuple[ScalarArgument, ...]:
        """Those of the call that a row of `tensors` belongs to; none of a backward call."""
        call = self._calls[row]
        if self._phases[call] == "backward" or not self._args[call]:
            return ()
        return _parse_arguments(self._args[call], short(self._types[call]) if self._kinds[call] == "function" else "")


@lru_cache(1 << 14)
def _parse_arguments(text: str, function: str) -> tuple[ScalarArgument, ...]:
    try:
        content = parse_json(text)
    except ValueError:
        return ()
    if not isinstance(content, dict):
        return ()
    args, kwargs = content.get("args"), content.get("kwargs")
    arguments: list[ScalarArgument] = []
    for position, value in enumerate(args if isinstance(args, list) else ()):
        arguments += _leaves(value, str(position))
    for word, value in (kwargs if isinstance(kwargs, dict) else {}).items():
        path = positional(function, f"kwargs.{word}").removeprefix("kwargs.") if value == TENSOR_MARK else word
        arguments += _leaves(value, path)
    return tuple(arguments)


def _leaves(value: Any, path: str) -> Iterator[ScalarArgument]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{path}.{name}")
    elif value == TENSOR_MARK or not (
        isinstance(value, str) and value.startswith("<")
    ):  # msprobe leaves out other objects
        yield ScalarArgument(path, value)
