"""The calls of one rank as columns: who encloses whom, in which plane, of which module.

Reads the reference's calls, feeds `sources`. A *plane* is one level of recording: modules, functions, ops. A call's
enclosing call is the nearest of its own plane; that of a backward call is the backward of the nearest enclosing forward
call that has one.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from astray.compare.keys import one_key
from astray.compare.rows import Bools, Floats, Ints
from astray.graph import graph_of
from astray.record import ROOT
from astray.store import RankRun

PLANES = {"module": 0, "function": 1, "collective": 1, "op": 2, "parameter": 3, "optimizer": 3, "custom": 4}


class Calls:
    """Columns of calls, by their row in the run's table; −1 stands for none."""

    def __init__(self, run: RankRun) -> None:
        self._table = run.calls
        self.count = len(run.calls)
        self.step: Ints = run.calls.numbers("step")
        self.micro: Ints = run.calls.numbers("micro")
        self.number: Ints = run.calls.numbers("call")
        kind, phase = run.calls.coded("kind"), run.calls.coded("phase")
        self.plane: Ints = np.array([*(PLANES.get(word, 4) for word in kind.values), -1])[kind.codes]
        self.phase: Ints = phase.codes
        self.type: Ints = run.calls.coded("type").codes
        self.site: Ints = run.calls.coded("site").codes
        self.sites: list[str] = run.calls.coded("site").values
        self.is_parameter: Bools = kind.codes == kind.code("parameter")
        self.is_optimizer: Bools = kind.codes == kind.code("optimizer")
        self.backward: Bools = self.phase_is("backward")
        self.parent: Ints = graph_of(run).outer

    def phase_is(self, word: str) -> Bools:
        phase = self._table.coded("phase")
        return np.asarray(phase.codes == phase.code(word))

    @cached_property
    def forward_of(self) -> Ints:
        """The forward call of each backward call."""
        return np.where(self.backward & ~self.is_parameter, self.parent, -1)

    @cached_property
    def enclosing(self) -> Ints:
        """The nearest call around each that is of its plane and phase."""
        backward_of = np.full(self.count + 1, -1)
        at = np.flatnonzero(self.forward_of >= 0)[::-1]
        backward_of[self.forward_of[at]] = at
        outer = np.where(self.backward, np.append(self.parent, -1)[self.forward_of], self.parent)
        outer[self.is_parameter] = -1
        found = np.full(self.count, -1)
        walking = np.flatnonzero(outer >= 0)
        while len(walking):
            around = outer[walking]
            here = np.where(self.backward[walking], backward_of[around], around)
            fits = (here >= 0) & (self.plane[around] == self.plane[walking])
            found[walking[fits]] = here[fits]
            outer[walking] = self.parent[around]
            walking = walking[~fits & (outer[walking] >= 0)]
        return found

    @cached_property
    def holder(self) -> Ints:
        """One number for all calls of a module in a step and phase: its weights are recorded with the first of them."""
        key = one_key([self.site, self.step, self.plane, self.phase])
        return np.unique(key, return_inverse=True)[1].reshape(-1)

    @cached_property
    def depth(self) -> Ints:
        """How many calls are around each."""
        depth, outer = np.zeros(self.count, np.int64), self.enclosing.copy()
        walking = np.flatnonzero(outer >= 0)
        while len(walking):
            depth[walking] += 1
            outer[walking] = self.enclosing[outer[walking]]
            walking = walking[outer[walking] >= 0]
        return depth

    def lies_in(self, calls: Ints, outer: Ints) -> Bools:
        """Whether some calls lie in others, at any depth."""
        found = np.zeros(len(calls), np.bool_)
        walking = np.flatnonzero((calls >= 0) & (outer >= 0))
        inner = calls.copy()
        while len(walking):
            inner[walking] = self.enclosing[inner[walking]]
            found[walking] |= inner[walking] == outer[walking]
            walking = walking[(inner[walking] >= 0) & ~found[walking]]
        return found

    def spread(self, column: Floats, outer: Ints) -> Floats:
        """For each call the largest number among those directly inside it."""
        found = np.zeros(self.count)
        inside = np.flatnonzero(outer >= 0)
        np.maximum.at(found, outer[inside], column[inside])
        return found

    @cached_property
    def modules(self) -> list[str]:
        """The modules that calls belong to."""
        return sorted({_module(site) for site in self.sites} | {_owner(site) for site in self.sites})

    @cached_property
    def _module_numbers(self) -> dict[str, int]:
        return {module: number for number, module in enumerate(self.modules)}

    @cached_property
    def module(self) -> Ints:
        """The number of each call's module: itself, or the one around a function."""
        return np.array([*(self._module_numbers[_module(site)] for site in self.sites), -1])[self.site]

    @cached_property
    def owner(self) -> Ints:
        """The number of the module that has the parameter that a call is about; −1 for other calls."""
        owners = np.array([*(self._module_numbers[_owner(site)] for site in self.sites), -1])[self.site]
        return np.where(self.is_parameter | self.is_optimizer, owners, -1)

    @cached_property
    def owner_type(self) -> Ints:
        """The class of that module, where it was called."""
        types = np.full(len(self.modules) + 1, -1)
        at = np.flatnonzero(self.plane <= 1)[::-1]
        types[self.module[at]] = np.where(self.plane[at] == 0, self.type[at], types[self.module[at]])
        return types[self.owner]

    @cached_property
    def planes_of_owners(self) -> list[int]:
        """The planes in which the users of parameters are looked for, the best first."""
        return [plane for plane in (0, 1, 2) if np.any(self.plane == plane)] or [0]

    @cached_property
    def pattern(self) -> Ints:
        """A number for each site's place in any layer."""
        return self._numbered(lambda site: re.sub(r"\d+", "#", site))

    @cached_property
    def last_name(self) -> Ints:
        """A number for the last part of each site."""
        return self._numbered(lambda site: re.split(r"[./]", site)[-1])

    def _numbered(self, name: object) -> Ints:
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(name(site), len(numbers)) for site in self.sites]  # type: ignore[operator]
        return np.array([*codes, -1])[self.site]

    def parameter_name(self, site: int, path: str) -> str:
        """The qualified name of a module's parameter."""
        module = self.sites[site]
        return path if module == ROOT else f"{module}.{path}"


def _module(site: str) -> str:
    return site.partition("/")[0]


def _owner(site: str) -> str:
    return site.rpartition(".")[0] or ROOT
