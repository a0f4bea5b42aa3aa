"""Micro steps of one run against a larger batch of the other: both runs as if every step had been one micro step.

Takes two runs, gives two runs that `comparison` compares like any others; `micro_groups` finds which rows belong
together, and `joined_rank` makes one of them. It is done when the user asks for it and never by itself: a program may
call its model several times in a step for other reasons, and a micro step that was left out is a fault to be found.
Where it would apply, the report suggests it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from astray.comparison.pair.joined_rank import JoinedRank, ReducedNumbers, Tables, join_rows
from astray.comparison.pair.matching import Matching
from astray.comparison.pair.micro_groups import GroupMembers, JoinRule, MicroStepGroups, group, micro_steps
from astray.comparison.rows import Ints, RowReader, Rows, StringTable, Vocabularies, read_rows
from astray.comparison.verdict import Reason
from astray.graph.keys import one_key
from astray.steps import StepSelection
from astray.store import RankRun, RunData, Table
from astray.wording import counted


def join(reference: RunData, candidate: RunData, matching: Matching) -> tuple[RunData, RunData]:
    """Both runs with the micro steps of each step joined. Nothing is read before it is asked for."""
    ranks: tuple[dict[int, RankRun], dict[int, RankRun]] = ({}, {})
    for rank in sorted({*reference.ranks, *candidate.ranks}):
        both = join_ranks(reference.ranks.get(rank), candidate.ranks.get(rank), matching)
        for side, joined in zip(ranks, both, strict=True):
            if joined is not None:
                side[rank] = joined
    return reference.with_ranks(ranks[0]), candidate.with_ranks(ranks[1])


def join_ranks(
    reference: RankRun | None, candidate: RankRun | None, matching: Matching
) -> tuple[RankRun | None, RankRun | None]:
    """One rank of both runs with its micro steps joined; as it is if it has been joined before."""
    if any(isinstance(rank, JoinedRank) for rank in (reference, candidate)):
        return reference, candidate
    joins = _Join((reference, candidate), (matching.of_reference(), matching.of_candidate()))
    joined_reference, joined_candidate = (
        None if rank is None else JoinedRank(rank, joins, side) for side, rank in enumerate((reference, candidate))
    )
    return joined_reference, joined_candidate


def about_micro_steps(reference: RunData, candidate: RunData, matching: Matching, pairs: Table) -> list[str]:
    """What a reader should know about the micro steps of both runs, a sentence each."""
    if matching.micro == "joined":
        return list(_about_joined(reference, candidate))
    unmatched = np.any((pairs.numbers("row_reference") < 0) | (pairs.numbers("row_candidate") < 0))
    return _suggestion(reference, candidate, matching) if unmatched else []


def _about_joined(reference: RunData, candidate: RunData) -> Iterator[str]:
    one, other = _spread(reference), _spread(candidate)
    yield f"Micro steps were joined along the batch: the reference has {one} in a step, the candidate {other}."
    for side, run in (("reference", reference), ("candidate", candidate)):
        if _has_added(_one_rank(run)):
            yield (
                f"What single micro steps of the {side} added to the gradients of parameters was not compared by "
                "itself: it is part of the accumulated gradients."
            )


def _suggestion(reference: RunData, candidate: RunData, matching: Matching) -> list[str]:
    """A hint that micro steps could be joined: one run has more of them, and their sizes add up to the other's."""
    shared = sorted(set(reference.ranks) & set(candidate.ranks))
    if not shared or matching.by == "order":
        return []
    both = reference.ranks[shared[0]], candidate.ranks[shared[0]]
    counts = [micro_steps(*(rank.calls.numbers(name) for name in ("step", "micro"))) for rank in both]
    counts_reference, counts_candidate = counts[0], {step + matching.offset: count for step, count in counts[1].items()}
    differ = [
        step
        for step, count in counts_reference.items()
        if counts_candidate.get(step, count) != count and step in matching.steps
    ]
    if not differ:
        return []
    alone = replace(matching, steps=StepSelection.parse(differ[0]))
    if not np.any(_Join(both, (alone.of_reference(), alone.of_candidate())).groups.parts):
        return []
    return [
        f"In step {differ[0]} the reference has {counted(counts_reference[differ[0]], 'micro step')} and the candidate "
        f"{counts_candidate[differ[0]]}, whose batches add up to the same size. To compare whole steps, "
        "join them with --micro joined."
    ]


