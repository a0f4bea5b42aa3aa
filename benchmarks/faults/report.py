"""What the command prints and writes: markdown tables of scores, and a JSON file with everything that was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tables import markdown

import astray
from faults.declared import Control, Fault, Setting
from faults.running import Outcome
from faults.scoring import SCORES, Score, score


@dataclass(frozen=True)
class Result:
    """One fault or control at one setting."""

    planted: Fault | Control
    setting: Setting
    outcome: Outcome

    @property
    def found(self) -> astray.Divergence | None:
        return self.outcome.comparison.first

    @property
    def score(self) -> Score | None:
        """How good the answer is; None for a control."""
        if isinstance(self.planted, Control):
            return None
        return score(self.found, self.planted.expected(self.setting), self.setting)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file: what was declared, what was found, and what speaks for it."""
        known: dict[str, Any] = {"name": self.planted.name, "what": self.planted.what, "setting": self.setting.name}
        if isinstance(self.planted, Fault):
            known |= {"score": self.score, "expected": str(self.planted.expected(self.setting))}
        else:
            known |= {"alarm": self.found is not None}
        counts = {verdict: count for verdict, count in self.outcome.comparison.counts.items() if count}
        return known | {"found": found_as_dict(self.found), "counts": counts, "seconds": round(self.outcome.seconds, 3)}


def found_as_dict(found: astray.Divergence | None) -> dict[str, Any] | None:
    """A divergence, as far as a JSON file can hold it."""
    if found is None:
        return None
    numbers = {"error": found.error, "limit": found.limit, "surprise": found.surprise}
    return {
        **{
            name: getattr(found, name)
            for name in ("rank", "step", "site", "phase", "cause", "role", "path", "verdict", "measure", "rule")
        },
        **{name: number if math.isfinite(number) else str(number) for name, number in numbers.items()},
        "seen": None if found.seen is None else str(found.seen),
        "onset": None if found.onset is None else str(found.onset),
        "evidence": list(found.evidence),
    }


def fault_table(results: Sequence[Result], setting: Setting) -> str:
    """One line for each fault at one setting."""
    rows = []
    for result in results:
        if result.setting == setting and isinstance(result.planted, Fault):
            mark = str(result.score) if result.score == "exact" else f"**{result.score}**"
            rows.append([result.planted.name, str(result.planted.expected(setting)), described(result.found), mark])
    return markdown(["fault", "culprit", "found", "score"], rows, words=4)


def totals(results: Sequence[Result]) -> str:
    """How many faults got each score at each setting."""
    rows = []
    for setting in dict.fromkeys(result.setting.name for result in results):
        scores = [one.score for one in results if one.setting.name == setting and isinstance(one.planted, Fault)]
        if scores:
            rows.append([setting, str(len(scores)), *(str(scores.count(name)) for name in SCORES)])
    return markdown(["setting", "faults", *SCORES], rows)


def control_table(results: Sequence[Result]) -> str:
    """One line for each control, with a column for each setting."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        if isinstance(result.planted, Control):
            alarm = "none" if result.found is None else f"**alarm**: {described(result.found)}"
            found.setdefault(result.planted.name, {})[result.setting.name] = alarm
    settings = list(dict.fromkeys(result.setting.name for result in results))
    rows = [[name, *(alarms.get(setting, "") for setting in settings)] for name, alarms in found.items()]
    return markdown(["control", *settings], rows, words=len(settings) + 1)


def described(found: astray.Divergence | None) -> str:
    """An answer in a few words, with how far beyond the limit it is."""
    if found is None:
        return "nothing"
    where = f"step {found.step} {found.phase} {found.site}: {found.cause}"
    if found.verdict == "diverged" and math.isfinite(found.error):
        return f"{where} ({found.verdict}, {found.error:.1e} > {found.limit:.1e})"
    return f"{where} ({found.verdict})"
