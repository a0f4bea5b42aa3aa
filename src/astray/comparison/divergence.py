"""The records of a divergence, of its place and of its two sides: made by `first`, shown by the reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from astray.comparison.blame.explanation import CERTAIN, UNKNOWN, explained, sureness
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import SENTENCES, Reason
from astray.records import Frame, Statistics
from astray.store import Table

Cause = Literal["computation", "parameter", "input"]


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a call, and how its pair was judged. With an empty `role` it is the call as such."""

    step: int
    micro: int
    site: str
    type: str
    call: int
    phase: str
    role: str
    path: str
    recompute: bool
    verdict: str
    error: float  # NaN: not known
    reason: str
    weight: bool = False  # an input that is a parameter: where functions alone were recorded

    @classmethod
    def of(cls, pairs: Table, row: int) -> TensorPlace:
        """The place of one row of the pairs."""
        names = ("step", "micro", "site", "type", "call", "phase", "role", "path", "recompute", "verdict", "error")
        cells: dict[str, Any] = pairs[[*names, "reason"]].row(row)
        return cls(**(cells | {"path": cells["path"] or "", "reason": cells["reason"] or ""}))

    @property
    def module(self) -> str:
        """The site with its type: `h.2.mlp (MLP)`."""
        return f"{self.site} ({self.type})" if self.type else self.site

    @property
    def stored(self) -> bool:
        """Whether it is a tensor of a checkpoint: no call made it, so its name is all there is."""
        return not self.type and not self.path and self.role in ("parameter", "state")

    @property
    def noun(self) -> str:
        """What the role is called."""
        if self.weight:
            return "parameter"
        return "buffer" if self.role == "state" and self.phase != "update" else self.role

    @property
    def tensor(self) -> str:
        """Which tensor of the call: "input `0`"."""
        return self.noun if self.path in ("", "out", "grad") else f"{self.noun} `{self.path}`"

    @property
    def full(self) -> str:
        """Everything that identifies it, the number of the call even when it is the first."""
        return self._text(f"call {self.call} of {self.module}")

    def __str__(self) -> str:
        return self._text(f"call {self.call} of {self.module}" if self.call else self.module)

    def _text(self, module: str) -> str:
        if self.stored:
            return self.site
        parts = [f"step {self.step}"]
        if self.micro:
            parts.append(f"micro {self.micro}")
        parts.append("recomputed forward" if self.recompute and self.phase == "forward" else self.phase)
        return ", ".join([*parts, module, *([self.tensor] if self.role else [])])


@dataclass(frozen=True)
class Side:
    """The diverged tensor in one run."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    statistics: Statistics | None
    fingerprint: int | None


@dataclass(frozen=True)
class Divergence:
    """The first call whose result is wrong while its inputs were still right, with what speaks for it.

    place: the call to blame and its tensor that is shown. Where a call is to blame none of whose own tensors is wrong,
        role and path are empty, and the numbers are those of the tensor `seen`.
    cause: "computation" (its inputs and parameters agree), "parameter" (a parameter or buffer already differs on
        entry), or "input" (the outermost call was given something else).
    error: how far off the tensor is. NaN: not known.
    surprise: how many times further off than what it came from explains; ∞ where nothing may differ. `measure` says by
        what, `deviation` how far off it is by that, `limit` how far it may be, `given` how far off what it came from
        is, `rule` what decided, and `siblings` how many others it was compared with. `furthest` says in which slice of
        the tensor that is, where slices are the measure: "slice 3 of dimension 0".
    replay: what executing the call again in both runs says, where both kept the values of its inputs and results.
    settings: what was set differently and explains it; then look there first.
    clean: whether all that the call was given was recorded and is identical, so that nothing before it explains it.
    magnitude: the largest absolute difference known; exact from all values, a lower bound from some or from statistics.
    seen: where the wrong value shows first, when that is not the place itself.
    parameter: the parameter or buffer that differs, for that cause; `other_parameters` and `other_buffers` count the
        others in the same step.
    previous: the last result before it that still agreed.
    onset: the first tensor that is not bit-identical, when it comes earlier.
    victims: how many rows after it are wrong too.
    growth: the error of the same tensor in this and later steps.
    """

    rank: int
    place: TensorPlace
    cause: Cause
    limit: float
    magnitude: float
    measured_by: str
    metrics: dict[str, float]
    reference: Side
    candidate: Side
    surprise: float = math.nan
    measure: str = ""
    deviation: float = math.nan
    given: float = math.nan
    rule: str = ""
    siblings: int = 0
    furthest: str = ""
    replay: ReplayedPair | None = None
    settings: tuple[SetupDifference, ...] = ()
    clean: bool = False
    stack: tuple[Frame, ...] = ()
    enclosing: tuple[tuple[str, str], ...] = ()
    seen: TensorPlace | None = None
    parameter: TensorPlace | None = None
    other_parameters: int = 0
    other_buffers: int = 0
    previous: TensorPlace | None = None
    onset: TensorPlace | None = None
    evidence: tuple[str, ...] = ()
    victims: int = 0
    growth: tuple[tuple[int, float], ...] = ()
    order: tuple[int, int] = field(default=(0, 0), repr=False)  # step and row within it: which rank came first

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def micro(self) -> int:
        return self.place.micro

    @property
    def site(self) -> str:
        return self.place.site

    @property
    def type(self) -> str:
        return self.place.type

    @property
    def call(self) -> int:
        return self.place.call

    @property
    def phase(self) -> str:
        return self.place.phase

    @property
    def role(self) -> str:
        return self.place.role

    @property
    def path(self) -> str:
        return self.place.path

    @property
    def verdict(self) -> str:
        return self.place.verdict

    @property
    def error(self) -> float:
        return self.place.error

    @property
    def judged(self) -> TensorPlace:
        """The tensor that surprise, measure, deviation, limit and given are about."""
        if self.parameter is not None and not self.parameter.verdict.startswith("only in"):
            return self.parameter
        return self.seen or self.place

    @property
    def judged_name(self) -> str:
        """What is judged, in words, where it is not the tensor that is shown: "its parameter `weight`"."""
        judged = self.judged
        if judged == self.place:
            return ""
        same_call = (judged.site, judged.call, judged.step) == (self.site, self.call, self.step)
        return f"its {judged.tensor}" if same_call else f"{judged.tensor} of {judged.module}"

    @property
    def explained(self) -> str:
        """How far off `judged` is, and what explains how much of it."""
        return explained(
            measure=self.measure,
            deviation=self.deviation,
            limit=self.limit,
            given=self.given,
            rule=self.rule,
            siblings=self.siblings,
            of=self.judged_name,
            by=self.measured_by if self.judged == self.place else "",
            furthest=self.furthest,
        )

    @property
    def sureness(self) -> str:
        """How sure it is that this is wrong, in a word.

        A setting, a tolerance, a replay, another shape or kind of number, NaN and integers leave no doubt, however
        small the error. Fingerprints alone do not tell rounding from anything else.
        """
        if SENTENCES[Reason.BITS_ONLY] in self.judged.reason:
            return UNKNOWN
        doubtful = self.surprise > 1 and self.rule not in ("tolerance", "replay") and not self.settings
        return sureness(self.surprise) if doubtful else CERTAIN

    @property
    def frame(self) -> Frame | None:
        """The line of the program where the call was made."""
        return self.stack[0] if self.stack else None
