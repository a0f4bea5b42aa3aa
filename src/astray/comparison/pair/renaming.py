"""The candidate's calls and tensors in the reference's words: sites, classes and paths, and how tensors are laid out.

Reads the tables of one rank and a mapping, feeds `rows`. A parameter is the same tensor wherever it occurs: as one of
its module, as an argument of a function, as the gradient of either, and in its optimizer's step. A layout rule for its
name holds for all of these.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.pair.mapping import Mapping
from astray.graph.keys import one_key
from astray.records import ROOT
from astray.store import DictionaryColumn, RankRun

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]

OWN = ("parameter", "state")
"""Roles of a module's own tensors."""

_OF_TENSORS = ("parameter", "optimizer")
"""Kinds of calls whose site is the name of a tensor."""

_OF_FUNCTIONS = ("function", "op")
_WITH_PATHS = (*_OF_FUNCTIONS, "custom")  # labels of a loss are noted at a call of its own kind

_ARGUMENT = ("step", "micro", "site", "call")
"""What the forward and the backward of a function have in common."""


class RenamedColumns(NamedTuple):
    """Columns in the reference's words: of the calls, then of the tensors.

    form: the shape as it is judged. layout: the place of the rule in the mapping, −1 for none. moved: whether that rule
    puts the elements into another order. apart: whether the mapping says that it is not compared.
    """

    site: DictionaryColumn[str]
    type: DictionaryColumn[str]
    path: DictionaryColumn[str]
    form: DictionaryColumn[Any]
    layout: Ints
    moved: Bools
    apart: Bools


def renamed_columns(run: RankRun, mapping: Mapping) -> RenamedColumns:
    """What a rank of the candidate is called in the reference."""
    return _Renaming(run, mapping).columns()


def full_name(site: str, path: str) -> str:
    """The name of a module's own tensor."""
    return path if site == ROOT else f"{site}.{path}"


def last_part(name: str) -> str:
    """The name of a tensor in its module."""
    return name.rpartition(".")[2]


def sites_of_tensors(run: RankRun) -> Bools:
    """The calls whose sites are names of tensors: gradients, and what optimizers do to a parameter."""
    kind = run.calls.coded("kind")
    return np.isin(kind.codes, [kind.code(name) for name in _OF_TENSORS if name in kind.values])


