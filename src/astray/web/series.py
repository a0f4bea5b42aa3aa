"""One place of a run over its steps: lines of statistics, and marks where something is not finite or close to it.

A place is a site, phase, role and path. Of several calls, micro steps and ranks in one step the most telling number
counts: the least of `min` and of the head-room, the sum of counts, the mean of means, else the greatest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.alarms.alarm import Alarm
from astray.report.alarms import what_of
from astray.report.figures import counted
from astray.risk.risk import Risk
from astray.store import Coded
from astray.web.views import RunView
from astray.web.wire import Document

Floats = npt.NDArray[np.float64]

_CALM = "calm"


class Wanted(NamedTuple):
    """Which place; None leaves a word open."""

    site: str
    phase: str | None = None
    role: str | None = None
    path: str | None = None
    rank: int | None = None


def _greatest(values: Floats) -> float:
    return float(np.fmax.reduce(values))


def _least(values: Floats) -> float:
    return float(np.fmin.reduce(values))


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def _sum(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else np.nan


LINES: dict[str, Callable[[Floats], float]] = {
    "absmax": _greatest,
    "l2": _greatest,
    "std": _greatest,
    "mean": _mean,
    "min": _least,
    "max": _greatest,
    "zeros": _sum,
    "nan": _sum,
    "inf": _sum,
    "headroom": _least,
}
"""The lines in the order of the page, and how several numbers of one step become one."""


def series_of(view: RunView, wanted: Wanted) -> Document:
    """The lines of a place over the steps that have it, and its marks."""
    with view.lock:
        table, risk, alarms = view.table, view.risk, view.findings[0]
    rows = np.flatnonzero(_fitting(table, wanted))
    number = np.asarray(table["step"])[rows]
    steps, place = np.unique(number, return_inverse=True)
    order = np.argsort(place, kind="stable")
    begin = np.searchsorted(place[order], np.arange(len(steps) + 1))
    groups = [rows[order[begin[at] : begin[at + 1]]] for at in range(len(steps))]
    lines = {name: [_known(merge(np.asarray(table[name])[group])) for group in groups] for name, merge in LINES.items()}
    return {
        "steps": steps,
        "lines": [{"name": name, "values": values} for name, values in lines.items()],
        "marks": [*_nonfinite(steps.tolist(), lines), *_origins(alarms, wanted)],
        "risk": None if risk is None else _risk(risk, wanted),
    }


def _fitting(table: dict[str, Any], wanted: Wanted) -> npt.NDArray[np.bool_]:
    mask = np.ones(len(table["step"]), np.bool_)
    for name in ("site", "phase", "role", "path"):
        value = getattr(wanted, name)
        if value is not None:
            column: Coded[str] = table[name]
            mask &= column.codes == column.code(value)
    return mask if wanted.rank is None else mask & (table["rank"] == wanted.rank)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _nonfinite(steps: list[int], lines: dict[str, list[float | None]]) -> Iterator[Document]:
    for step, nan, inf in zip(steps, lines["nan"], lines["inf"], strict=True):
        found = [f"{int(count):,} {word}" for count, word in ((nan, "NaN"), (inf, "Inf")) if count]
        if found:
            yield {"step": step, "text": ", ".join(found)}


def _origins(alarms: list[Alarm], wanted: Wanted) -> Iterator[Document]:
    """Where NaN or infinity has come from this very place."""
    for alarm in alarms:
        if alarm.origin.site == wanted.site and wanted.phase in (None, alarm.origin.phase):
            yield {"step": alarm.step, "text": f"{what_of(alarm)} comes from here: {alarm.kind.word}"}


def _risk(risk: Risk, wanted: Wanted) -> list[Document]:
    """What the analysis of risks says of the place, unless all is calm there."""
    table = risk.table
    if "site" not in table:
        return []
    mask = table.coded("site").codes == table.coded("site").code(wanted.site)
    for name in ("phase", "role", "path"):
        value = getattr(wanted, name)
        if value is not None:
            mask &= table.coded(name).codes == table.coded(name).code(value)
    found = []
    for row in np.flatnonzero(mask).tolist():
        level = table["risk"][row]
        if level != _CALM:
            steps = counted(int(table.numbers("observations")[row]), "observation")
            found.append({"level": level, "cause": table["cause"][row], "dtype": table["dtype"][row],
                          "step": int(table.numbers("step")[row]), "text": f"{level}, seen in {steps}"})  # fmt: skip
    return found
