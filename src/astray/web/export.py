"""Tables to take away: what `astray compare --csv` and `--xlsx` write, into a folder that is gone once it was sent."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from astray.comparison.comparison import Comparison
from astray.comparison.measure.metrics import METRICS
from astray.comparison.select.pairs import Pairs
from astray.comparison.verdict import Verdict
from astray.errors import UsageError
from astray.report.csv import write_csv
from astray.report.xlsx import write_xlsx
from astray.wording import did_you_mean

MEDIA = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}

_WORST_FIRST = (Verdict.NON_FINITE, Verdict.DIVERGED, Verdict.SHAPE, Verdict.DTYPE)
"""Of a site's wrong rows the one that stands for it: the weights of `page/src/marks.ts`."""


class Exported:
    """A file, and the folder it lies in until `close`.

    conclusion: of each site that is wrong its worst row, by `metric`.
    """

    def __init__(
        self,
        comparison: Comparison,
        kind: str,
        filter: str | None,
        sort: str | None,
        conclusion: bool = False,
        metric: str = "error",
    ) -> None:
        if kind not in MEDIA:
            raise UsageError(f"There is no export as {kind!r:.40}; there are {', '.join(MEDIA)}.")
        pairs = comparison.select(filter, sort)
        if conclusion:
            pairs = concluded(comparison, pairs, bool(sort), metric)
        self._folder = tempfile.TemporaryDirectory(prefix="astray-")
        folder = Path(self._folder.name)
        try:
            if kind == "csv":
                self.path = write_csv(comparison, folder, pairs)[0]
            else:
                self.path = write_xlsx(comparison, folder / "pairs.xlsx", pairs)
        except BaseException:  # an interrupt too must leave no files; it goes on its way below
            self.close()
            raise

    def close(self) -> None:
        """Remove it."""
        self._folder.cleanup()


def concluded(comparison: Comparison, pairs: Pairs, ordered: bool, metric: str = "error") -> Pairs:
    """Of each site the worst row of these, in their order if they were `ordered`, else as the sites went wrong.

    metric: of rows with one verdict, by what they are the worst. Raises UsageError when there is no such column.
    """
    if metric not in comparison.pairs or comparison.pairs[metric].dtype.kind != "f":
        raise UsageError(f"There is no metric {metric!r:.40}.{did_you_mean(metric, METRICS)}")
    verdicts = comparison.pairs.coded("verdict").codes
    rows = np.sort(pairs.rows)
    rows = rows[np.isin(verdicts[rows], _WORST_FIRST)]
    site = comparison.pairs.coded("site").codes[rows]
    rank = np.array([_WORST_FIRST.index(Verdict(code)) for code in verdicts[rows].tolist()], np.int64)
    error = np.nan_to_num(comparison.pairs.numbers(metric)[rows] * (-1 if metric == "cosine" else 1), nan=-np.inf)
    worst = np.lexsort((rows, -error, rank))
    chosen = rows[worst[np.unique(site[worst], return_index=True)[1]]]  # in the order of the sites' codes
    began = np.unique(site, return_index=True)[1]
    chosen = pairs.rows[np.isin(pairs.rows, chosen)] if ordered else chosen[np.argsort(began)]
    asked = ", ".join(filter(None, (pairs.asked, "of each wrong site the worst")))
    return Pairs(pairs.columns, chosen, len(chosen), asked, pairs.named)
