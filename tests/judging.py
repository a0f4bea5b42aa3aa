"""Parts of a judgement by themselves: what stands between two runs and their verdicts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from astray.comparison.judge.bases import Bases, find_bases
from astray.comparison.judge.errors import Errors, find_errors
from astray.comparison.judge.flips import find_optimizer_moves
from astray.comparison.judge.measuring import measure
from astray.comparison.judge.sources import Sources
from astray.comparison.judge.windows import Scaling, find_product_roundoffs, find_scaling, product_roundoffs
from astray.comparison.measure.custom_metrics import CustomMetrics
from astray.comparison.measure.evidence import Evidence
from astray.comparison.pair.alignment import Words, align
from astray.comparison.rows import RowReader, StringTable, Vocabularies, read_rows
from astray.comparison.verdict import Judgement
from astray.store import RunData


class Judged:
    """One rank of two runs, as far as it is asked for."""

    def __init__(self, reference: RunData, candidate: RunData) -> None:
        words: Vocabularies = defaultdict(StringTable)
        left, right = (read_rows(run.ranks[0], words, RowReader()) for run in (reference, candidate))
        pairs = align(left, right, Words(*(words[name].words for name in Words._fields)))
        self.evidence = Evidence(
            left,
            right,
            pairs,
            dtypes=words["dtype"].words,
            roles=words["role"].words,
            phases=words["phase"].words,
            parts=words["part"].words,
            paths=words["path"].words,
            read_reference=reference.ranks[0].values,
            read_candidate=candidate.ranks[0].values,
            custom_metrics=CustomMetrics({}),
            tolerance=np.full(len(pairs.reference), np.nan),
        )
        self.judgement = Judgement.empty(len(pairs.reference))
        self.facts = measure(self.evidence, self.judgement, None)
        self.sources = Sources(self.evidence, pairs.matched)

    @property
    def scaling(self) -> Scaling:
        return find_scaling(self.evidence, self.sources)

    @property
    def errors(self) -> Errors:
        return find_errors(
            self.evidence,
            self.judgement,
            self.scaling.factor,
            product_roundoffs(self.sources, find_product_roundoffs(self.evidence)),
        )

    @property
    def bases(self) -> Bases:
        rows = len(self.sources.comparable)
        moved = find_optimizer_moves(self.errors, self.sources, np.ones(rows, np.bool_), np.zeros(rows))
        return find_bases(self.errors, self.sources, moved)

    def rows(self) -> dict[tuple[Any, ...], int]:
        """The number of each pair, by step, phase, site, call, role and path."""
        run, at = self.evidence.reference.run, self.evidence.pairs.reference
        assert run is not None, "pairs have both sides"
        calls, tensors = run.calls, run.tensors
        found = {}
        for pair, row in enumerate(self.evidence.reference.tensor[at].tolist()):
            call = int(run.call_rows[row])
            key = tuple(calls[name][call] for name in ("step", "phase", "site", "call"))
            found[(*key, tensors["role"][row], tensors["path"][row])] = pair
        return found


def judged_errors(reference: RunData, candidate: RunData) -> Errors:
    return Judged(reference, candidate).errors
