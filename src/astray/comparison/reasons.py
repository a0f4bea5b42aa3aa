"""Why a pair was judged as it was: the sentences behind the column `reason`.

Set by `evidence`, `verdict` and `micro`, read by reports. Several may hold of one pair.
"""

from __future__ import annotations

from enum import IntFlag


class Reason(IntFlag):
    """What a reader should know about how a pair was judged."""

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
    Reason.NO_BATCH: "each micro step has its own, which is no part of the batch: what the whole would have is unknown",
    Reason.NO_SUM: "each micro step gives a share, and statistics do not tell their sum: record with keep='tensors'",
    Reason.OTHER_PART: "the slices or samples kept of micro steps are not those of the batch: they were not compared",
}

UNDECIDED = Reason.NO_BATCH | Reason.NO_SUM
"""Why nothing can be said of what micro steps make up together."""


def explain(reason: int) -> str:
    """The sentences of a combination of reasons."""
    return "; ".join(sentence for flag, sentence in SENTENCES.items() if flag & reason)