class _Renaming:
    """One rank's columns while they are renamed."""

    def __init__(self, run: RankRun, mapping: Mapping) -> None:
        self.run = run
        self.mapping = mapping
        self.kind, self.site = (run.calls.coded(name) for name in ("kind", "site"))
        self.role, self.path, self.shape = (run.tensors.coded(name) for name in ("role", "path", "shape"))
        self._rules: dict[str, int] = {}

    def columns(self) -> RenamedColumns:
        path, layout = self._paths_and_rules()
        if self.mapping.layouts:
            layout = self._with_arguments(layout)
        form, layout, moved = self._forms(layout)
        return RenamedColumns(self._sites(), self._types(), path, form, layout, moved, self._apart(path))

    def _apart(self, path: DictionaryColumn[str]) -> Bools:
        """The own tensors that are not compared, wherever they occur."""
        if not self.mapping.not_compared:
            return np.zeros(len(path.codes), np.bool_)
        named = [last_part(name) in self.mapping.not_compared for name in path.values]
        own = np.array([*named, False])[path.codes] & self._is("module") & self._has(*OWN)
        return np.asarray(self._with_arguments(np.where(own, 0, -1)) >= 0)

    def _sites(self) -> DictionaryColumn[str]:
        """Sites of modules and functions, and those that are names of tensors, which may differ in their last part."""
        names = self.site.values
        both = [*map(self.mapping.site, names), *map(self.mapping.tensor, names)]
        codes = np.where(sites_of_tensors(self.run) & (self.site.codes >= 0), len(names), 0) + self.site.codes
        return DictionaryColumn(codes.astype(np.int32), both)

    def _types(self) -> DictionaryColumn[str]:
        type = self.run.calls.coded("type")
        return DictionaryColumn(type.codes, [self.mapping.type(name) for name in type.values])

    def _of_call(self, column: Ints) -> Ints:
        """A column of calls at each tensor; −1 where the call is not there."""
        return np.append(column, -1)[self.run.call_rows]

    @cached_property
    def _kinds(self) -> Ints:
        return self._of_call(self.kind.codes)

    @cached_property
    def _places(self) -> Ints:
        return self._of_call(self.site.codes)

    def _is(self, *kinds: str) -> Bools:
        return np.isin(self._kinds, [self.kind.code(kind) for kind in kinds if kind in self.kind.values])

    def _has(self, *roles: str) -> Bools:
        return np.isin(self.role.codes, [self.role.code(role) for role in roles if role in self.role.values])

    # -- names and rules -------------------------------------------------------------------------------------------

    def _paths_and_rules(self) -> tuple[DictionaryColumn[str], Ints]:
        """The paths of all tensors, and the rules of those that are named. There are few distinct combinations."""
        keys = one_key([self._kinds, self._places, self.role.codes, self.path.codes])
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        known: dict[str, int] = {}
        paths, rules = [], []
        for row in first.tolist():
            path, rule = self._path_and_rule(row)
            paths.append(known.setdefault(path, len(known)))
            rules.append(rule)
        which = which.reshape(-1)
        return (
            DictionaryColumn(np.array(paths, np.int32)[which], list(known)),
            np.array(rules, np.int64)[which],
        )

    def _path_and_rule(self, row: int) -> tuple[str, int]:
        path, role = str(self.path[row] or ""), self.role[row]
        if self._places[row] < 0:  # a torn run has lost its call
            return path, -1
        kind, site = self.kind.values[self._kinds[row]], str(self.site.values[self._places[row]])
        if kind in _OF_TENSORS:
            return self.mapping.state(path) if path.startswith("state.") else path, self._rule(site)
        if kind == "module" and role in OWN:
            name = full_name(site, path)
            return self._within(self.mapping.tensor(name), self.mapping.site(site)), self._rule(name)
        given = self.mapping.paths.get(site.rpartition("/")[2], {}) if kind in _WITH_PATHS else {}
        rule = self._rule(f"{site}:{path}") if role in ("input", "output") else -1
        return given.get(path, path), rule if rule >= 0 else self._rule(site)

    def _within(self, name: str, module: str) -> str:
        """The path of a tensor in its module. One that lies elsewhere in the reference keeps the end of its name."""
        if module == ROOT:
            return name
        return name.removeprefix(f"{module}.") if name.startswith(f"{module}.") else name.rpartition(".")[2]

    def _rule(self, name: str) -> int:
        if name not in self._rules:
            found = self.mapping.layout_rule(name)
            self._rules[name] = -1 if found is None else found
        return self._rules[name]

    # -- where a parameter occurs ----------------------------------------------------------------------------------

    def _with_arguments(self, layout: Ints) -> Ints:
        """Also the rules of parameters that are given to functions, and of the gradients that these give for them."""
        own = np.flatnonzero((layout >= 0) & self._is("module") & self._has(*OWN))
        taken = np.flatnonzero(self._is(*_OF_FUNCTIONS) & self._has("input") & (layout < 0))
        if not len(own) or not len(taken):
            return layout
        value = self.run.tensors.numbers("value")
        own = own[value[own] >= 0]
        numbers, first = np.unique(value[own], return_index=True)
        place = np.minimum(np.searchsorted(numbers, value[taken]), max(len(numbers) - 1, 0))
        if not len(numbers):
            return layout
        same = (numbers[place] == value[taken]) & (self.shape.codes[own[first[place]]] == self.shape.codes[taken])
        layout = layout.copy()
        layout[taken[same]] = layout[own[first[place[same]]]]
        return self._with_gradients(layout, taken[same])

    def _with_gradients(self, layout: Ints, arguments: Ints) -> Ints:
        """The gradient that a function gives for an argument has its path, and is laid out as it is."""
        phase = self.run.calls.coded("phase")
        backward = self._of_call(phase.codes) == (phase.code("backward") if "backward" in phase.values else -2)
        given = np.flatnonzero(backward & self._is(*_OF_FUNCTIONS) & self._has("output"))
        forward = arguments[~backward[arguments]]
        calls = [self._of_call(self._numbers(name)) for name in _ARGUMENT]
        keys = one_key([*calls, self.path.codes.astype(np.int64), self.shape.codes.astype(np.int64)])
        known, first = np.unique(keys[forward], return_index=True)
        if len(known):
            place = np.minimum(np.searchsorted(known, keys[given]), len(known) - 1)
            same = known[place] == keys[given]
            layout[given[same]] = layout[forward[first[place[same]]]]
        return layout

    def _numbers(self, name: str) -> Ints:
        column = self.run.calls[name]
        return column.codes if isinstance(column, DictionaryColumn) else self.run.calls.numbers(name)

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _forms(self, layout: Ints) -> tuple[DictionaryColumn[Any], Ints, Bools]:
        """The shapes as the reference has them. A rule leaves alone what it does not fit, such as a step counter."""
        moved = np.zeros(len(layout), np.bool_)
        at = np.flatnonzero(layout >= 0)
        if not len(at):
            return self.shape, layout, moved
        layout, codes = layout.copy(), self.shape.codes.copy()
        known = {shape: code for code, shape in enumerate(self.shape.values)}
        _, first, which = np.unique(one_key([layout[at], codes[at]]), return_index=True, return_inverse=True)
        which = which.reshape(-1)
        for number, row in enumerate(at[first].tolist()):
            rows, shape = at[which == number], self.shape.values[self.shape.codes[row]]
            rule = self.mapping.layouts[int(layout[row])].layout
            try:
                codes[rows] = known.setdefault(rule.shape(shape), len(known))
                moved[rows] = rule.moves(shape)
            except ValueError:
                layout[rows] = -1
        return DictionaryColumn(codes, list(known)), layout, moved
