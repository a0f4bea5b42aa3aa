"""The calls that are most surprising, whether or not they pass a limit: where to look first.

Reads the judged pairs, feeds `comparison` and the reports. A suspect's score is its surprise: how many times further
off it is than what it came from explains. Above 1 it counts as wrong by itself; below, it is what two right runs show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astray.compare.divergence import Place, sureness
from astray.store import Table

MOST = 10
"""So many suspects are told."""

WORDS = {
    "values": "its values are off by",
    "worst": "its worst element is off by",
    "sums": "its norm, mean or std is off by",
    "extremes": "its extremes are off by",
}


@dataclass(frozen=True)
class Suspect:
    """A call that may be wrong by itself.

    place: its most surprising tensor. score: how many times further off than can be explained; ∞ where nothing may
    differ. measure: by what (docs/verdict.md). error: how far off by that measure. limit: how far it may be. given: how
    far off what it came from is. rule: who says so. siblings: how many others it was compared with.
    """

    rank: int
    place: Place
    score: float
    measure: str
    error: float
    limit: float
    given: float
    rule: str
    siblings: int

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def site(self) -> str:
        return self.place.site

    @property
    def phase(self) -> str:
        return self.place.phase

    @property
    def sureness(self) -> str:
        """The score in a word."""
        return sureness(self.score)

    def __str__(self) -> str:
        """Why it is suspected: "its norm is off by 6.2e-02; its inputs (1.1e-04) and 11 siblings explain 9.8e-04"."""
        return explained(self.measure, self.error, self.limit, self.given, self.rule, self.siblings)


def explained(measure: str, error: float, limit: float, given: float, rule: str, siblings: int) -> str:
    """How far off a tensor is, and what would explain how much of it."""
    what = f"{WORDS.get(measure, 'it is off by')} {error:.1e}"
    if np.isnan(error):
        what = "it differs, though no statistic shows by how much"
    if rule == "start":
        return f"{what}, and it came from nothing that could differ"
    if limit == 0 and rule == "siblings":
        return f"{what}, though all it came from is bit-identical, and {siblings} siblings of it stayed so"
    if limit == 0 or np.isnan(limit):
        return what
    source = f"what it came from ({given:.1e})" if given else "rounding, as all it came from is bit-identical,"
    others = {
        "siblings": f" and {siblings} siblings",
        "noise run": " and the noise run",
        "tolerance": "",
    }.get(rule, "")
    if rule == "tolerance":
        return f"{what}; the tolerance is {limit:.1e}"
    return f"{what}; {source}{others} explain{'' if others else 's'} {limit:.1e}"


def find_suspects(pairs: Table) -> tuple[Suspect, ...]:
    """The most surprising tensor of each site and phase, the most surprising first."""
    score = pairs.numbers("surprise")
    at = np.flatnonzero(score > 0)
    order = at[np.lexsort((at, -score[at]))]
    found: dict[tuple[object, ...], Suspect] = {}
    sites, phases, ranks = pairs.coded("site").codes, pairs.coded("phase").codes, pairs.numbers("rank")
    for row in order.tolist():
        key = (int(ranks[row]), int(sites[row]), int(phases[row]))
        if key not in found:
            found[key] = _suspect(pairs, row)
        if len(found) == MOST:
            break
    return tuple(found.values())


def _suspect(pairs: Table, row: int) -> Suspect:
    numbers = {name: float(pairs.numbers(name)[row]) for name in ("surprise", "deviation", "limit", "given")}
    return Suspect(
        rank=int(pairs.numbers("rank")[row]),
        place=Place.of(pairs, row),
        score=numbers["surprise"],
        measure=pairs["measure"][row] or "",
        error=numbers["deviation"],
        limit=numbers["limit"],
        given=numbers["given"],
        rule=pairs["rule"][row] or "",
        siblings=int(pairs.numbers("siblings")[row]),
    )
