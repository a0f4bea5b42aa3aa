"""What executing a call again says of it: whose result is wrong, or that the difference came in with its inputs.

The record of a replayed result is made by whoever can execute calls (`CallReplayer`, which `compare` is given by name,
since comparing needs no framework); `find_out` puts those of both runs together. Read by `ranks.replaying`, which has
the calls replayed, and by `verdicts`, which takes what is settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.comparison.judge import thresholds as t
from astray.comparison.rows import Floats
from astray.formatting import figures
from astray.store import RankRun

Finding = Literal["candidate", "reference", "both", "inputs", "arguments", "neither", "not replayed"]
"""Whose result is further from the exact one than rounding explains; `inputs`: nobody's, and the difference came in
with the inputs; `arguments`: nobody's, but the runs make different calls; `neither`: nobody's."""


class NotReplayedError(Exception):
    """A call that cannot be executed again; its text says why."""


class ReplayedResult(NamedTuple):
    """A recorded result of a call, or a gradient that it sent, beside the exact one of the same inputs.

    ulps: its largest error, in the spacing of numbers of its dtype. plain: that of a plain computation in this dtype.
    ratio: how many times as far off it is as that; tile_ratio: the same of the root mean square in the worst tile.
    surprise: how many times as far off as can be explained; beyond 1 it stands out. unequal: of whole numbers, how many
    differ.
    """

    dtype: str
    ulps: float
    plain: float
    ratio: float
    tile_ratio: float
    surprise: float
    unequal: int | None = None

    @property
    def stands_out(self) -> bool:
        return self.surprise > 1 or math.isnan(self.surprise)


Values = npt.NDArray[np.float64]


class CallReplay(NamedTuple):
    """A call that was executed again.

    results: by their rows in the run's table of tensors. draws: whether it draws random numbers. dtypes: of the floats
    that went in and came out; where they are several the call casts. values: of a row the recorded and the exact ones.
    """

    results: dict[int, ReplayedResult]
    draws: bool
    dtypes: frozenset[str]
    values: Callable[[int], tuple[Values, Values]]

    def computes_like(self, other: CallReplay) -> bool:
        """Whether nothing but the values of tensors can make the exact results of two calls differ."""
        casts_alike = self.dtypes == other.dtypes or max(len(self.dtypes), len(other.dtypes)) == 1
        return casts_alike and not self.draws and not other.draws


class RankReplayer(Protocol):
    """Executes calls of one rank."""

    def __call__(self, call: int) -> CallReplay:
        """The call of a row, forward and backward. Raises NotReplayedError."""


CallReplayer = Callable[[RankRun], RankReplayer]


@dataclass(frozen=True)
class ReplayedPair:
    """What both runs' replays say of one tensor. reason: why it was not replayed; then neither side is known."""

    finding: Finding
    reference: ReplayedResult | None = None
    candidate: ReplayedResult | None = None
    reason: str = ""

    @property
    def surprise(self) -> float:
        """How many times further off than can be explained the worse side is; NaN where neither was replayed."""
        known = [side.surprise for side in (self.reference, self.candidate) if side is not None]
        return max(known, default=math.nan)

    def __str__(self) -> str:
        """In words: "the candidate's result is 41 ulps from the exact one, 40 times as far as bfloat16 can do …"."""
        reference, candidate = self.reference, self.candidate
        if reference is None or candidate is None:
            return f"not replayed: {self.reason}"
        if self.finding == "candidate":
            return f"{_standing_out('candidate', candidate)}; the reference's is fine ({_size(reference)})"
        if self.finding == "reference":
            return (
                f"it is the reference that is wrong here: {_standing_out('reference', reference)}; the candidate's is "
                f"fine ({_size(candidate)})"
            )
        sizes = f"reference {_size(reference)}, candidate {_size(candidate)}"
        if self.finding == "both":
            return f"both results are further from the exact ones than rounding explains: {sizes}"
        if self.finding == "inputs":
            return f"both results are what the call gives for its inputs ({sizes}): the difference came in with them"
        if self.finding == "arguments":
            return f"both results are what their own calls give ({sizes}), but the runs do not call it alike"
        return f"both results are within rounding of the exact ones ({sizes})"


