"""Puts the pairs of some ranks into one table: the `pairs` of a Comparison.

Each rank comes with words of its own, and they get common numbers in the order of the ranks. A column that says the
same of all pairs, such as a metric that could not be measured, takes no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.kept_values import labelled, with_part
from astray.comparison.reasons import explain
from astray.comparison.rows import WORDS, Ints, Vocabularies, Vocabulary
from astray.comparison.verdict import LABELS, MEASURES, RULES
from astray.store import Coded, Table


class RankPairs(NamedTuple):
    """The pairs of one rank, so many: texts are codes into `words`, and a single entry stands for all."""

    length: int
    columns: dict[str, npt.NDArray[Any]]
    words: dict[str, list[Any]]

    def take(self, name: str) -> npt.NDArray[Any]:
        """Take a column out: all of them twice, here and in the table, would be too much for many ranks."""
        return self.columns.pop(name)


def table(ranks: Sequence[RankPairs]) -> Table:
    """The pairs of these ranks, one rank after another; they are left without columns."""
    vocabularies: Vocabularies = defaultdict(Vocabulary)
    lengths = [rank.length for rank in ranks]
    joined: dict[str, Any] = {}
    for name in list(ranks[0].columns):
        word = name.removesuffix("_reference").removesuffix("_candidate")
        if word in WORDS:
            codes = [vocabularies[word].encode(Coded(rank.take(name), rank.words[word])) for rank in ranks]
            joined[name] = vocabularies[word].decode(_in_a_row(codes, lengths))
        else:
            joined[name] = _in_a_row([rank.take(name) for rank in ranks], lengths)
    part = joined.pop("part")
    joined["recompute"] = joined["recompute"].astype(np.bool_)
    joined["verdict"] = Coded(joined["verdict"].astype(np.int32), LABELS)
    joined["source"] = labelled(with_part(joined["source"].astype(np.int32), part.codes), part.values)
    joined["measure"] = Coded(joined["measure"].astype(np.int32), list(MEASURES))
    joined["rule"] = Coded(joined["rule"].astype(np.int32), RULES)
    joined["reason"] = _reasons(joined["reason"])
    return Table(joined)


def _in_a_row(parts: list[npt.NDArray[Any]], lengths: list[int]) -> npt.NDArray[Any]:
    """One array after another; one of a single entry stands for as many as its rank has pairs."""
    if all(len(part) == 1 for part in parts) and len({part.tobytes() for part in parts}) == 1:
        return np.broadcast_to(parts[0], sum(lengths))
    full = [np.broadcast_to(part, length) for part, length in zip(parts, lengths, strict=True)]
    return parts[0] if len(full) == 1 and len(parts[0]) == lengths[0] else np.concatenate(full)


def _reasons(flags: Ints) -> Coded[str]:
    """Every combination of reasons that occurs, in words."""
    at = np.flatnonzero(flags)  # no reason is null
    codes = np.full(len(flags), -1, np.int32)
    found, codes[at] = np.unique(flags[at], return_inverse=True)
    return Coded(codes, [explain(flag) for flag in found.tolist()])
