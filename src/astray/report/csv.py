"""A Comparison as CSV: `pairs.csv` with a line per row, `summary.csv` with one per step and phase.

Numbers have six significant digits, fingerprints are hexadecimal, and what is not known is an empty cell. Rows are
written in pieces, so that a comparison of millions takes little memory. Texts that a spreadsheet would run as a formula
get a quote before them. docs/reference/reports.md explains every column.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from astray.comparison.comparison import ComparisonData
from astray.comparison.measure.evidence import Progress
from astray.comparison.select.columns import ColumnCells
from astray.comparison.select.pairs import Pairs
from astray.comparison.verdict import LABELS
from astray.report.atomic_files import atomic_file
from astray.store import DictionaryColumn, Table

HEAD = ["step", "phase", "tensors", *LABELS, "largest_error"]


PIECE = 1 << 14

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet takes for a formula, or that it strips to one."""


def write_csv(comparison: ComparisonData, folder: Path, pairs: Pairs, progress: Progress | None = None) -> list[Path]:
    """Write both files into the folder, which is made if needed; returns their paths."""
    files = [folder / "pairs.csv", folder / "summary.csv"]
    with atomic_file(files[0]) as rows, atomic_file(files[1]) as sums:  # both or none
        _write(rows, pairs.names, _rows(pairs, progress))
        _write(sums, HEAD, ([_text(cell) for cell in row] for row in summary(comparison.pairs)))
    return files


def summary(pairs: Table) -> Iterator[list[int | float | str | None]]:
    """The rows of `summary.csv`, also in the workbook: how many rows of a step and phase have which verdict.

    In order of appearance. The largest error is None where none is known.
    """
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


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _rows(pairs: Pairs, progress: Progress | None) -> Iterator[tuple[str, ...]]:
    for begin in range(0, len(pairs), PIECE):
        rows = pairs.rows[begin : begin + PIECE]
        yield from zip(*(_cells(pairs.columns.at(name, rows)) for name in pairs.names), strict=True)
        if progress is not None:
            progress(begin + len(rows), len(pairs))


def _cells(cells: ColumnCells) -> list[str]:
    """A column as text."""
    if isinstance(cells.column, DictionaryColumn):
        words = [*(escape_formula(cell_word(value)) for value in cells.column.values), ""]
        return [words[code] for code in cells.column.codes.tolist()]
    text = _TEXTS.get(cells.column.dtype.kind, str)
    known = cells.known.tolist()
    return [text(cell) if is_known else "" for cell, is_known in zip(cells.column.tolist(), known, strict=True)]


def cell_word(value: Any) -> str:
    """A distinct value of a column of texts or shapes."""
    return "×".join(map(str, value)) or "scalar" if isinstance(value, tuple) else str(value)


def escape_formula(text: str) -> str:
    """A text that no spreadsheet runs as a formula: a run may have a module called `=HYPERLINK(…)`.

    >>> escape_formula("=1+1"), escape_formula("h.2.mlp")
    ("'=1+1", 'h.2.mlp')
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


def _text(cell: float | str | None) -> str:
    if isinstance(cell, str):
        return escape_formula(cell)
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)


_TEXTS: dict[str, Callable[[Any], str]] = {
    "f": lambda value: f"{value:.6g}",
    "u": lambda value: f"{value:016x}",
    "b": lambda value: str(value).lower(),
}
