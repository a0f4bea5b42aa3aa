"""Compares two runs: the one entry point of this package, and the `Comparison` it gives.

Ranks are compared one after another: rows → align → evidence → verdict → first. Everything stays in columns; Python
objects are made only for what a report shows.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.compare.align import Alignment, align
from astray.compare.calibration import RULES, Allowance, Tolerances, floors
from astray.compare.columns import Columns
from astray.compare.divergence import Divergence
from astray.compare.evidence import Evidence, Progress, ReadValues, explain
from astray.compare.filter import Filter
from astray.compare.first import find_divergences
from astray.compare.kept import is_partial, labelled, with_part
from astray.compare.matching import Asked, Matching
from astray.compare.metrics import BOUNDS, METRICS
from astray.compare.own_metrics import Metric, OwnMetrics, find_metrics
from astray.compare.pairs import Order, Pairs
from astray.compare.partners import Words
from astray.compare.problems import little_shared, nothing_comparable, nothing_shared, problems
from astray.compare.rows import CALL_COLUMNS, WORDS, Floats, Ints, Reading, Rows, Vocabularies, Vocabulary, read_rows
from astray.compare.verdict import AGREEING, BAD, LABELS, Judgement, Verdict, judge
from astray.errors import CompareError, RunError
from astray.steps import Steps
from astray.store import Coded, RankRun, Run, Table, open_run

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

AnyPath = str | os.PathLike[str]
Floor = dict[int, tuple[Ints, Floats]]

SIDES = ("dtype", "shape", "row", "call")
COLUMNS = (
    "rank", *CALL_COLUMNS, "role", "path", "verdict", "error", "limit", "source", "rule", "reason",
    *(f"{name}_{side}" for name in SIDES for side in ("reference", "candidate")), *METRICS, *BOUNDS,
)  # fmt: skip
"""The columns of `pairs`, but for the metrics that were asked for."""


def compare(
    reference: AnyPath | Run,
    candidate: AnyPath | Run,
    *,
    noise: AnyPath | Run | None = None,
    tolerances: dict[str, float] | None = None,
    exact: bool = False,
    metrics: Sequence[str | Metric] | None = None,
    progress: Progress | None = None,
    **asked: Unpack[Asked],
) -> Comparison:
    """Compare a run that is right with one that may be wrong.

    >>> diff = compare("runs/a", "runs/b")
    >>> diff.first.site, diff.first.step, diff.first.cause
    ('h.2.mlp.proj', 3, 'parameter')

    asked: what to compare and how to pair it: steps, ranks, sites, mapping, by, shapes and offset, as `Asked` has them.
    noise: a second recording of the reference, which shows how far apart two runs get that are both right.
    tolerances: the largest relative errors to allow, by a regular expression for sites or by dtype.
    exact: the runs should be bit-identical, and whatever is not has diverged.
    metrics: what to measure besides, where both runs kept values: "kl", "file.py:function", a function of two arrays.
    progress: called with (done, total) after each pair whose values had to be read, in each rank anew.

    Raises CompareError when the runs have no tensor in common, or kept nothing of them that can be compared.
    """
    left = reference if isinstance(reference, Run) else open_run(reference)
    right = candidate if isinstance(candidate, Run) else open_run(candidate)
    matching = Matching.check(**asked)
    own, allowed = find_metrics(metrics, COLUMNS), Tolerances.check(tolerances)
    floor = None if noise is None else _floor(left, noise, matching)
    vocabularies: Vocabularies = defaultdict(Vocabulary)
    readings = matching.of_reference(), matching.of_candidate(right)
    compared = [
        _compare_rank(
            rank, left, right, vocabularies, readings, matching, _Judging(own, allowed, floor, exact, progress)
        )
        for rank in matching.ranks_of(left, right)
    ]
    matched = sum(int(np.sum(rank.pairs.matched)) for rank in compared)
    if not matched:
        raise CompareError(nothing_shared(left, right, matching))
    if not any(np.any(rank.judged.verdict < Verdict.ONLY_IN_REFERENCE) for rank in compared):
        raise CompareError(nothing_comparable(matched))
    pairs = _table(compared, vocabularies)
    firsts, others = _divergences(compared, pairs)
    sides = sum(len(one.reference) for one in compared), sum(len(one.candidate) for one in compared)
    notes = [*little_shared(*sides, matched), *own.problems, *problems(left, right, matching)]
    return Comparison(left, right, pairs, tuple(firsts), tuple(notes), matching.steps, tuple(others))


@dataclass(frozen=True, eq=False)
class Comparison:
    """What came of comparing two runs.

    pairs: one row for each tensor of either run, in order of observation; docs/metrics.md names its columns.
    firsts: the first divergence of each rank that has one, the earliest first.
    problems: what limits the comparison, a sentence each.
    others: divergences after the first of their rank that are not its victims: their inputs agree.
    """

    reference: Run
    candidate: Run
    pairs: Table
    firsts: tuple[Divergence, ...]
    problems: tuple[str, ...] = ()
    selected: Steps = field(default=Steps())
    others: tuple[Divergence, ...] = ()

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all ranks; None when nothing diverged."""
        return self.firsts[0] if self.firsts else None

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows got each verdict, those without any included."""
        found = np.bincount(self.pairs.coded("verdict").codes, minlength=len(LABELS))
        return dict(zip(LABELS, found.tolist(), strict=True))

    @property
    def same(self) -> bool:
        """Whether every tensor is in both runs and agrees. Those that could not be compared do not count."""
        fine = sum(self.counts[verdict.label] for verdict in (*AGREEING, Verdict.UNKNOWN))
        return fine == len(self.pairs)

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
        """Every column that reports show, by name: docs/reports.md explains them."""
        return Columns(self.reference, self.candidate, self.pairs)

    def select(self, filter: str | Filter | None = None, sort: Order | None = None, top: int | None = None) -> Pairs:
        """The rows that fit an expression, sorted, and of these the first few.

        >>> print(diff.select("error > 1e-3 and site ~ 'mlp' and phase == backward", sort="-error", top=10))

        filter: an expression over the columns; docs/reports.md has the language. Every row by default.
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

    def to_csv(
        self,
        folder: AnyPath,
        *,
        filter: str | Filter | None = None,
        sort: Order | None = None,
        progress: Progress | None = None,
    ) -> list[Path]:
        """Write pairs.csv and summary.csv into a folder; gives their paths.

        filter, sort: which rows pairs.csv has, and in which order, as in `select`; the summary is of all.
        progress: called with (done, total) rows.
        """
        from astray.report.csv import write_csv  # reports stand on comparisons, so they are fetched only here

        return write_csv(self, Path(folder), self.select(filter, sort), progress)

    def to_xlsx(
        self,
        file: AnyPath,
        *,
        filter: str | Filter | None = None,
        sort: Order | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Write a workbook with a summary, the first divergence and the rows; needs XlsxWriter.

        filter, sort: which rows the sheet `pairs` has, and in which order, as in `select`.
        progress: called with (done, total) rows.
        """
        from astray.report.xlsx import write_xlsx

        return write_xlsx(self, Path(file), self.select(filter, sort), progress)

    def to_json(self, file: AnyPath) -> Path:
        """Write the first divergence, the counts and the rows that do not agree."""
        from astray.report.json import write_json

        return write_json(self, Path(file))

    def to_junit(self, file: AnyPath) -> Path:
        """Write what continuous integration shows as test results: one case for each site, or group of sites."""
        from astray.report.junit import write_junit

        return write_junit(self, Path(file))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table().__arrow_c_stream__(requested_schema)

    def __str__(self) -> str:
        from astray.report.text import render

        return render(self)

    def _repr_html_(self) -> str:
        from astray.report.html import comparison_as_html

        return comparison_as_html(self)

    def __repr__(self) -> str:
        wrong = sum(self.counts[verdict.label] for verdict in BAD)
        where = f"first divergence at {self.first.place}" if self.first else "no divergence"
        return f"<Comparison of {len(self.pairs):,} tensors: {wrong:,} wrong, {where}>"


class _Rank(NamedTuple):
    """One rank, compared."""

    rank: int
    reference: Rows
    candidate: Rows
    pairs: Alignment
    judged: Judgement


class _Judging(NamedTuple):
    """What all ranks are judged with."""

    own: OwnMetrics
    allowed: Tolerances
    floor: Floor | None
    exact: bool
    progress: Progress | None


def _floor(reference: Run, noise: AnyPath | Run, matching: Matching) -> Floor:
    """What a second recording of the reference shows: for each rank some rows of the reference, and their errors."""
    again = compare(reference, noise, steps=matching.steps, ranks=matching.ranks)
    pairs, seen = again.pairs, again.matched & ~np.isnan(again.pairs.numbers("error"))
    ranks = pairs.numbers("rank")
    found: Floor = {}
    for rank in np.unique(ranks).tolist():
        at = np.flatnonzero(seen & (ranks == rank))
        found[rank] = pairs.numbers("row_reference")[at], pairs.numbers("error")[at]
    return found


def _compare_rank(
    rank: int,
    left: Run,
    right: Run,
    vocabularies: Vocabularies,
    readings: tuple[Reading, Reading],
    matching: Matching,
    judging: _Judging,
) -> _Rank:
    reference = read_rows(left.ranks.get(rank), vocabularies, readings[0])
    candidate = read_rows(right.ranks.get(rank), vocabularies, readings[1])
    words = Words(vocabularies["kind"].words, vocabularies["site"].words)
    pairs = align(reference, candidate, words, in_order=matching.by == "order", same_shape=matching.shapes == "same")
    evidence = Evidence(
        reference,
        candidate,
        pairs,
        dtypes=vocabularies["dtype"].words,
        roles=vocabularies["role"].words,
        parts=vocabularies["part"].words,
        read_reference=_reader(reference.run),
        read_candidate=_reader(candidate.run),
        own=judging.own,
        allowance=Allowance(
            judging.allowed.column(reference, pairs.reference, words.site, vocabularies["dtype"].words),
            floors(reference, pairs.reference, (judging.floor or {}).get(rank)),
        ),
    )
    return _Rank(rank, reference, candidate, pairs, judge(evidence, judging.progress, judging.exact))


def _reader(run: RankRun | None) -> ReadValues:
    """Reads kept values, or gives None for those that should be there and are not."""

    def read(row: int) -> npt.NDArray[Any] | None:
        try:
            return None if run is None else run.values(row)
        except RunError:
            return None

    return read


def _table(ranks: list[_Rank], vocabularies: Vocabularies) -> Table:
    """The pairs of all ranks as one table."""
    parts = [_columns(rank) for rank in ranks]
    joined = {
        name: np.concatenate([part[name] for part in parts]) if len(parts) > 1 else parts[0][name] for name in parts[0]
    }
    columns: dict[str, Any] = {}
    for name, column in joined.items():
        word = name.removesuffix("_reference").removesuffix("_candidate")
        columns[name] = vocabularies[word].decode(column) if word in WORDS else column
    columns["recompute"] = columns["recompute"].astype(np.bool_)
    columns["verdict"] = Coded(columns["verdict"].astype(np.int32), LABELS)
    columns["source"] = labelled(columns["source"], vocabularies["part"].words)
    columns["rule"] = Coded(columns["rule"].astype(np.int32), RULES)
    columns["reason"] = _reasons(columns["reason"])
    return Table(columns)


def _columns(rank: _Rank) -> dict[str, Any]:
    """The columns of one rank's pairs, strings as codes."""
    pairs, judged = rank.pairs, rank.judged
    columns: dict[str, Any] = {"rank": np.full(len(pairs.reference), rank.rank, np.int32)}
    for name in (*CALL_COLUMNS, "role", "path"):
        columns[name] = _of_either(rank.reference.columns[name], rank.candidate.columns[name], pairs)
    columns |= {"verdict": judged.verdict, "error": judged.error, "limit": judged.limit}
    columns |= {"source": _source(rank), "rule": judged.rule, "reason": judged.reason}
    for name in ("dtype", "shape"):
        columns[f"{name}_reference"] = _at(rank.reference.columns[name], pairs.reference)
        columns[f"{name}_candidate"] = _at(rank.candidate.columns[name], pairs.candidate)
    for name, left, right in (
        ("row", rank.reference.tensor, rank.candidate.tensor),
        ("call", rank.reference.call_row, rank.candidate.call_row),
    ):
        columns[f"{name}_reference"] = _at(left, pairs.reference)
        columns[f"{name}_candidate"] = _at(right, pairs.candidate)
    return columns | judged.metrics


def _source(rank: _Rank) -> Ints:
    """What each pair was judged by, with the slice where it was one."""
    source, pairs = rank.judged.source.astype(np.int32), rank.pairs
    at = np.flatnonzero(is_partial(source))
    if len(at):
        left, right = rank.reference.columns["part"], rank.candidate.columns["part"]
        source[at] = with_part(source[at], np.maximum(left[pairs.reference[at]], right[pairs.candidate[at]]))
    return source


def _of_either(left: Ints, right: Ints, pairs: Alignment) -> Ints:
    """A column of the key: the same on both sides, or only on one."""
    if len(left) == len(pairs.reference):  # every pair has a reference row, and they are in its order
        return left
    return np.where(pairs.reference >= 0, _at(left, pairs.reference), _at(right, pairs.candidate))


def _at(column: Ints, rows: Ints) -> Ints:
    """The column at some rows, −1 where the row is −1."""
    return np.append(column, np.array(-1, column.dtype))[rows]


def _reasons(flags: Ints) -> Coded[str]:
    """Every combination of reasons that occurs, in words."""
    found = np.flatnonzero(np.bincount(flags, minlength=1))
    found = found[found > 0]  # no reason is null
    number = np.full(int(flags.max(initial=0)) + 1, -1, np.int32)
    number[found] = np.arange(len(found))
    return Coded(number[flags], [explain(flag) for flag in found.tolist()])


def _divergences(ranks: list[_Rank], pairs: Table) -> tuple[list[Divergence], list[Divergence]]:
    """The first divergence of every rank, and all others, each the earliest in step and order first."""
    firsts: list[Divergence] = []
    others: list[Divergence] = []
    begin = 0
    for rank in ranks:
        end = begin + len(rank.pairs.reference)
        if rank.reference.run is not None and rank.candidate.run is not None:
            found = find_divergences(pairs.take(slice(begin, end)), rank.rank, rank.reference.run, rank.candidate.run)
            firsts += found[:1]
            others += found[1:]
        begin = end
    return sorted(firsts, key=_when), sorted(others, key=_when)


def _when(divergence: Divergence) -> tuple[int, int, int]:
    return (*divergence.order, divergence.rank)
