"""The calls that are most surprising, whether or not they pass a limit: where to look first.

Reads the judged pairs, feeds `comparison` and the reports. A suspect's score is its surprise: how many times further
off it is than what it came from explains. Above 1 it counts as wrong by itself; below, it is what two right runs show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from astray.comparison.blame.explanation import CERTAIN, explained, furthest_slice, sureness
from astray.comparison.divergence import Divergence, TensorPlace
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.rows import Bools
from astray.store import Table

MOST = 10
"""So many suspects are reported."""


@dataclass(frozen=True)
class Suspect:
    """A call that may be wrong by itself.

    place: its most surprising tensor. score: how many times further off than can be explained; ∞ where nothing may
    differ. measure: by what (`astray help verdict`). error: how far off by that measure. limit: how far it may be.
    given: how far off what it came from is. rule: what decided. siblings: how many others it was compared with.
    of: whose numbers these are, in words, where they are not those of the place. furthest: of which slice of it.
    replay: what executing the call again in both runs says, where that was done.
    """

    rank: int
    place: TensorPlace
    score: float
    measure: str
    error: float
    limit: float
    given: float
    rule: str
    siblings: int
    of: str = ""
    furthest: str = ""
    replay: ReplayedPair | None = None

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
        return CERTAIN if self.rule == "replay" and self.score > 1 else sureness(self.score)

    def __str__(self) -> str:
        """Why it is suspected: "its extremes are off by 0.062; rounding explains at most 9.8e-04"."""
        if math.isnan(self.error):  # another shape, NaN, integers: what has no size
            return self.place.reason or self.place.verdict
        return explained(
            measure=self.measure,
            deviation=self.error,
            limit=self.limit,
            given=self.given,
            rule=self.rule,
            siblings=self.siblings,
            of=self.of,
            furthest=self.furthest,
        )


def find_suspects(
    pairs: Table, firsts: Sequence[Divergence] = (), replays: Mapping[int, ReplayedPair] = MappingProxyType({})
) -> tuple[Suspect, ...]:
    """The most surprising tensor of each site and phase, the most surprising first.

    firsts: the first divergences, which come before all others: one may be known by more than its numbers. replays:
    what replaying a call says of a row.
    """
    known = {(one.rank, one.site, one.phase): _of_divergence(one) for one in firsts[:MOST]}
    found = [_suspect(pairs, row, replays.get(row)) for row in most_surprising(pairs)]
    rest = [one for one in found if (one.rank, one.site, one.phase) not in known]
    return (*known.values(), *rest)[:MOST]


def _of_divergence(divergence: Divergence) -> Suspect:
    sure = divergence.settings or divergence.parameter is not None or math.isnan(divergence.surprise)
    score = math.inf if sure else divergence.surprise
    return Suspect(
        rank=divergence.rank,
        place=divergence.place,
        score=score,
        measure=divergence.measure,
        error=divergence.deviation,
        limit=divergence.limit,
        given=divergence.given,
        rule=divergence.rule,
        siblings=divergence.siblings,
        of=divergence.judged_name,
        furthest=divergence.furthest,
        replay=divergence.replay,
    )


def most_surprising(pairs: Table, least: float = 0.0, among: Bools | None = None) -> list[int]:
    """The row of the most surprising tensor of each site and phase, the most surprising first.

    least: only those of a larger surprise. among: only these rows.
    """
    score = pairs.numbers("surprise")
    at = np.flatnonzero(score > least if among is None else among & (score > least))
    order = at[np.lexsort((at, -score[at]))]
    found: dict[tuple[object, ...], int] = {}
    sites, phases, ranks = pairs.coded("site").codes, pairs.coded("phase").codes, pairs.numbers("rank")
    for row in order.tolist():
        key = (int(ranks[row]), int(sites[row]), int(phases[row]))
        found.setdefault(key, row)
        if len(found) == MOST:
            break
    return list(found.values())


def _suspect(pairs: Table, row: int, replay: ReplayedPair | None) -> Suspect:
    numbers = {name: float(pairs.numbers(name)[row]) for name in ("surprise", "deviation", "limit", "given")}
    return Suspect(
        rank=int(pairs.numbers("rank")[row]),
        place=TensorPlace.of(pairs, row),
        score=numbers["surprise"],
        measure=pairs["measure"][row] or "",
        error=numbers["deviation"],
        limit=numbers["limit"],
        given=numbers["given"],
        rule=pairs["rule"][row] or "",
        siblings=int(pairs.numbers("siblings")[row]),
        furthest=furthest_slice(pairs, row),
        replay=replay,
    )
