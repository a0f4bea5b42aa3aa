"""Which call each entry of a step is: its site, micro step and number, as astray would have recorded them.

An entry's name counts the calls of a function through the step; astray counts those of a site in a micro step. The
module around a function is in construct.json, at level mix. What has none there was called by the outermost module,
which msprobe leaves out, or by none: the stacks tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from astray.foreign.msprobe.files import caller
from astray.foreign.msprobe.names import Entry, parse
from astray.records import ROOT, Phase

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


# -- micro steps -------------------------------------------------------------------------------------------------------
# Which micro step an entry belongs to, where construct.json does not say: by the order of forward and backward.
#
# A dump counts calls through the whole step. Where the model's first module runs again after a backward, another
# forward of the model has begun, which is what astray calls a micro step. Forwards that no backward lies between stay
# one: they might be two calls in one forward. Forwards that activation checkpointing makes again begin with another
# module.


def micro_steps(
    names: Iterable[str], entries: Mapping[str, Entry], parents: Mapping[str, str | None]
) -> dict[str, int]:
    """The micro steps of entries in the order of dump.json; empty where there is but one.

    Backward calls are those of their forward calls, and are not in it.
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
