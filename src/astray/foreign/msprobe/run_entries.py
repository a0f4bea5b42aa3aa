"""The calls of a run as msprobe's entries: what it calls their tensors, and their arguments that are not tensors.

Names are those of the dump that the run was read from, otherwise those that `entries.py` would write. Read by the table
of a comparison and by the user's mapping of entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from astray.foreign.msprobe.entries import StepEntries
from astray.foreign.msprobe.names import positional, short
from astray.records import Frame
from astray.safe_text import read_plain
from astray.store import Table
from astray.store.run import RankRun

Row = dict[str, Any]

_FORM = ("seq", "role", "path")
_CALL = ("seq", "step", "micro", "kind", "site", "type", "call", "phase", "parent", "stack", "args", "recompute")


class EntryName(NamedTuple):
    """A tensor: the name of its entry, its own, which begins with that, and that of its file."""

    entry: str
    full: str
    file: str


class Names:
    """The names of one rank's rows.

    >>> Names(run.ranks[0]).tensors[0]
    Named(entry='Functional.linear.0.forward', full='Functional.linear.0.forward.input.0', …)

    tensors: of each row of `tensors`. stacks: the stack of its call. calls: the row of `calls` for each step and entry.
    """

    def __init__(self, rank: RankRun) -> None:
        self.tensors: list[EntryName] = []
        self.stacks: list[int | None] = []
        self.calls: dict[tuple[int, str], int] = {}
        self._told: dict[int, str] = getattr(rank, "entries", {})
        self._steps: dict[int, StepEntries] = {}
        self._rows: dict[int, Row] = {}
        classes: dict[str, str] = {}
        columns = {name: _listed(rank.calls, name) for name in _CALL}
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
            entry = self._told.get(row["seq"], name)
            if entry is not None:
                self.calls.setdefault((row["step"], entry), at)
        known: dict[tuple[int, str, str], EntryName] = {}
        for form in zip(*(rank.tensors[name].tolist() for name in _FORM), strict=True):
            call = self._rows.get(form[0])  # of a run that was cut, the last may be missing
            named = known.get(form)
            if named is None:
                _, role, path = form
                own = f"{role}.{path}"
                named = known[form] = self._named(call, role, path) if call else EntryName("", own, own)
            self.tensors.append(named)
            self.stacks.append(call["stack"] if call else None)

    def _named(self, call: Row, role: str, path: str) -> EntryName:
        seq = call["seq"]
        place = self._steps[call["step"]].tensor({"seq": seq, "role": role, "path": path}, {})
        if place is None:  # of what msprobe leaves out: the outermost module, buffers, operators
            own = f"{call['kind'].capitalize()}.{call['site']}.{call['type']}.{call['phase']}.{call['call']}"
            entry = self._told.get(seq, own)
            return EntryName(entry, f"{entry}.{role}.{path}", f"{entry}.{role}.{path}")
        entry = self._told.get(seq, place.entry)
        rest = place.file[len(place.entry) :].replace(
            ".output.node.", ".output."
        )  # a gradient as an autograd node has it
        return EntryName(entry, entry + rest.replace(".kwargs.", ".input.", 1), entry + rest)


def _listed(table: Table, name: str) -> list[Any]:
    """A column as objects, what is not there as None."""
    cells = table[name].tolist()
    return [cell if known else None for cell, known in zip(cells, table.valid(name).tolist(), strict=True)]


TENSOR = "<tensor>"


class ScalarArgument(NamedTuple):
    """An argument of a call; `path` as in the names of msprobe, without what kind of argument it is."""

    path: str
    value: Any


class ScalarArguments:
    """The arguments of the calls of one rank, each list in its order, tensors among them as a mark."""

    def __init__(self, rank: RankRun) -> None:
        self._calls = rank.call_rows.tolist()
        self._args = rank.calls.coded("args").tolist()
        self._kinds, self._types, self._phases = (rank.calls.coded(name).tolist() for name in ("kind", "type", "phase"))

    def of(self, row: int) -> tuple[ScalarArgument, ...]:
        """Those of the call that a tensor belongs to; none of a backward."""
        call = self._calls[row]
        if self._phases[call] == "backward" or not self._args[call]:
            return ()
        return _read(self._args[call], short(self._types[call]) if self._kinds[call] == "function" else "")


@lru_cache(1 << 14)
def _read(text: str, function: str) -> tuple[ScalarArgument, ...]:
    try:
        said = read_plain(text)
    except ValueError:
        return ()
    if not isinstance(said, dict):
        return ()
    args, kwargs = said.get("args"), said.get("kwargs")
    found: list[ScalarArgument] = []
    for place, one in enumerate(args if isinstance(args, list) else ()):
        found += _leaves(one, str(place))
    for word, one in (kwargs if isinstance(kwargs, dict) else {}).items():
        path = positional(function, f"kwargs.{word}").removeprefix("kwargs.") if one == TENSOR else word
        found += _leaves(one, path)
    return tuple(found)


def _leaves(value: Any, path: str) -> Iterator[ScalarArgument]:
    if isinstance(value, dict | list):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(one, f"{path}.{name}")
    elif value == TENSOR or not (isinstance(value, str) and value.startswith("<")):  # an object is nothing to msprobe
        yield ScalarArgument(path, value)
