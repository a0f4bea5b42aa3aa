"""Compares one rank of two runs (rows → pair → measure → judge → blame), and puts the pairs of ranks into one table.

Read by `schedule` and `worker`; `comparison` calls `table`. A rank depends on no other, not even for the numbers of its
words: so it does not matter which process compares it, or after which. Its result is a few columns that are quickly
sent to another process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.blame.first import find_divergences, rows_to_explain
from astray.comparison.divergence import Divergence
from astray.comparison.judge import Gains, Measured, decide, measure_pairs, noise_gains
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.judge.tolerances import Tolerances
from astray.comparison.measure.custom_metrics import CustomMetrics, Failures
from astray.comparison.measure.evidence import (
    Evidence,
    Progress,
    ReadBlocks,
    ReadPieces,
    ReadValues,
    is_partial,
    source_labels,
    with_part,
)
from astray.comparison.measure.pieces import Pieces
from astray.comparison.pair.alignment import Alignment, Words, align
from astray.comparison.pair.checkpoints import find_worst
from astray.comparison.pair.joined_rank import JoinedRank
from astray.comparison.pair.joined_runs import join_ranks
from astray.comparison.pair.matching import Matching
from astray.comparison.ranks.replaying import MOST_CALLS, MOST_ROUNDS, Replays
from astray.comparison.rows import CALL_COLUMNS, WORDS, Floats, Ints, Rows, StringTable, Vocabularies, read_rows
from astray.comparison.setup.differences import of_rank
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import LABELS, MEASURES, RULES, Judgement, Verdict, explain
from astray.errors import RunError
from astray.store import CheckpointRank, DictionaryColumn, RankRun, Table
from astray.store.run import RankSummary


class RankSides(NamedTuple):
    """One rank as each run has it; None where it has not."""

    reference: RankRun | None
    candidate: RankRun | None
    noise: tuple[RankRun | None, ...] = ()  # of further recordings of the reference


class JudgeOptions(NamedTuple):
    """What all ranks are judged with. replayer: see `Replays`; None where no call is to be replayed."""

    custom_metrics: CustomMetrics
    tolerances: Tolerances = Tolerances()
    exact: bool = False
    replayer: str | None = None


class PairCounts(NamedTuple):
    """How many rows either side has, how many pairs they make, and how many of those could be compared."""

    reference: int
    candidate: int
    matched: int
    comparable: int


class RankPairs(NamedTuple):
    """The pairs of one rank: texts are codes into `words`; a column of one entry has it for all `length` pairs."""

    length: int
    columns: dict[str, npt.NDArray[Any]]
    words: dict[str, list[Any]]

    def take(self, name: str) -> npt.NDArray[Any]:
        """Take a column out, so that not all columns are in memory twice, in the ranks and in the table."""
        return self.columns.pop(name)


class RankComparison(NamedTuple):
    """One rank, compared.

    noise: how much could be compared of the further recordings of the reference.
    accounts: what the tables of reference and candidate say of themselves.
    setup: what was set differently.
    replays: what replaying a call says of a pair.
    """

    rank: int
    pairs: RankPairs
    tally: PairCounts
    noise: tuple[PairCounts, ...]
    divergences: list[Divergence]
    failures: Failures
    accounts: tuple[RankSummary | None, RankSummary | None]
    setup: list[SetupDifference]
    replays: dict[int, ReplayedPair]


def compare_rank(
    rank: int, sides: RankSides, matching: Matching, judging: JudgeOptions, progress: Progress | None = None
) -> RankComparison:
    """Pair, judge and blame. `progress` is called with (done, total) after each pair whose values had to be read."""
    judging = judging._replace(custom_metrics=judging.custom_metrics.anew())
    recorded = _recorded(sides.reference)
    setup = of_rank(rank, recorded, _recorded(sides.candidate), matching)
    if matching.micro == "joined":
        reference, candidate = join_ranks(sides.reference, sides.candidate, matching)
        sides = sides._replace(reference=reference, candidate=candidate)
    plain = Matching(steps=matching.steps)  # their names and steps are those of the reference, whatever the candidate's
    noise = [
        _judge(rank, recorded, run, plain, JudgeOptions(CustomMetrics({})), None)
        for run in sides.noise
        if run is not None
    ]
    gains = [_gains(one, recorded, sides.reference) for one in noise]
    judged = _judge(rank, sides.reference, sides.candidate, matching, judging, progress, gains)
    judged, replays = _with_replays(judged, sides, judging, progress)
    pairs = _pairs(judged)
    divergences = []
    if sides.reference is not None and sides.candidate is not None:
        rows = table([pairs._replace(columns=dict(pairs.columns))])
        if isinstance(sides.reference, CheckpointRank):
            divergences = find_worst(rows, rank, sides.reference, sides.candidate)
        else:
            divergences = find_divergences(rows, rank, sides.reference, sides.candidate, setup, replays)
    return RankComparison(
        rank,
        pairs,
        _tally(judged),
        tuple(_tally(one) for one in noise),
        divergences,
        judging.custom_metrics.failures,
        (_summary(sides.reference), _summary(sides.candidate)),
        setup,
        replays,
    )


def _with_replays(
    judged: _Judged, sides: RankSides, judging: JudgeOptions, progress: Progress | None
) -> tuple[_Judged, dict[int, ReplayedPair]]:
    """The rank as it is judged where calls can be replayed, and what replays say of pairs.

    Where every bit counts they only say whose bits are worse.
    """
    reference, candidate = sides.reference, sides.candidate
    tables = (reference, candidate)
    if judging.replayer is None or any(run is None or isinstance(run, JoinedRank | CheckpointRank) for run in tables):
        return judged, {}
    assert reference is not None
    assert candidate is not None
    replays = Replays(judging.replayer, reference, candidate, len(judged.pairs.reference))
    for number in range(MOST_ROUNDS):
        rows = table([_pairs(judged)])

        def report(done: int, total: int, round_begins: int = number * MOST_CALLS) -> None:
            if progress is not None:
                progress(round_begins + done, round_begins + total)

        proven = replays.look_at(rows, rows_to_explain(rows, reference, candidate), report)
        if not proven or judging.exact:
            break
        judged = judged._replace(judgement=decide(judged.measured, judged.noise, judging.exact, replays.settled))
    return judged, replays.pairs


def _pairs(judged: _Judged) -> RankPairs:
    words = {name: vocabulary.words for name, vocabulary in judged.vocabularies.items()}
    return RankPairs(len(judged.pairs.reference), _columns(judged), words)


def _recorded(run: RankRun | None) -> RankRun | None:
    """A rank as it was recorded, before its micro steps were joined."""
    return run.recorded if isinstance(run, JoinedRank) else run


class _Judged(NamedTuple):
    rank: int
    reference: Rows
    candidate: Rows
    vocabularies: Vocabularies
    pairs: Alignment
    evidence: Evidence
    measured: Measured
    noise: list[Gains]
    judgement: Judgement


def _judge(
    rank: int,
    run_reference: RankRun | None,
    run_candidate: RankRun | None,
    matching: Matching,
    judging: JudgeOptions,
    progress: Progress | None,
    noise: Sequence[Gains] = (),
) -> _Judged:
    """Two sides of a rank, judged; `noise` has the gains that further recordings of the reference showed."""
    vocabularies: Vocabularies = defaultdict(StringTable)
    reference = read_rows(run_reference, vocabularies, matching.of_reference())
    candidate = read_rows(run_candidate, vocabularies, matching.of_candidate())
    words = Words(*(vocabularies[name].words for name in Words._fields))
    pairs = align(reference, candidate, words, in_order=matching.by == "order", same_shape=matching.shapes == "same")
    evidence = Evidence(
        reference,
        candidate,
        pairs,
        dtypes=vocabularies["dtype"].words,
        roles=vocabularies["role"].words,
        phases=vocabularies["phase"].words,
        parts=vocabularies["part"].words,
        paths=vocabularies["path"].words,
        read_reference=_reader(run_reference),
        read_candidate=_reader(run_candidate),
        custom_metrics=judging.custom_metrics,
        tolerance=judging.tolerances.column(reference, pairs.reference, words.site, vocabularies["dtype"].words),
        pieces=None if not isinstance(run_reference, JoinedRank) else (_pieces(run_reference), _pieces(run_candidate)),
        blocks=_blocks(run_reference, run_candidate),
        layouts=[rule.layout for rule in matching.mapping.layouts],
        same_fingerprint_kind=run_reference is None
        or run_candidate is None
        or run_reference.fingerprints == run_candidate.fingerprints,
    )
    rows = np.append(reference.tensor, -1)[pairs.reference]
    of_noise = [gains._replace(rows=rows) for gains in noise]
    measured = measure_pairs(evidence, progress)
    judgement = decide(measured, of_noise, judging.exact)
    return _Judged(rank, reference, candidate, vocabularies, pairs, evidence, measured, of_noise, judgement)


def _reader(run: RankRun | None) -> ReadValues:
    """Reads kept values, or gives None for those that should be there and are not."""

    def read(row: int) -> npt.NDArray[Any] | None:
        try:
            return None if run is None else run.verified(row)
        except RunError:
            return None

    return read


def _pieces(run: RankRun | None) -> ReadPieces:
    """Reads the values of joined micro steps one by one, or gives None for those that are not there."""

    def read(row: int) -> Pieces | None:
        try:
            return run.pieces(row) if isinstance(run, JoinedRank) else None
        except RunError:
            return None

    return read


def _blocks(reference: RankRun | None, candidate: RankRun | None) -> tuple[ReadBlocks, ReadBlocks] | None:
    """Reads the values of two checkpoints block by block."""
    if not isinstance(reference, CheckpointRank) or not isinstance(candidate, CheckpointRank):
        return None
    return reference.blocks, candidate.blocks


def _gains(noise: _Judged, recorded: RankRun | None, reference: RankRun | None) -> Gains:
    """The gains of a noise run by row of the reference's tensors, be they as recorded or joined."""
    if recorded is None or not noise.pairs.matched.any():
        nothing = {name: np.empty(0) for name in MEASURES}
        return Gains(nothing, nothing, np.empty(0, np.int64))
    shown = noise_gains(noise.evidence, noise.judgement)
    tensor = noise.reference.tensor[noise.pairs.reference]

    def by_tensor(gains: dict[str, Floats]) -> dict[str, Floats]:
        columns = {}
        for name, column in gains.items():
            rows, known = tensor[~np.isnan(column)], column[~np.isnan(column)]
            if isinstance(reference, JoinedRank):
                rows, known = reference.largest(rows, known)
            columns[name] = np.full(len((reference or recorded).tensors), np.nan)
            columns[name][rows] = known
        return columns

    return Gains(by_tensor(shown.by_row), by_tensor(shown.in_any_step), np.empty(0, np.int64))


