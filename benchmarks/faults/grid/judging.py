"""Compares the runs of each case, and scores the answers.

exact    `Comparison.first` names the culprit, as in `faults.scoring`
top 3    the culprit's module is among the first three suspects; without suspects, it is what `first` names
silent   no alarm
wrong    something else is named

Apart from that, where the cause is a setting: whether the comparison says that it was set differently.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import astray
from faults.declared import ANYWHERE, Culprit
from faults.grid.cases import Case
from faults.grid.recording import in_processes
from faults.report import described, found_as_dict
from faults.scoring import is_module, score

Result = Literal["exact", "silent", "wrong"]
SPELLINGS = {"eps": ("eps", "variance_epsilon")}
"""What a setting is called in some models."""


@dataclass(frozen=True)
class Judged:
    """What came of one case. For a control, `result` is "silent" when it should be."""

    case: Case
    result: Result
    top_3: bool
    found: str
    detail: dict[str, Any] | None
    suspects: tuple[str, ...]
    seconds: float
    setting_named: bool | None = None  # None: no setting is the cause, or the comparison tells of none

    def as_dict(self) -> dict[str, Any]:
        known = {
            name: getattr(self, name) for name in ("result", "top_3", "setting_named", "found", "detail", "suspects")
        }
        return self.case.as_dict() | known | {"seconds": round(self.seconds, 3)}


def judge_all(folder: Path, cases: Sequence[Case], processes: int, noise_runs: int) -> list[Judged]:
    """Judge all cases, in so many processes."""
    judged: list[Judged] = []
    for one in in_processes(processes, judge, [folder] * len(cases), cases, [noise_runs] * len(cases)):
        judged.append(one)
        if sys.stderr.isatty():
            print(f"\r{len(judged)} of {len(cases)}", end="\r", file=sys.stderr, flush=True)
    return judged


def judge(folder: Path, case: Case, noise_runs: int = 1) -> Judged:
    """Compare the runs of one case. A comparison that fails names nothing right."""
    begin = time.perf_counter()
    noise: Any = [folder / run for run in case.noise_runs[:noise_runs]]
    try:
        comparison = astray.compare(
            folder / case.reference,
            folder / case.candidate,
            noise=None if not noise else noise[0] if len(noise) == 1 else noise,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the table is to say so
        return Judged(case, "wrong", False, f"{type(error).__name__}: {error}", None, (), time.perf_counter() - begin)
    first = comparison.first
    suspects = tuple(getattr(comparison, "suspects", ()))[:3] or (() if first is None else (first,))
    culprits = () if case.culprit is None else (case.culprit, *case.also)
    if first is None:
        result: Result = "silent"
    else:
        result = "exact" if any(_names(first, one, case) for one in culprits) else "wrong"
    return Judged(
        case,
        result,
        any(is_module(suspect, culprit) for suspect in suspects for culprit in culprits),
        described(first),
        found_as_dict(first),
        tuple(f"step {one.step} {one.phase} {one.site}" for one in suspects),
        time.perf_counter() - begin,
        _setting_named(comparison, case),
    )


def _names(first: astray.Divergence, culprit: Culprit, case: Case) -> bool:
    """Whether it names the culprit: its place and cause, or what was set differently, if that is what it is."""
    if any(_is_setting(one, culprit) for one in getattr(first, "settings", ())):
        return True
    return score(first, culprit, case.setting) == "exact"


def _setting_named(comparison: astray.Comparison, case: Case) -> bool | None:
    culprit, differences = case.culprit, getattr(comparison, "setup", None)
    if culprit is None or culprit.setting is None or differences is None:
        return None
    return any(_is_setting(one, culprit) for one in differences)


def _is_setting(different: Any, culprit: Culprit) -> bool:
    """Whether something that was set differently is the declared cause: by its name, and by its place."""
    if culprit.setting is None:
        return False
    if different.name.rpartition(".")[2] not in SPELLINGS.get(culprit.setting, (culprit.setting,)):
        return False
    if culprit.site in (ANYWHERE, "AdamW", "SGD"):
        return different.kind == "optimizer"
    return culprit.site in {site.partition("/")[0] for site in (different.site, *different.sites)}
