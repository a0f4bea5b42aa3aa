"""A Comparison as CSV: `pairs.csv` with every row, `summary.csv` with one line per step and phase.

Numbers have six significant digits, fingerprints are hexadecimal, and what is not known is an empty cell. Rows are
written in pieces, so that a comparison of millions takes little memory.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.compare.align import one_key
from astray.compare.comparison import Comparison
from astray.compare.metrics import BOUNDS, METRICS
from astray.compare.verdict import LABELS
from astray.store import Coded, Run, Table

KEY = ("rank", "step", "micro", "phase", "recompute", "kind", "site", "type", "call", "role", "path")
JUDGED = ("verdict", "error", "limit", "source", "reason")
FORM = ("dtype", "shape")
STATISTICS = ("mean", "std", "l2", "min", "max", "absmax", "zeros", "nan", "inf", "count", "fingerprint")
OF_VALUES = tuple(name for name in METRICS if not name.endswith(("_reference", "_candidate")))
SIDES = ("reference", "candidate")

_PIECE = 1 << 16


def columns() -> list[str]:
    """The header of pairs.csv."""
    both = [f"{name}_{side}" for name in (*FORM, *STATISTICS) for side in SIDES]
    return [*KEY, *JUDGED, *both, *OF_VALUES, *BOUNDS]


def write_csv(comparison: Comparison, folder: Path) -> list[Path]:
    """Write both files into the folder, which is made if needed; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, summary = folder / "pairs.csv", folder / "summary.csv"
    _write(pairs, columns(), _rows(comparison))
    _write(summary, ["step", "phase", "tensors", *LABELS, "largest_error"], _summary(comparison.pairs))
    return [pairs, summary]


def _write(path: Path, header: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for begin in range(0, len(comparison.pairs), _PIECE):
        piece = comparison.pairs.take(slice(begin, begin + _PIECE))
        cells = [_cells(piece[name]) for name in (*KEY, *JUDGED)]
        cells += [_cells(piece[f"{name}_{side}"]) for name in FORM for side in SIDES]
        runs = dict(zip(SIDES, (comparison.reference, comparison.candidate), strict=True))
        cells += [_of_tensors(runs[side], piece, name, side) for name in STATISTICS for side in SIDES]
        cells += [_cells(piece[name]) for name in (*OF_VALUES, *BOUNDS)]
        yield from zip(*cells, strict=True)


def _of_tensors(run: Run, piece: Table, name: str, side: str) -> list[str]:
    """A column of one run's tensors beside its pairs. Mean and std fall back on what the values gave."""
    cells = np.full(len(piece), "", object)
    ranks, rows = piece.numbers("rank"), piece.numbers(f"row_{side}")
    for number, rank in run.ranks.items():
        here = np.flatnonzero((ranks == number) & (rows >= 0))
        if len(here):
            column, known = rank.tensors.numbers(name)[rows[here]], rank.tensors.valid(name)[rows[here]]
            cells[here] = np.where(known, np.array(_cells(column), object), "")
    if name in ("mean", "std"):
        measured = np.array(_cells(piece[f"{name}_{side}"]), object)
        cells = np.where(cells == "", measured, cells)
    found: list[str] = cells.tolist()
    return found


def _cells(column: npt.NDArray[Any] | Coded[Any]) -> list[str]:
    """A column as text."""
    if isinstance(column, Coded):
        words = [*map(_word, column.values), ""]
        return [words[code] for code in column.codes.tolist()]
    text = _TEXTS.get(column.dtype.kind, str)
    return [text(cell) for cell in column.tolist()]


def _word(value: Any) -> str:
    return "×".join(map(str, value)) or "scalar" if isinstance(value, tuple) else str(value)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


_TEXTS: dict[str, Callable[[Any], str]] = {
    "f": _number,
    "i": lambda value: "" if value < 0 else str(value),  # −1 is null in every column of counts
    "u": lambda value: f"{value:016x}",
    "b": lambda value: str(value).lower(),
}


def _summary(pairs: Table) -> Iterator[list[str]]:
    """One line per step and phase, in order of appearance."""
    step, phase, verdict = pairs.numbers("step"), pairs.coded("phase"), pairs.coded("verdict")
    groups, first, number = np.unique(one_key([step, phase.codes]), return_index=True, return_inverse=True)
    counts = np.bincount(number * len(LABELS) + verdict.codes, minlength=len(groups) * len(LABELS))
    counts = counts.reshape(len(groups), len(LABELS))
    largest = np.full(len(groups), -np.inf)
    np.fmax.at(largest, number, pairs.numbers("error"))
    for group in np.argsort(first, kind="stable").tolist():
        row = int(first[group])
        worst = "" if largest[group] < 0 else _number(float(largest[group]))
        cells = [str(step[row]), phase[row] or "", str(counts[group].sum()), *map(str, counts[group].tolist())]
        yield [*cells, worst]