def _tally(judged: _Judged) -> PairCounts:
    comparable = int(np.sum(judged.judgement.verdict < Verdict.ONLY_IN_REFERENCE))
    return PairCounts(len(judged.reference), len(judged.candidate), int(np.sum(judged.pairs.matched)), comparable)


def _summary(run: RankRun | None) -> RankSummary | None:
    if not isinstance(run, JoinedRank):
        return None if run is None else run.summary
    known = run.summary.problems  # those found while its parts were read are problems of the recorded rank
    return run.summary._replace(problems=[*known, *(one for one in run.recorded.summary.problems if one not in known)])


def _columns(judged: _Judged) -> dict[str, npt.NDArray[Any]]:
    """The columns of a rank's pairs, texts as codes."""
    pairs, judgement = judged.pairs, judged.judgement
    columns: dict[str, npt.NDArray[Any]] = {"rank": np.full(len(pairs.reference), judged.rank, np.int32)}
    for name in (*CALL_COLUMNS, "role", "path"):
        columns[name] = _of_either(judged.reference.columns[name], judged.candidate.columns[name], pairs)
    columns |= {"verdict": judgement.verdict, "origin": judgement.origin, "error": judgement.error}
    columns |= {
        name: getattr(judgement, name) for name in ("surprise", "measure", "deviation", "limit", "given", "siblings")
    }
    columns |= {"source": judgement.source, "part": _part(judged), "rule": judgement.rule, "reason": judgement.reason}
    for name in ("dtype", "shape"):
        columns[f"{name}_reference"] = _at(judged.reference.columns[name], pairs.reference)
        columns[f"{name}_candidate"] = _at(judged.candidate.columns[name], pairs.candidate)
    for name, reference, candidate in (
        ("row", judged.reference.tensor, judged.candidate.tensor),
        ("call", judged.reference.call_row, judged.candidate.call_row),
    ):
        columns[f"{name}_reference"] = _at(reference, pairs.reference)
        columns[f"{name}_candidate"] = _at(candidate, pairs.candidate)
    columns |= {name: column if any(column.strides) else _NOTHING for name, column in judgement.metrics.items()}
    return {name: _short(column) for name, column in columns.items()}


