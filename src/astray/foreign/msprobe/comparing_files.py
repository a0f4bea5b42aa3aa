"""msprobe's table as a file: CSV, or a workbook with a colour for each result."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from astray.foreign.msprobe.table import Cell
from astray.report.atomic_files import drafted
from astray.report.xlsx import CREATED, SHEET_ROWS, cell_text, writer

_COLOURS = {"pass": "#C6EFCE", "warning": "#FFEB9C", "error": "#FFC7CE"}


def write_csv(file: Path, header: Sequence[str], lines: Iterable[Sequence[Cell]]) -> Path:
    """Write the table; gives its path. Infinity has a space before it, or spreadsheets would take it for a name."""
    with drafted(file) as draft, draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as out:
        table = csv.writer(out)
        table.writerow(header)
        for line in lines:  # floats are written as `str` has them, so that only infinities are changed
            table.writerow([_text(cell) for cell in line] if math.inf in line or -math.inf in line else line)
    return file


def _text(cell: Cell) -> str:
    return f" {cell}" if isinstance(cell, float) and math.isinf(cell) else str(cell)


def write_xlsx(file: Path, header: Sequence[str], lines: Iterable[Sequence[Cell]]) -> Path:
    """Write a workbook; gives its path. What one sheet cannot hold goes on in the next."""
    library = writer()
    with drafted(file) as draft:
        options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
        book = library.Workbook(str(draft), options | {"tmpdir": str(draft.parent)})
        book.set_properties({"created": CREATED})
        left = iter(lines)
        piece = list(islice(left, SHEET_ROWS - 1))
        while piece or not book.worksheets():
            _sheet(book, header, piece)
            piece = list(islice(left, SHEET_ROWS - 1))
        book.close()
    return file


def _sheet(book: Any, header: Sequence[str], lines: Sequence[Sequence[Cell]]) -> None:
    sheet = book.add_worksheet()
    sheet.freeze_panes(1, 0)
    sheet.autofilter(0, 0, len(lines), len(header) - 1)
    result = header.index("Result")
    for word, colour in _COLOURS.items():
        rule = {"type": "cell", "criteria": "==", "value": f'"{word}"', "format": book.add_format({"bg_color": colour})}
        sheet.conditional_format(1, result, max(len(lines), 1), result, rule)
    for at, line in enumerate([header, *lines]):
        for column, cell in enumerate(line):
            if isinstance(cell, bool):
                sheet.write_boolean(at, column, cell)
            elif isinstance(cell, str) or not math.isfinite(cell):  # a sheet has no infinite number
                sheet.write_string(at, column, cell_text(str(cell)))
            else:
                sheet.write_number(at, column, cell)
