"""A comparison as users hold it: the data of `comparison`, printed, shown in a notebook, and written to files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.comparison.comparison import ComparisonData
from astray.results.run import Run

if TYPE_CHECKING:
    from astray.comparison.measure.evidence import Progress
    from astray.comparison.select.filter import Filter
    from astray.comparison.select.pairs import Order

AnyPath = str | os.PathLike[str]

REPLAYER = "astray.replay.verifying:ReplayedRank"
"""What executes calls again for a comparison, which imports it where it is needed: it takes torch."""


class Comparison(ComparisonData):
    """The result of comparing two runs.

    >>> diff = astray.compare("runs/a", "runs/b")
    >>> print(diff)                     # the first divergence, then a summary
    >>> diff.to_html("report.html")     # the page of `astray view` as one file

    pairs: one row for each tensor of either run, in order of observation; `astray help metrics` names its columns.
    firsts: the first divergence of each rank that has one, the earliest first.
    problems: what limits the comparison, a sentence each.
    others: divergences after the first of their rank that it does not explain.
    setup: what was set differently in the two runs, those first that change results.
    allow_missing: whether tensors that are only in one run are fine, whatever they are.
    exact: whether the runs were to be bit-identical.
    replays: what executing calls again in both runs says, by row of `pairs`; few calls are.
    """

    @staticmethod
    def of(data: ComparisonData) -> Comparison:
        """This comparison as users hold it, with its runs as `Run`."""
        fields: dict[str, Any] = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return Comparison(**fields | {"reference": Run.of(data.reference), "candidate": Run.of(data.candidate)})

    def to_csv(
        self,
        folder: AnyPath,
        *,
        filter: str | Filter | None = None,
        sort: Order | None = None,
        progress: Progress | None = None,
    ) -> list[Path]:
        """Write pairs.csv and summary.csv into a folder; returns their paths.

        filter, sort: which rows pairs.csv has, and in which order, as in `select`; the summary is of all.
        progress: called with (done, total) rows.
        """
        from astray.report.csv import write_csv  # imported on demand

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

    def to_html(self, file: AnyPath) -> Path:
        """Write the page of `astray view` as one file that opens anywhere, with no server and no network."""
        from astray.web.html import write_html

        return write_html(self, Path(file))

    def __str__(self) -> str:
        from astray.report.text import render

        return render(self)

    def _repr_html_(self) -> str:
        from astray.report.html import comparison_as_html

        return comparison_as_html(self)
