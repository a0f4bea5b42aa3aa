"""How many rows got which verdict, step by step and phase by phase: what the CSV and the workbook sum up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from astray.comparison.verdict import LABELS
from astray.store import Table

HEAD = ["step", "phase", "tensors", *LABELS, "largest_error"]


def summary(pairs: Table) -> Iterator[list[int | float | str | None]]:
    """One line per step and phase, in order of appearance; the largest error is None where none is known."""
    step, phase, verdict = pairs.numbers("step"), pairs.coded("phase"), pairs.coded("verdict")
    steps = np.unique(step, return_inverse=True)[1]
    key = steps * (len(phase.values) + 1) + phase.codes + 1
    groups, first, number = np.unique(key, return_index=True, return_inverse=True)
    counts = np.bincount(number * len(LABELS) + verdict.codes, minlength=len(groups) * len(LABELS))
    counts = counts.reshape(len(groups), len(LABELS))
    largest = np.full(len(groups), -np.inf)
    np.fmax.at(largest, number, pairs.numbers("error"))
    for group in np.argsort(first, kind="stable").tolist():
        row = int(first[group])
        worst = None if largest[group] < 0 else float(largest[group])
        yield [int(step[row]), phase[row], int(counts[group].sum()), *counts[group].tolist(), worst]
