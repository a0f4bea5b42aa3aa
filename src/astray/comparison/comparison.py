"""Compares two runs: the one entry point of this package, and the `ComparisonData` it gives. Users hold
that as `results.comparison.Comparison`.

Each rank is compared by itself (`ranks.rank`), in worker processes where that saves time (`ranks.schedule`), and
`table` puts them together. Everything stays in columns; Python objects are made only for what a report shows.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from astray.comparison.blame.detours import find_equivalent_rows
from astray.comparison.blame.suspects import Suspect, find_suspects
from astray.comparison.divergence import Divergence
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.judge.tolerances import Tolerances
from astray.comparison.measure.custom_metrics import Failures, Metric, failed, find_metrics
from astray.comparison.measure.evidence import Progress
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.pair.alignment import unnamed_calls as unnamed_calls
from astray.comparison.pair.checkpoints import pair_names
from astray.comparison.pair.joined_runs import about_micro_steps, join
from astray.comparison.pair.layout_checks import check_layouts, doubtful_layouts
from astray.comparison.pair.layouts import Layout
from astray.comparison.pair.lone_rows import lone_by_mapping
from astray.comparison.pair.mapping import NOTHING, Mapping
from astray.comparison.pair.matching import Matching, MatchingOptions
from astray.comparison.pair.renaming import renamed_columns
from astray.comparison.problems import different_settings, little_shared, nothing_comparable, nothing_shared, problems
from astray.comparison.ranks.rank import JudgeOptions, PairCounts, RankSides, compare_rank, table
from astray.comparison.ranks.schedule import ComparedRuns, compare_ranks, job_of
from astray.comparison.rows import CALL_COLUMNS
from astray.comparison.select.columns import Columns
from astray.comparison.select.filter import Filter
from astray.comparison.select.pairs import Order, Pairs
from astray.comparison.setup.differences import put_together
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import AGREEING, BAD, LABELS, Verdict
from astray.errors import CompareError
from astray.steps import StepSelection
from astray.store import CheckpointData, RunData, RunInfo, Table, open_run

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

AnyPath = str | os.PathLike[str]

SIDES = ("dtype", "shape", "row", "call")
COLUMNS = (
    "rank", *CALL_COLUMNS, "role", "path", "verdict", "origin", "error", "surprise", "measure", "deviation", "limit",
    "given", "siblings", "source", "rule", "reason",
    *(f"{name}_{side}" for name in SIDES for side in ("reference", "candidate")), *METRICS, *SLICES, *BOUNDS,
)  # fmt: skip
"""The columns of `pairs`, but for the metrics that were asked for."""


def compare(
    reference: AnyPath | RunData,
    candidate: AnyPath | RunData,
    *,
    noise: AnyPath | RunData | Sequence[AnyPath | RunData] | None = None,
    tolerances: dict[str, float] | None = None,
    exact: bool = False,
    metrics: Sequence[str | Metric] | None = None,
    allow_missing: bool = False,
    progress: Progress | None = None,
    processes: int | None = None,
    replayer: str | None = None,
    **options: Unpack[MatchingOptions],
) -> ComparisonData:
    """Compare a run that is right with one that may be wrong.

    >>> diff = compare("runs/a", "runs/b")
    >>> diff.first.site, diff.first.step, diff.first.cause
    ('h.2.mlp.proj', 3, 'parameter')

    options: what to compare and how to pair it: steps, ranks, sites, mapping, by, shapes, micro and offset: see
    `MatchingOptions`. noise: further recordings of the reference, one or several: how far apart two runs get that are
    both right. tolerances: the largest relative errors to allow, by a regular expression for sites or by dtype.
    exact: the runs should be bit-identical, and whatever is not has diverged.
    metrics: what to measure besides, where both runs kept values: "kl", "file.py:function", a function of two arrays.
    allow_missing: runs agree even if some tensors are only in one of them, whatever these are.
    progress: called with (done, total) as pairs whose values had to be read are done; total is a guess until all ranks
        have begun.
    processes: how many ranks to compare at once. As many as there are cores by default, if that saves time; fewer take
        less memory. With runs that are open already or metrics that are functions there is only this process.
    replayer: the dotted name of what executes calls again, "package.module:name", see `CallReplayer`; None for nothing.

    Raises CompareError when the runs have no tensor in common, or kept nothing of them that can be compared.
    """
    noises = () if noise is None else (noise,) if isinstance(noise, str | os.PathLike | RunData) else tuple(noise)
    runs = ComparedRuns(_opened(reference), _opened(candidate), tuple(_opened(run) for run in noises))
    matching, unnamed = unnamed_calls(runs.reference, runs.candidate, Matching.check(**options))
    if exact and matching.micro == "joined":
        raise CompareError("A batch and its parts are not computed alike, to the bit: --exact needs --micro paired.")
    of_torch = all(run.info.framework == "torch" for run in (runs.reference, runs.candidate))
    judging = JudgeOptions(
        find_metrics(metrics, COLUMNS), Tolerances.check(tolerances), exact, replayer if of_torch else None
    )
    matching, renamed = pair_names(runs.reference, runs.candidate, matching.of_runs(runs.reference, runs.candidate))
    matching.check_mapping(runs.candidate)
    check_layouts(runs.reference, runs.candidate, matching)
    job = job_of((reference, candidate, noises), matching, judging, metrics)
    recorded = runs
    if matching.micro == "joined":
        runs = ComparedRuns(*join(runs.reference, runs.candidate, matching), runs.noise)
    ranks = compare_ranks(runs, matching, judging, job, processes, progress)
    for number, run in enumerate(runs.noise):
        _check([one.noise[number] for one in ranks if len(one.noise) > number], runs.reference, run, matching)
    tally = _check([one.tally for one in ranks], recorded.reference, recorded.candidate, matching)
    failures = sum((one.failures for one in ranks), Failures())
    replays, begin = dict[int, ReplayedPair](), 0
    for one in ranks:
        replays |= {begin + row: replayed for row, replayed in one.replays.items()}
        begin += one.pairs.length
    pairs = table([one.pairs for one in ranks])
    notes = [
        *unnamed,
        *renamed,
        *about_micro_steps(runs.reference, runs.candidate, matching, pairs),
        *little_shared(*tally[:3], matching.by, not different_settings(runs.reference, runs.candidate)),
        *failed(failures),
        *doubtful_layouts(pairs, runs.reference, runs.candidate),
        *problems(runs.reference, runs.candidate, matching),
    ]
    return ComparisonData(
        runs.reference,
        runs.candidate,
        pairs,
        tuple(sorted((found for one in ranks for found in one.divergences[:1]), key=_when)),
        tuple(notes),
        matching.steps,
        tuple(sorted((found for one in ranks for found in one.divergences[1:]), key=_when)),
        put_together((found for one in ranks for found in one.setup), recorded.reference, recorded.candidate),
        allow_missing,
        exact,
        matching.mapping,
        replays,
    )


def check_selection(filter: str | None, sort: Order | None, metrics: Sequence[str | Metric] | None = None) -> None:
    """Raises UsageError for rows that no comparison could select: columns that do not exist, words without meaning."""
    nothing = compare_rank(
        0, RankSides(None, None), Matching.check(), JudgeOptions(find_metrics(metrics, COLUMNS))
    ).pairs
    nothing = nothing._replace(words=defaultdict(list, nothing.words))
    run = RunData(Path(), RunInfo.of_process(), {})
    Pairs.select(Columns(run, run, table([nothing])), filter, sort, None)


def _opened(run: AnyPath | RunData) -> RunData:
    return run if isinstance(run, RunData) else open_run(run)


def _check(tallies: Sequence[PairCounts], reference: RunData, candidate: RunData, matching: Matching) -> PairCounts:
    """What all ranks have together. Raises CompareError when nothing of it can be compared."""
    tally = PairCounts(*(sum(counts) for counts in zip(*tallies, strict=True))) if tallies else PairCounts(0, 0, 0, 0)
    if not tally.matched:
        raise CompareError(nothing_shared(reference, candidate, matching))
    if not tally.comparable:
        raise CompareError(nothing_comparable(tally.matched))
    return tally


def _when(divergence: Divergence) -> tuple[int, int, int]:
    """The earliest in step and order first."""
    return (*divergence.order, divergence.rank)


@dataclass(frozen=True, eq=False)
class ComparisonData:
    """What came of comparing two runs.

    pairs: one row for each tensor of either run, in order of observation; `astray help metrics` names its columns.
    firsts: the first divergence of each rank that has one, the earliest first.
    problems: what limits the comparison, a sentence each.
    others: divergences after the first of their rank that it does not explain.
    setup: what was set differently in the two runs, those first that change results.
    allow_missing: whether tensors that are only in one run are fine, whatever they are.
    exact: whether the runs were to be bit-identical.
    mapping: what the candidate is called in the reference.
    replays: what executing calls again in both runs says, by row of `pairs`; few calls are.
    """

    reference: RunData
    candidate: RunData
    pairs: Table
    firsts: tuple[Divergence, ...]
    problems: tuple[str, ...] = ()
    selected: StepSelection = field(default=StepSelection())
    others: tuple[Divergence, ...] = ()
    setup: tuple[SetupDifference, ...] = ()
    allow_missing: bool = False
    exact: bool = False
    mapping: Mapping = NOTHING
    replays: dict[int, ReplayedPair] = field(default_factory=dict)

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all ranks; None when nothing diverged."""
        return self.firsts[0] if self.firsts else None

    @cached_property
    def suspects(self) -> tuple[Suspect, ...]:
        """The calls that are most surprising, whether or not anything diverged, the most surprising first."""
        return find_suspects(self.pairs, self.firsts, self.replays)

    @property
    def of_checkpoints(self) -> bool:
        """Whether checkpoints were compared: they have no order, and the first divergence is the largest one."""
        return isinstance(self.reference, CheckpointData)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows got each verdict, those without any included."""
        found = np.bincount(self.pairs.coded("verdict").codes, minlength=len(LABELS))
        return dict(zip(LABELS, found.tolist(), strict=True))

    @property
    def same(self) -> bool:
        """Whether every tensor is in both runs and agrees, and no setting is named as the cause of what little differs.

        Those that could not be compared do not count, but for those of checkpoints: there everything should be kept.
        Nor do those of `detours`.
        """
        if self.first is not None:
            return False
        uncounted = () if self.of_checkpoints else (Verdict.UNKNOWN,)
        fine = sum(self.counts[verdict.label] for verdict in (*AGREEING, *uncounted))
        return fine + int(np.count_nonzero(self.lone & ~self.missing)) == len(self.pairs)

    @cached_property
    def lone(self) -> npt.NDArray[np.bool_]:
        """Which rows are only in one run."""
        return np.isin(self.pairs.coded("verdict").codes, (Verdict.ONLY_IN_REFERENCE, Verdict.ONLY_IN_CANDIDATE))

    @cached_property
    def detours(self) -> npt.NDArray[np.bool_]:
        """Which rows are only in one run because it computed the same in another way: what came of them agrees."""
        whole = self.reference.complete and self.candidate.complete  # else it is not known why one run lacks it
        if self.of_checkpoints or not whole or not self.lone.any():
            return np.zeros(len(self.pairs), np.bool_)
        return find_equivalent_rows(self.pairs, self.reference, self.candidate)

    @cached_property
    def without_counterpart(self) -> npt.NDArray[np.bool_]:
        """Which rows are only in one run because the other has nothing of the kind, as the mapping says."""
        return lone_by_mapping(self.pairs, self.mapping)

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Which rows should be in both runs and are only in one.

        None of the `detours`, none that the mapping says have no counterpart, and none if they are allowed.
        """
        if self.allow_missing:
            return np.zeros(len(self.pairs), np.bool_)
        return self.lone & ~self.detours & ~self.without_counterpart

    @property
    def exit_code(self) -> int:
        """What the command line ends with: 0 the same, 1 different."""
        return 0 if self.same else 1

    @cached_property
    def steps(self) -> list[int]:
        """The steps that have rows."""
        return [int(step) for step in np.unique(self.pairs.numbers("step"))]

    @cached_property
    def calls(self) -> int:
        """How many calls of the reference have rows."""
        ranks, calls = self.pairs.numbers("rank"), self.pairs.numbers("call_reference")
        return sum(
            int(np.count_nonzero(np.bincount(calls[(ranks == rank) & (calls >= 0)]))) for rank in self.reference.ranks
        )

    @cached_property
    def sources(self) -> dict[str, int]:
        """How many of the pairs were judged by each source, the best first."""
        source = self.pairs.coded("source")  # whose values are in order, the worst first
        found = np.bincount(source.codes[self.matched], minlength=len(source.values)).tolist()
        return {label: count for label, count in zip(source.values[::-1], found[::-1], strict=True) if count}

    @cached_property
    def matched(self) -> npt.NDArray[np.bool_]:
        """Which rows are in both runs."""
        return (self.pairs.numbers("row_reference") >= 0) & (self.pairs.numbers("row_candidate") >= 0)

    @cached_property
    def columns(self) -> Columns:
        """Every column that reports show, by name: `astray help reports` explains them."""
        return Columns(self.reference, self.candidate, self.pairs)

    def layout_of(self, rank: int, row: int) -> Layout | None:
        """How the mapping lays out a tensor of the candidate; None where it lies as the reference's does."""
        if not self.mapping.layouts:
            return None
        if rank not in self._rules:
            self._rules[rank] = renamed_columns(self.candidate.ranks[rank], self.mapping).layout
        rule = int(self._rules[rank][row])
        return self.mapping.layouts[rule].layout if rule >= 0 else None

    @cached_property
    def _rules(self) -> dict[int, npt.NDArray[Any]]:
        """The rules of all tensors of the ranks that were asked for."""
        return {}

    def select(self, filter: str | Filter | None = None, sort: Order | None = None, top: int | None = None) -> Pairs:
        """The rows that fit an expression, sorted, and of these the first few.

        >>> print(diff.select("error > 1e-3 and site ~ 'mlp' and phase == backward", sort="-error", top=10))

        filter: an expression over the columns; `astray help reports` has the language. Every row by default.
        sort: columns with commas between them, or a list of them; `-error` has the largest first. In order of
            observation by default.
        """
        return Pairs.select(self.columns, filter, sort, top)

    def table(self) -> Pairs:
        """Every row with every column, for pandas, Polars, DuckDB and pyarrow.

        >>> pyarrow.table(diff.table()).num_rows
        1698
        """
        return self.select()

    def to_pandas(self) -> pandas.DataFrame:
        """Every row as a DataFrame; needs pandas."""
        return self.table().to_pandas()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        wrong = sum(self.counts[verdict.label] for verdict in BAD)
        which = "the largest" if self.of_checkpoints else "first divergence"
        where = f"{which} at {self.first.place}" if self.first else "no divergence"
        return f"<Comparison of {len(self.pairs):,} tensors: {wrong:,} wrong, {where}>"
