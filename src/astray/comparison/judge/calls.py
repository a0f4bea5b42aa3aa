"""The calls of one rank as columns: which encloses which, in which plane, of which module.

Reads the reference's calls, feeds `sources`. A *plane* is one level of recording: modules, functions, ops. A call's
enclosing call is the nearest of its own plane; that of a backward call is the backward of the nearest enclosing forward
call that has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from astray.comparison.rows import Bools, Floats, Ints
from astray.graph import graph_of
from astray.graph.keys import one_key
from astray.records import ROOT
from astray.store import RankRun

PLANES = {"module": 0, "function": 1, "collective": 1, "op": 2, "parameter": 3, "optimizer": 3, "custom": 4}


@dataclass(frozen=True)
class CallColumns:
    """Columns of all or some calls of a run; −1 stands for none.

    rows: their rows in the run's table. enclosing, forward_of: the call around each, and the forward call of each
    backward call, as indices into these columns. site_pattern: a number for the site with its layer numbers left out.
    last_name: a number for the last part of a site. module: itself, or the one around a function. owner: the module
    that has the parameter that a call is about. owner_type: its class. depth: how many calls are around each. is_loss:
    by its name.
    """

    rows: Ints
    step: Ints
    micro: Ints
    call_number: Ints
    plane: Ints
    phase: Ints
    type: Ints
    site: Ints
    site_pattern: Ints
    last_name: Ints
    module: Ints
    owner: Ints
    owner_type: Ints
    depth: Ints
    is_parameter: Bools
    is_optimizer: Bools
    is_loss: Bools
    forward: Bools
    backward: Bools
    update: Bools
    enclosing: Ints
    forward_of: Ints
    sites: list[str]
    modules: list[str]
    planes_of_owners: list[int]
    """The planes in which the users of parameters are looked for, the best first."""

    @property
    def count(self) -> int:
        return len(self.rows)

    def take(self, rows: Ints) -> CallColumns:
        """Some calls by their index, and those that they refer to, in the same order."""
        wanted = np.zeros(self.count + 1, np.bool_)
        while len(rows):
            wanted[rows] = True
            rows = np.concatenate([self.enclosing[rows], self.forward_of[rows]])
            rows = rows[~wanted[rows] & (rows >= 0)]
        kept = np.flatnonzero(wanted[:-1])
        index = np.full(self.count + 1, -1)
        index[kept] = np.arange(len(kept))
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        some: dict[str, Any] = {
            name: column[kept] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        some |= {name: index[some[name]] for name in ("enclosing", "forward_of")}
        return replace(self, **some)

    @cached_property
    def state_group(self) -> Ints:
        """A number for all calls of a module in a step and phase: its weights are recorded with the first of them."""
        return _numbered(one_key([self.site, self.step, self.plane, self.phase]))

    @cached_property
    def step_number(self) -> Ints:
        """A number for the step of each call, without gaps."""
        return _numbered(self.step)

    def is_inside(self, calls: Ints, outer: Ints) -> Bools:
        """Whether some calls lie in others, at any depth."""
        inside = np.zeros(len(calls), np.bool_)
        walking = np.flatnonzero((calls >= 0) & (outer >= 0))
        inner = calls.copy()
        while len(walking):
            inner[walking] = self.enclosing[inner[walking]]
            inside[walking] |= inner[walking] == outer[walking]
            walking = walking[(inner[walking] >= 0) & ~inside[walking]]
        return inside

    def largest_inside(self, column: Floats) -> Floats:
        """For each call the largest number among those directly inside it."""
        largest = np.zeros(self.count)
        np.maximum.at(largest, self.enclosing[self._inside], column[self._inside])
        return largest

    @cached_property
    def _inside(self) -> Ints:
        return np.flatnonzero(self.enclosing >= 0)

    def parameter_name(self, site: int, path: str) -> str:
        """The qualified name of a module's parameter."""
        module = self.sites[site]
        return path if module == ROOT else f"{module}.{path}"