_NOTHING = np.array([np.nan])
"""What was measured of no pair."""


def _short(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A single entry where all pairs have the same."""
    same = len(column) > 1 and column[0] == column[-1] and bool(np.all(column == column[0]))
    return column[:1].copy() if same else column


def _part(judged: _Judged) -> Ints:
    """The slice that each pair was judged by, −1 where it was none."""
    at = np.flatnonzero(is_partial(judged.judgement.source))
    if not len(at):
        return np.array([-1], np.int32)
    part = np.full(len(judged.pairs.reference), -1, np.int32)
    reference, candidate = judged.reference.columns["part"], judged.candidate.columns["part"]
    part[at] = np.maximum(reference[judged.pairs.reference[at]], candidate[judged.pairs.candidate[at]])
    return part


def _of_either(reference: Ints, candidate: Ints, pairs: Alignment) -> Ints:
    """A column of the key: the same on both sides, or only on one."""
    if len(reference) == len(pairs.reference):  # every pair has a reference row, and they are in its order
        return reference
    return np.where(pairs.reference >= 0, _at(reference, pairs.reference), _at(candidate, pairs.candidate))


def _at(column: Ints, rows: Ints) -> Ints:
    """The column at some rows, −1 where the row is −1."""
    return np.append(column, np.array(-1, column.dtype))[rows]


def table(ranks: Sequence[RankPairs]) -> Table:
    """The `pairs` of a Comparison: those of these ranks, one after another. The ranks are left without columns.

    Words get common numbers in the order of the ranks. A column that says the same of all pairs, such as a metric that
    could not be measured, takes no memory.
    """
    vocabularies: Vocabularies = defaultdict(StringTable)
    lengths = [rank.length for rank in ranks]
    joined: dict[str, Any] = {}
    for name in list(ranks[0].columns):
        word = name.removesuffix("_reference").removesuffix("_candidate")
        if word in WORDS:
            codes = [vocabularies[word].encode(DictionaryColumn(rank.take(name), rank.words[word])) for rank in ranks]
            joined[name] = vocabularies[word].decode(_in_a_row(codes, lengths))
        else:
            joined[name] = _in_a_row([rank.take(name) for rank in ranks], lengths)
    part = joined.pop("part")
    joined["recompute"] = joined["recompute"].astype(np.bool_)
    joined["verdict"] = DictionaryColumn(joined["verdict"].astype(np.int32), LABELS)
    joined["source"] = source_labels(with_part(joined["source"].astype(np.int32), part.codes), part.values)
    joined["measure"] = DictionaryColumn(joined["measure"].astype(np.int32), list(MEASURES))
    joined["rule"] = DictionaryColumn(joined["rule"].astype(np.int32), RULES)
    joined["reason"] = _reasons(joined["reason"])
    return Table(joined)


def _in_a_row(parts: list[npt.NDArray[Any]], lengths: list[int]) -> npt.NDArray[Any]:
    """One array after another; one of a single entry stands for as many as its rank has pairs."""
    if all(len(part) == 1 for part in parts) and len({part.tobytes() for part in parts}) == 1:
        return np.broadcast_to(parts[0], sum(lengths))
    full = [np.broadcast_to(part, length) for part, length in zip(parts, lengths, strict=True)]
    return parts[0] if len(full) == 1 and len(parts[0]) == lengths[0] else np.concatenate(full)


def _reasons(flags: Ints) -> DictionaryColumn[str]:
    """Every combination of reasons that occurs, in words."""
    at = np.flatnonzero(flags)  # no reason is null
    codes = np.full(len(flags), -1, np.int32)
    distinct, codes[at] = np.unique(flags[at], return_inverse=True)
    return DictionaryColumn(codes, [explain(flag) for flag in distinct.tolist()])