class _Join:
    """One rank of both runs, joined when its tables are first read: a `RankJoiner`."""

    def __init__(self, ranks: tuple[RankRun | None, RankRun | None], readings: tuple[RowReader, RowReader]) -> None:
        self._ranks = ranks
        self._readings = readings
        self._tables: dict[int, Tables] = {}

    def tables(self, side: int) -> Tables:
        """The joined tables of the reference (0) or the candidate (1)."""
        if side not in self._tables:
            rank, groups = self._ranks[side], self.groups
            assert rank is not None, "only a rank that is there is asked for its tables"
            varies = groups.given & ~groups.constant
            added = np.where(groups.shares, Reason.ADDED, Reason.SUM) * (groups.rule == JoinRule.SUMMED)
            remark = np.where(varies, Reason.VARIES, added).astype(np.int32)
            members = (groups.reference, groups.candidate)[side]
            numbers, samples = self._numbers[side], self._samples[side]
            self._tables[side] = join_rows(rank, members, groups, remark, numbers, samples)
        return self._tables[side]

    @cached_property
    def groups(self) -> MicroStepGroups:
        words: Vocabularies = defaultdict(StringTable)
        rows = [read_rows(rank, words, reading) for rank, reading in zip(self._ranks, self._readings, strict=True)]
        reference, candidate = (_without_added(side, words) for side in rows)
        return group(reference, candidate, words)

    @cached_property
    def _numbers(self) -> tuple[ReducedNumbers, ReducedNumbers]:
        return _reduce(self.groups, self._samples)

    @cached_property
    def _samples(self) -> tuple[Ints, Ints]:
        return _samples(self.groups.reference, self.groups), _samples(self.groups.candidate, self.groups)


def _without_added(rows: Rows, words: Vocabularies) -> Rows:
    """Without what single backward passes added to gradients: the accumulated ones have it in them."""
    kind, path = (words[name].words for name in ("kind", "path"))
    if "parameter" not in kind or "added" not in path:
        return rows
    added = (rows.columns["kind"] == kind.index("parameter")) & (rows.columns["path"] == path.index("added"))
    at = np.flatnonzero(~added)
    columns = {name: column[at] for name, column in rows.columns.items()}
    return Rows(rows.run, rows.tensor[at], rows.call_row[at], columns)


def _one_rank(run: RunData) -> RankRun | None:
    """The first rank, as it was recorded. What one does all do, and the others need not be read to tell it."""
    first = run.ranks[min(run.ranks)] if run.ranks else None
    return first.recorded if isinstance(first, JoinedRank) else first


def _has_added(rank: RankRun | None) -> bool:
    """Whether a backward pass added to a gradient that was there before."""
    if rank is None:
        return False
    kind, path = rank.calls.coded("kind"), rank.tensors.coded("path")
    of_parameter = np.append(kind.codes == kind.code("parameter"), False)[rank.call_rows]
    return bool(np.any(of_parameter & (path.codes == path.code("added"))))


def _spread(run: RunData) -> str:
    """How many micro steps the steps of a run have."""
    rank = _one_rank(run)
    found = [] if rank is None else micro_steps(rank.calls.numbers("step"), rank.calls.numbers("micro")).values()
    least, most = min(found, default=0), max(found, default=0)
    return str(most) if least == most else f"{least} to {most}"


def _reduce(groups: MicroStepGroups, samples: tuple[Ints, Ints]) -> tuple[ReducedNumbers, ReducedNumbers]:
    """The mean or the sum of numbers that micro steps have one of each: whichever both runs agree about better."""
    at = np.flatnonzero(groups.rule == JoinRule.REDUCED)
    sides = groups.reference, groups.candidate
    value = [np.full(len(groups.rule), np.nan) for _ in sides]
    by_mean = np.zeros(len(groups.rule), np.bool_)
    for number in at.tolist():
        found = [_mean_and_sum(side, number, weight) for side, weight in zip(sides, samples, strict=True)]
        apart = [abs(one - other) for one, other in zip(*found, strict=True)]
        by_mean[number] = not apart[1] < apart[0]
        for side in (0, 1):
            value[side][number] = found[side][0 if by_mean[number] else 1]
    sure = by_mean & groups.constant
    return ReducedNumbers(value[0], by_mean, sure), ReducedNumbers(value[1], by_mean, sure)


def _mean_and_sum(side: GroupMembers, number: int, samples: Ints) -> tuple[float, float]:
    """Of the numbers of one group; NaN where one of them is not known or not finite."""
    rows = side.at(number)
    if not len(rows):
        return np.nan, np.nan
    values, weights = side.rows.statistic("mean", rows), samples[rows].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # a sum beyond float64 agrees with none
        mean = np.sum(values * weights) / np.sum(weights) if np.all(weights > 0) else np.mean(values)
        return float(mean), float(np.sum(values))


def _samples(side: GroupMembers, groups: MicroStepGroups) -> Ints:
    """For each row how many samples of the batch its micro step has; 0 where that is not known.

    It is the size of the first tensor of the step that all its micro steps have a part of: a model is given its batch
    before anything else.
    """
    columns = side.rows.columns
    at = np.flatnonzero(groups.parts & (side.length > 0))
    if not len(at):
        return np.zeros(len(side.rows), np.int64)
    assert side.rows.run is not None, "there are rows"
    first = side.order[side.begin[at]]
    step = columns["step"][first]
    order = np.lexsort((first, -side.length[at], step))
    _, chosen = np.unique(step[order], return_index=True)
    shape = side.rows.run.tensors.coded("shape")
    places, place = np.unique(one_key([columns["step"], columns["micro"]]), return_inverse=True)
    size = np.zeros(len(places), np.int64)
    for number in at[order[chosen]].tolist():
        for row in side.at(number).tolist():
            sizes = shape[int(side.rows.tensor[row])]
            size[place[row]] = 0 if sizes is None else sizes[int(groups.dim[number])]
    return size[place]