def read_calls(run: RankRun) -> CallColumns:
    """All calls of a rank."""
    table = run.calls
    kind, phase, sites = table.coded("kind"), table.coded("phase"), table.coded("site")
    plane: Ints = np.array([*(PLANES.get(word, 4) for word in kind.values), -1])[kind.codes]
    is_parameter, is_optimizer = kind.codes == kind.code("parameter"), kind.codes == kind.code("optimizer")
    backward = phase.codes == phase.code("backward")
    parent = graph_of(run).outer
    forward_of = np.where(backward & ~is_parameter, parent, -1)
    enclosing = _enclosing(parent, forward_of, plane, backward, is_parameter)
    type = table.coded("type").codes
    modules = sorted({_module(site) for site in sites.values} | {_owner(site) for site in sites.values})
    numbers = {module: number for number, module in enumerate(modules)}
    module = np.array([*(numbers[_module(site)] for site in sites.values), -1])[sites.codes]
    owners = np.array([*(numbers[_owner(site)] for site in sites.values), -1])[sites.codes]
    owner = np.where(is_parameter | is_optimizer, owners, -1)
    return CallColumns(
        rows=np.arange(len(table)),
        step=table.numbers("step"),
        micro=table.numbers("micro"),
        call_number=table.numbers("call"),
        plane=plane,
        phase=phase.codes,
        type=type,
        site=sites.codes,
        site_pattern=_names(sites.values, lambda site: re.sub(r"\d+", "#", site))[sites.codes],
        last_name=_names(sites.values, lambda site: re.split(r"[./]", site)[-1])[sites.codes],
        module=module,
        owner=owner,
        owner_type=_types_of_modules(plane, module, type, len(modules))[owner],
        depth=_depth(enclosing),
        is_parameter=is_parameter,
        is_optimizer=is_optimizer,
        is_loss=np.array([*(is_loss(name or "") for name in table.coded("type").values), False])[type],
        forward=phase.codes == phase.code("forward"),
        backward=backward,
        update=phase.codes == phase.code("update"),
        enclosing=enclosing,
        forward_of=forward_of,
        sites=sites.values,
        modules=modules,
        planes_of_owners=[one for one in (0, 1, 2) if np.any(plane == one)] or [0],
    )


def _enclosing(parent: Ints, forward_of: Ints, plane: Ints, backward: Bools, is_parameter: Bools) -> Ints:
    """The nearest call around each that is of its plane and phase."""
    backward_of = np.full(len(parent) + 1, -1)
    at = np.flatnonzero(forward_of >= 0)[::-1]
    backward_of[forward_of[at]] = at
    outer = np.where(backward, np.append(parent, -1)[forward_of], parent)
    outer[is_parameter] = -1
    enclosing = np.full(len(parent), -1)
    walking = np.flatnonzero(outer >= 0)
    while len(walking):
        around = outer[walking]
        call = np.where(backward[walking], backward_of[around], around)
        fits = (call >= 0) & (plane[around] == plane[walking])
        enclosing[walking[fits]] = call[fits]
        outer[walking] = parent[around]
        walking = walking[~fits & (outer[walking] >= 0)]
    return enclosing


def _depth(enclosing: Ints) -> Ints:
    depth, outer = np.zeros(len(enclosing), np.int64), enclosing.copy()
    walking = np.flatnonzero(outer >= 0)
    while len(walking):
        depth[walking] += 1
        outer[walking] = enclosing[outer[walking]]
        walking = walking[outer[walking] >= 0]
    return depth


def _types_of_modules(plane: Ints, module: Ints, type: Ints, modules: int) -> Ints:
    """The class of each module, where it was called; one more entry for none."""
    types = np.full(modules + 1, -1)
    at = np.flatnonzero(plane == 0)[::-1]
    types[module[at]] = type[at]
    return types


def _names(sites: list[str], name: Callable[[str], str]) -> Ints:
    """A number for each site's name of a kind; one more entry for none."""
    numbers: dict[str, int] = {}
    return np.array([*(numbers.setdefault(name(site), len(numbers)) for site in sites), -1])


def is_loss(type: str) -> bool:
    """Whether a class or a function is a loss, by its name.

    >>> is_loss("CrossEntropyLoss"), is_loss("torch.nn.functional.cross_entropy"), is_loss("Linear")
    (True, True, False)
    """
    return type.lower().endswith(("loss", "cross_entropy"))


def _numbered(column: Ints) -> Ints:
    return np.unique(column, return_inverse=True)[1].reshape(-1)


def _module(site: str) -> str:
    return site.partition("/")[0]


def _owner(site: str) -> str:
    return site.rpartition(".")[0] or ROOT
