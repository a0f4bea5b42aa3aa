"""hooktools' names for what `astray.compare` measures, and the two numbers that it measures only when it is asked.

a are the values of the first folder and b those of the second, where both are finite, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.custom_metrics import mean_abs
from astray.store import Table

Floats = npt.NDArray[np.float64]


def mean_abs_share(reference: Floats, candidate: Floats) -> float:
    """mean |a − b| / mean |a|. 0 when both are zero everywhere, ∞ when only a is."""
    both = np.isfinite(reference) & np.isfinite(candidate)
    size = float(np.abs(reference[both]).mean()) if both.any() else math.nan
    error = mean_abs(reference, candidate)
    return error / size if size else error * math.inf if error else error


class Metric(NamedTuple):
    """One metric. `column` is of a comparison's pairs; `own` computes it where there is no such column.

    value: what is shown, of that column. error: of what is shown, how bad it is; 0 is right.
    """

    column: str
    own: Callable[[Floats, Floats], float] | None = None
    value: Callable[[Floats], Floats] = lambda column: column
    error: Callable[[Floats], Floats] = lambda value: value
    right: float = 0.0


METRICS: dict[str, dict[str, Metric]] = {
    "L1": {"l1_error": Metric("mean_abs", mean_abs), "rel_error": Metric("mean_abs_share", mean_abs_share)},
    "AE": {"AE": Metric("max_abs")},
    "MAE": {"MAE": Metric("mean_abs", mean_abs)},
    "MSE": {"MSE": Metric("rmse", value=np.square)},
    "RMSE": {"RMSE": Metric("rmse")},
    "MAPE": {"MAPE": Metric("mape", value=lambda share: 100.0 * share)},
    "CS": {"CS": Metric("cosine", error=lambda cosine: 1.0 - cosine, right=1.0)},
}
"""By hooktools' names, the numbers of each metric by theirs."""


def own(names: tuple[str, ...]) -> list[Callable[[Floats, Floats], float]]:
    """What a comparison has to be asked for besides, to have these metrics."""
    found = {one.column: one.own for name in names for one in METRICS[name].values() if one.own is not None}
    return list(found.values())


def column(metric: Metric, pairs: Table) -> Floats:
    """What is shown of every pair. Of pairs with the same bits nothing was measured: they are right.

    NaN where NaN or infinity stands on one side only: a number over the other elements would look like agreement.
    """
    verdicts = pairs.coded("verdict")
    same = np.array([*(label == "identical" for label in verdicts.values), False], np.bool_)[verdicts.codes]
    odd = pairs.numbers("nonfinite_mismatch") > 0
    return np.where(same, metric.right, np.where(odd, np.nan, metric.value(pairs.numbers(metric.column))))
