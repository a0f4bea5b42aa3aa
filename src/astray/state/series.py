"""The rows of a run that are about parameters, as lines over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from astray.errors import UsageError
from astray.records import Statistics
from astray.store import RankRun
from astray.wording import did_you_mean

WHAT = {"weight": "weight", "gradient": "grad", "update": "update", "state": "state."}
"""What of a parameter is followed, and the path under which a recording has it; a state's goes on with its name."""

RATIO = "ratio"
"""The norm of the update over that of the weight."""

_BEFORE = "weight before the step"

STATISTICS = tuple(name for name in Statistics._fields if name not in ("first_bad", "first_bad_value"))


class Point(NamedTuple):
    """A number of one parameter in one step. `what` is weight, gradient, update, or the name of a state."""

    step: int
    parameter: str
    what: str
    statistic: str
    value: float


class Series(NamedTuple):
    """One statistic of one thing, for each parameter over the steps."""

    what: str
    statistic: str
    steps: list[int]
    values: Mapping[str, list[float]]
    """By parameter, one for each step; NaN where it was not there."""

    def __str__(self) -> str:
        from astray.formatting.figures import statistic
        from astray.formatting.grid import Grid

        if not self.values:
            return f"There is no {self.statistic} of any {self.what} yet."
        rows = [
            {"parameter": name, **{str(step): statistic(value) for step, value in zip(self.steps, values, strict=True)}}
            for name, values in self.values.items()
        ]
        grid = Grid(words=["parameter"], droppable=[str(step) for step in self.steps[:-1]], least={"parameter": 20})
        head = (
            "norm of the update over that of the weight"
            if self.what == RATIO
            else f"{self.statistic} of each {self.what}"
        )
        return "\n".join([f"{head}, by step", "", *grid.lines(rows, 120)])


def points(rank: RankRun, statistics: tuple[str, ...]) -> Iterator[Point]:
    """Every number of the parameters in a rank, in the order of observation; the ratio once for each step."""
    calls, tensors, rows = rank.calls, rank.tensors, rank.call_rows
    phases, sites, steps = calls.coded("phase"), calls.coded("site"), calls.numbers("step")
    roles, paths = tensors.coded("role"), tensors.coded("path")
    columns = {name: tensors.numbers(name) for name in {*statistics, "l2"}}
    before: dict[str, float] = {}  # the norms of weights, of which updates come later
    for row, call in enumerate(rows.tolist()):
        what = _what(roles[row], paths[row]) if call >= 0 and phases[call] == "update" else None
        if what is None:
            continue
        step, parameter = int(steps[call]), str(sites[call])
        norm = float(columns["l2"][row])
        if what == _BEFORE:
            before[parameter] = norm
            continue
        for name in statistics:
            yield Point(step, parameter, what, name, float(columns[name][row]))
        if what == "update" and before.get(parameter):
            yield Point(step, parameter, RATIO, "l2", norm / before[parameter])


def series(points: Iterable[Point], what: str, statistic: str) -> Series:
    """Those of one kind, parameter by parameter."""
    found: dict[str, dict[int, float]] = {}
    for point in points:
        if (point.what, point.statistic) == (what, statistic):
            found.setdefault(point.parameter, {})[point.step] = point.value
    steps = sorted({step for values in found.values() for step in values})
    return Series(
        what, statistic, steps, {name: [each.get(step, math.nan) for step in steps] for name, each in found.items()}
    )


def check_statistics(names: tuple[str, ...]) -> None:
    """Raises a UsageError unless a recording has them all."""
    for name in names:
        if name not in STATISTICS:
            known = ", ".join(STATISTICS)
            raise UsageError(f"There is no statistic {name!r}.{did_you_mean(name, STATISTICS)} There are {known}.")


def _what(role: str | None, path: str | None) -> str | None:
    """What a row of an optimizer's step shows of its parameter; None for what is of no interest, such as a counter."""
    if path is None or path == f"{WHAT['state']}step":
        return None
    if path.startswith(WHAT["state"]):  # those that a step begins with are recorded too
        return path.removeprefix(WHAT["state"]) if role == "output" else None
    if path == "weight" and role == "parameter":
        return _BEFORE
    return next((what for what, known in WHAT.items() if path == known), None)