def _standing_out(side: str, result: ReplayedResult) -> str:
    if result.unequal is not None:
        elements = "1 element" if result.unequal == 1 else f"{result.unequal:,} elements"
        return f"the {side}'s result differs in {elements} from what the call gives for its inputs"
    if not math.isfinite(result.ulps):
        return f"the {side}'s result is not finite where the exact one of its inputs is, or the other way round"
    how_far = f"the {side}'s result is {_size(result)} from the exact one"
    if result.tile_ratio > 2 * result.ratio:
        return (
            f"{how_far} and, in one tile, {figures.surprise(result.tile_ratio)} times as far as {result.dtype} can do"
        )
    return f"{how_far}, {figures.surprise(result.ratio)} times as far as {result.dtype} can do on its inputs"


def _size(result: ReplayedResult) -> str:
    if result.unequal is not None:
        return "equal" if not result.unequal else f"{result.unequal:,} unequal"
    return f"{figures.surprise(result.ulps)} ulps" if math.isfinite(result.ulps) else "not finite"


def find_out(
    reference: ReplayedResult,
    candidate: ReplayedResult,
    alike: bool,
    own_share: Callable[[], float],
) -> ReplayedPair:
    """What the replays of a tensor in both runs say.

    alike: whether both runs made the same call, of the same arguments but for the values of tensors. own_share: how
    much of the difference is not that of the exact results.
    """
    finding: Finding
    if candidate.stands_out or reference.stands_out:
        finding = (
            "both"
            if candidate.stands_out and reference.stands_out
            else "candidate"
            if candidate.stands_out
            else "reference"
        )
    elif not alike:
        finding = "arguments"
    else:
        finding = "inputs" if own_share() <= t.OWN_SHARE else "neither"
    return ReplayedPair(finding, reference, candidate)


# -- how much of a difference is a call's own --------------------------------------------------------------------------


class Sides(NamedTuple):
    """A tensor in both runs: as it was recorded, and as it is exactly for the inputs of that run."""

    reference: Values
    exact_reference: Values
    candidate: Values
    exact_candidate: Values


def own_share(sides: Sides, measure: str, slice_dim: float, slice_index: float) -> float:
    """Which share of the difference, by the measure that found it, is not the difference of the exact results.

    1 where a call made it all by itself; 0 where it came in with the inputs. NaN-free: what cannot be told is 1.
    """
    if any(one.shape != sides.reference.shape for one in sides):
        return 1.0
    reference, exact_reference, candidate, exact_candidate = sides
    if measure in _STATISTICS:
        recorded, exact = (
            [statistic(after) - statistic(before) for statistic in _STATISTICS[measure]]
            for after, before in ((candidate, reference), (exact_candidate, exact_reference))
        )
        place = int(np.argmax(np.abs(recorded)))
        return _share(recorded[place] - exact[place], recorded[place])
    difference = candidate - reference
    own = difference - (exact_candidate - exact_reference)
    if measure == "slices" and not math.isnan(slice_dim) and int(slice_dim) < difference.ndim:
        own, difference = (np.take(one, int(slice_index), axis=int(slice_dim)) for one in (own, difference))
    size = _SIZES.get(measure, _norm)
    return _share(size(own), size(difference))


def _share(own: float, whole: float) -> float:
    share = abs(own) / abs(whole) if whole else math.inf
    return share if share <= 1 else 1.0  # NaN, too


def _norm(values: Values) -> float:
    return float(np.linalg.norm(values))


def _typical(values: Values) -> float:
    """The norm of the median row."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    return float(np.median(np.linalg.norm(rows, axis=1)))


_SIZES: dict[str, Callable[[Values], float]] = {
    "worst": lambda values: float(np.abs(values).max(initial=0.0)),
    "typical": _typical,
}
_STATISTICS: dict[str, tuple[Callable[[Floats], float], ...]] = {
    "norm": (_norm, lambda values: float(values.std())),
    "mean": (lambda values: float(values.mean()),),
    "extremes": (
        lambda values: float(values.min()),
        lambda values: float(values.max()),
        lambda values: float(np.abs(values).max()),
    ),
}
"""What the measures compare: sizes of the difference, or differences of statistics."""
