"""What each thing was set to over the steps of a rank, and the first step in which two runs differ in it.

Reads the rows of `setup.jsonl`. Where a run has none, because it is older or another tool's, its tables stand in for
it: dtypes and devices of parameters, classes, and the settings of optimizers that were recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from astray.comparison.pair.mapping import Mapping
from astray.comparison.rows import Ints
from astray.comparison.setup.setup_difference import ABSENT
from astray.graph.keys import one_key
from astray.records import Setup
from astray.safe_text import parse_json
from astray.store import RankRun

SettingHistory = list[tuple[int, Any]]
"""The values of one thing, each with the step from which it held."""

SettingHistories = dict[str, SettingHistory]
OF_TENSORS = ("dtype", "requires_grad", "placement")
"""What is recorded of a module's own tensors, behind the name of the tensor and a dot."""


class Timelines:
    """What a rank was set to: by subject and site, the history of every name.

    is_whole: whether it was recorded as such, so that what is not in it was not there.
    across_frameworks: whether the other run is of another framework, which has other defaults, and other words for what
        is not set. So values are compared that both set; a number stands for a list of it alone, and of another list
        the numbers are compared one by one, as `betas.0`.
    """

    def __init__(
        self,
        rows: Sequence[Setup],
        *,
        is_whole: bool,
        mapping: Mapping | None = None,
        offset: int = 0,
        across_frameworks: bool = False,
    ) -> None:
        self.is_whole = is_whole
        self.across_frameworks = across_frameworks
        self._of: dict[str, dict[str, SettingHistories]] = defaultdict(dict)
        classes: dict[tuple[str, str], str] = {}
        for row in rows:
            type = classes.setdefault((row.subject, row.site), str(row.values.get("class", "")))
            site = row.site if mapping is None else _renamed(row.subject, row.site, mapping)
            settings = self._of[row.subject].setdefault(site, {})
            for name, value in row.values.items():
                if mapping is not None:
                    name, value = _renamed_setting(row.subject, type, name, value, mapping)
                for part, single in _parts(name, value) if across_frameworks else ((name, value),):
                    settings.setdefault(part, []).append((row.step + offset, single))

    def of(self, subject: str) -> dict[str, SettingHistories]:
        """Everything of that kind, by site."""
        return self._of.get(subject, {})


def _renamed(subject: str, site: str, mapping: Mapping) -> str:
    return mapping.site(site) if subject in ("module", "config", "autocast", "swap") else site


def _renamed_setting(subject: str, type: str, name: str, value: Any, mapping: Mapping) -> tuple[str, Any]:
    if subject not in ("module", "optimizer"):
        return name, value
    if name == "class" and isinstance(value, str):
        return name, mapping.type(value)
    if subject == "optimizer" and name in ("parameters", "written_gradients") and isinstance(value, list):
        return name, [mapping.tensor(one) if isinstance(one, str) else one for one in value]
    tensor, dot, setting = name.rpartition(".")
    if dot and setting in OF_TENSORS:
        return f"{mapping.tensors.get(tensor, tensor)}.{setting}", value
    return mapping.attribute(name, value, type)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What frameworks have in common of a value: no None; a number for a list of it alone; the numbers of a list."""
    numbers = value if isinstance(value, list) and all(isinstance(one, int | float) for one in value) else []
    if numbers and all(one == numbers[0] for one in numbers):
        yield name, numbers[0]
    elif numbers:
        yield from ((f"{name}.{place}", one) for place, one in enumerate(numbers))
    elif value is not None:
        yield name, value


def read_timelines(
    rank: RankRun, mapping: Mapping | None = None, offset: int = 0, *, across_frameworks: bool = False
) -> Timelines:
    """Those of a rank, in the reference's names and steps."""
    rows = rank.setup
    return Timelines(
        rows or list(_read_from_tables(rank)),
        is_whole=bool(rows),
        mapping=mapping,
        offset=offset,
        across_frameworks=across_frameworks,
    )


def at(history: SettingHistory | None, step: int) -> Any:
    """The value in a step; `ABSENT` where none is known."""
    if not history:
        return ABSENT
    place = bisect_right(history, step, key=lambda one: one[0])
    return history[place - 1][1] if place else ABSENT


def first_difference(
    reference: SettingHistory, candidate: SettingHistory, steps: Sequence[int]
) -> tuple[int | None, Any, Any] | None:
    """The first of some steps, in order, in which two histories differ, and both values.

    The step is None when it is the very first.
    """
    changes = {0}
    for step, _ in (*reference, *candidate):
        changes.add(bisect_left(steps, step))
    for place in sorted(changes):
        if place >= len(steps):
            break
        value_reference, value_candidate = at(reference, steps[place]), at(candidate, steps[place])
        if value_reference is not ABSENT and value_candidate is not ABSENT and value_reference != value_candidate:
            return (None if place == 0 else steps[place]), value_reference, value_candidate
    return None


def _read_from_tables(rank: RankRun) -> Iterator[Setup]:
    """The setup of a run that has not recorded it, as far as its tables show it."""
    yield from _modules(rank)
    yield from _optimizers(rank)


def _modules(rank: RankRun) -> Iterator[Setup]:
    calls, tensors = rank.calls, rank.tensors
    kinds, sites, types = calls.coded("kind"), calls.coded("site"), calls.coded("type")
    values: dict[str, dict[str, Any]] = {}
    if rank.fingerprints == "astray":  # other tools have other words for classes
        of_modules = kinds.codes == kinds.code("module")
        for site, type in _distinct([sites.codes[of_modules], types.codes[of_modules]]):
            if site >= 0 and type >= 0:
                values.setdefault(sites.values[site], {})["class"] = types.values[type]
    roles = tensors.coded("role")
    rows = np.flatnonzero((roles.codes == roles.code("parameter")) & (rank.call_rows >= 0))
    rows = rows[kinds.codes[rank.call_rows[rows]] == kinds.code("module")]
    columns = [sites.codes[rank.call_rows[rows]]]
    columns += [tensors.coded(name).codes[rows] for name in ("path", "dtype", "device")]
    for site, path, dtype, device in _distinct(columns):
        settings = values.setdefault(sites.values[site], {})
        settings.setdefault(f"{tensors.coded('path').values[path]}.dtype", tensors.coded("dtype").values[dtype])
        settings.setdefault("device", tensors.coded("device").values[device])
    yield from (Setup(0, "module", site, settings) for site, settings in values.items())


def _distinct(columns: list[Ints]) -> Iterator[tuple[int, ...]]:
    """Every combination of some columns' values once, in the order in which they came."""
    _, first = np.unique(one_key(columns), return_index=True)
    return zip(*(column[np.sort(first)].tolist() for column in columns), strict=True)


def _optimizers(rank: RankRun) -> Iterator[Setup]:
    calls = rank.calls
    kinds, args = calls.coded("kind"), calls.coded("args")
    known: dict[str, str] = {}
    for row in np.flatnonzero((kinds.codes == kinds.code("optimizer")) & (args.codes >= 0)).tolist():
        text, site = str(args[row]), str(calls["site"][row])
        if known.get(site) == text or not text.startswith('{"param_groups":'):
            continue
        known[site] = text
        for number, group in enumerate(_groups(text)):
            settings = {name: value for name, value in group.items() if value != "<tensor>"}
            settings["class"] = calls["type"][row]
            yield Setup(int(calls["step"][row]), "optimizer", f"{site}/param_groups.{number}", settings)


def _groups(text: str) -> list[dict[str, Any]]:
    try:
        groups = parse_json(text)["param_groups"]
    except (ValueError, KeyError, TypeError):
        return []
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
