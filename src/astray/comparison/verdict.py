"""The verdicts on a pair of tensors, their rules, sources and reasons, and a column of each for every pair of a rank.

Filled in by `judge`, read by `blame` and the reports. `SENTENCES` are the texts of the column `reason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.rows import Floats, Ints


class Verdict(IntEnum):
    """The verdict on a pair. `label` is how it is written."""

    IDENTICAL = 0
    ROUNDING = 1
    DRIFTING = 2
    DIVERGED = 3
    NON_FINITE = 4
    SHAPE = 5
    DTYPE = 6
    ONLY_IN_REFERENCE = 7
    ONLY_IN_CANDIDATE = 8
    UNKNOWN = 9

    @property
    def label(self) -> str:
        return LABELS[self]


class Rule(IntEnum):
    """What decided about a pair."""

    NONE = 0
    BITS = 1
    START = 2
    MODEL = 3
    SIBLINGS = 4
    NOISE = 5
    TOLERANCE = 6
    SEEN_BEFORE = 7
    UNMOVED = 8
    REPLAY = 9


class EvidenceSource(IntEnum):
    """What a pair was judged by, from the worst to the best."""

    NONE = 0
    FINGERPRINT = 1
    STATISTICS = 2
    SAMPLE = 3  # of the tensor, or of a slice of it
    SLICE = 4
    VALUES = 5


RULES = ["", "bits", "start", "model", "siblings", "noise run", "tolerance", "seen before", "unmoved", "replay"]

LABELS = [
    "identical",  # the same bits
    "rounding",  # as far apart as one call's rounding makes them
    "drifting",  # further, but no further than what they came from explains
    "diverged",  # further than that, or come of what is
    "non-finite",  # NaN or Inf where the other side has none
    "shape",
    "dtype",  # of different kinds, such as a float and an integer
    "only in reference",
    "only in candidate",
    "unknown",  # neither side is to blame: what they kept cannot be compared
]

MEASURES = ("values", "worst", "slices", "typical", "norm", "mean", "extremes")
"""The measures a pair is judged by: `judge.errors` defines them."""

AGREEING = (Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.DRIFTING)
BAD = (Verdict.DIVERGED, Verdict.NON_FINITE, Verdict.SHAPE, Verdict.DTYPE)


class Reason(IntFlag):
    """What a reader should know about how a pair was judged: flags, of which several may hold of one pair.

    Set by `evidence`, `joined_runs`, `joined_rank` and `judge`, read by the reports.
    """

    DTYPES = 1
    KINDS = 2
    SHAPES = 4
    RESHAPED = 8
    BITS_ONLY = 16
    SAME_STATISTICS = 32
    ZERO_REFERENCE = 64
    NEGLIGIBLE = 128
    EMPTY = 256
    NONFINITE_BOTH = 512
    NONFINITE_ONE = 1024
    SAMPLED = 2048
    UNREADABLE = 4096
    NOTHING_KEPT = 8192
    REORDERED = 16384
    SLICED = 32768
    ELSEWHERE = 65536
    VICTIM = 131072
    CHOSEN = 262144
    SCALED = 524288
    ADDED = 1 << 21
    MEAN = 1 << 22
    SUM = 1 << 23
    VARIES = 1 << 24
    NO_BATCH = 1 << 25
    NO_SUM = 1 << 26
    OTHER_PART = 1 << 27
    REARRANGED = 1 << 28
    UNMOVED_REFERENCE = 1 << 29
    UNMOVED_CANDIDATE = 1 << 30
    MASKS = 1 << 20
    LAID_OUT = 1 << 31
    UNORDERED = 1 << 32
    APART = 1 << 33
    NOT_MOVED = 1 << 34
    REPLAYED_REFERENCE = 1 << 35
    REPLAYED_CANDIDATE = 1 << 36
    CAME_IN = 1 << 37


SENTENCES = {
    Reason.DTYPES: "the dtypes differ; judged by the coarser one",
    Reason.KINDS: "the dtypes are of different kinds (float, int, bool, complex)",
    Reason.SHAPES: "the shapes differ",
    Reason.RESHAPED: "the values are the same in the same order",
    Reason.REARRANGED: "a gradient of as many elements, whose statistics agree: it came by another view",
    Reason.BITS_ONLY: "bits differ; how much is not known: record with keep='stats'",
    Reason.SAME_STATISTICS: "bits differ but no statistic does: a tiny change, or the same values in another order",
    Reason.ZERO_REFERENCE: "the reference is all zeros, so that a relative error has no scale",
    Reason.NEGLIGIBLE: "both sides are below the rounding of the numbers they came from",
    Reason.VICTIM: "what it came from is wrong, and it is further off than the rest explains",
    Reason.CHOSEN: "a choice among numbers that are off may fall another way",
    Reason.SCALED: "compared after dividing by the factor that all gradients have in common",
    Reason.UNMOVED_REFERENCE: "only the candidate has changed it since the step before",
    Reason.UNMOVED_CANDIDATE: "only the reference has changed it since the step before",
    Reason.MASKS: "the same mask by its statistics: booleans in one run, numbers that are added to scores in the other",
    Reason.EMPTY: "no elements",
    Reason.NONFINITE_BOTH: "NaN or Inf on both sides; judged by the other elements",
    Reason.NONFINITE_ONE: "NaN or Inf where the other side has a number",
    Reason.SAMPLED: "every sampled value is the same",
    Reason.SLICED: "every value of the slice is the same",
    Reason.ELSEWHERE: "each side kept values that the other did not (another slice or sample): they were not compared",
    Reason.UNREADABLE: "the kept values could not be read",
    Reason.NOTHING_KEPT: "the two sides kept nothing that can be compared",
    Reason.REORDERED: "the same values in another order, by the statistics: bits differ, every statistic is equal",
    Reason.ADDED: "the sum over micro steps",
    Reason.MEAN: "taken for the mean over micro steps",
    Reason.SUM: "taken for the sum over micro steps",
    Reason.VARIES: "it changes between micro steps; what the first of them saw was compared",
    Reason.NO_BATCH: "each micro step has its own, which is not part of the batch: what the whole would have is "
    "unknown",
    Reason.NO_SUM: "each micro step gives a share, and statistics do not tell their sum: record with keep='tensors'",
    Reason.LAID_OUT: "compared after it was laid out as the mapping says",
    Reason.UNORDERED: "laid out by the mapping; statistics do not show the order of elements: record with "
    "keep='tensors'",
    Reason.NOT_MOVED: "it has the reference's own bits, though the mapping lays it out in another order",
    Reason.APART: "the mapping says that the two programs compute it in ways of their own",
    Reason.REPLAYED_REFERENCE: "the reference's result is not what its call gives for its inputs, as a replay shows",
    Reason.REPLAYED_CANDIDATE: "the candidate's result is not what its call gives for its inputs, as a replay shows",
    Reason.CAME_IN: "both results are what the call gives for its inputs, as replays show",
    Reason.OTHER_PART: "the slices or samples kept of micro steps are not those of the batch: they were not compared",
}

UNDECIDED = Reason.NO_BATCH | Reason.NO_SUM | Reason.APART
"""Why what was not measured is not judged: of what micro steps make up together, or of what the mapping names."""


def explain(reason: int) -> str:
    """The sentences of a combination of reasons."""
    return "; ".join(sentence for flag, sentence in SENTENCES.items() if flag & reason)


@dataclass
class Judgement:
    """One entry per pair: the columns of the same names in the pairs of a comparison. NaN stands for not known."""

    verdict: npt.NDArray[np.int8]
    error: Floats  # how far apart both sides are, relatively
    surprise: Floats  # gain over allowed gain, by the measure where that is largest
    measure: npt.NDArray[np.int8]  # which measure that is, by its place in MEASURES
    deviation: Floats  # error out, by that measure
    limit: Floats  # allowed gain · base: how large that may be
    given: Floats  # error in: the largest error of the sources, by that measure
    siblings: npt.NDArray[np.int32]  # at how many other sites there are siblings
    origin: npt.NDArray[np.bool_]  # wrong by itself, and not because of its sources
    source: npt.NDArray[np.int8]
    rule: npt.NDArray[np.int8]
    reason: npt.NDArray[np.int64]
    metrics: dict[str, Floats]

    @classmethod
    def empty(cls, pairs: int, own: Sequence[str] = ()) -> Judgement:
        unknown = np.full(pairs, np.nan)
        nowhere = np.broadcast_to(np.float64(np.nan), pairs)  # takes no memory until something is measured
        return cls(
            verdict=np.full(pairs, Verdict.UNKNOWN, np.int8),
            error=unknown,
            surprise=unknown.copy(),
            measure=np.full(pairs, -1, np.int8),
            deviation=unknown.copy(),
            limit=unknown.copy(),
            given=unknown.copy(),
            siblings=np.zeros(pairs, np.int32),
            origin=np.zeros(pairs, np.bool_),
            source=np.full(pairs, EvidenceSource.NONE, np.int8),
            rule=np.full(pairs, Rule.NONE, np.int8),
            reason=np.zeros(pairs, np.int64),
            metrics=dict.fromkeys((*METRICS, *SLICES, *BOUNDS, *own), nowhere),
        )

    def copy(self) -> Judgement:
        """The same to decide about; what was measured is shared."""
        return Judgement(**{name: getattr(self, name).copy() for name in DECIDED}, metrics=self.metrics)

    def take(self, at: Ints) -> Judgement:
        """What is decided about some pairs so far."""
        metrics = {
            name: column[at] if column.flags.writeable else np.broadcast_to(np.float64(np.nan), len(at))
            for name, column in self.metrics.items()
        }
        return Judgement(**{name: getattr(self, name)[at] for name in DECIDED}, metrics=metrics)

    def put(self, at: Ints, decided: Judgement) -> None:
        """Keep what was decided about some pairs; what was measured stays."""
        for name in DECIDED:
            getattr(self, name)[at] = getattr(decided, name)

    def keep_metrics(self, at: Ints, metrics: dict[str, Floats]) -> None:
        for name, column in metrics.items():
            if not self.metrics[name].flags.writeable:
                self.metrics[name] = self.metrics[name].copy()
            self.metrics[name][at] = column


DECIDED = tuple(one.name for one in fields(Judgement) if one.name != "metrics")
