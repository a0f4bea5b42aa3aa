"""A Comparison as a workbook: a summary, the divergences, and the rows, ready to be filtered.

Rows go to disk beside the workbook as they are written (XlsxWriter's constant memory), so millions of them take little
memory. A sheet holds 1,048,576 rows; more rows go on in the next, which the summary notes.
"""

from __future__ import annotations

import datetime
import gc
import math
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from astray.comparison.comparison import ComparisonData
from astray.comparison.divergence import Divergence, Side
from astray.comparison.measure.evidence import Progress
from astray.comparison.select.columns import ColumnCells
from astray.comparison.select.pairs import Pairs
from astray.comparison.verdict import AGREEING, BAD, LABELS, Verdict
from astray.errors import UsageError
from astray.formatting import figures
from astray.report.atomic_files import atomic_file
from astray.report.csv import HEAD, cell_word, summary
from astray.report.text import suspect_line
from astray.store import DictionaryColumn
from astray.wording import counted

Fact = tuple[str, str | int | float | None]


CREATED = datetime.datetime(1980, 1, 1)
"""The creation date of workbooks and of their zip entries: equal reports have equal bytes."""

SHEET_ROWS = 1_048_576
"""The most a sheet can have, its head included; Excel's limit."""

_FORBIDDEN = re.compile("[\ud800-\udfff\ufffe\uffff]")
_PIECE = 1 << 12
_WIDTHS = {
    "site": 32,
    "type": 16,
    "path": 12,
    "verdict": 16,
    "source": 14,
    "reason": 30,
    "fingerprint": 18,
    "shape": 14,
}
_COLOURS = {
    **{LABELS[verdict]: "#C6EFCE" for verdict in AGREEING},
    **{LABELS[verdict]: "#FFC7CE" for verdict in BAD},
    **{LABELS[verdict]: "#FFEB9C" for verdict in Verdict if verdict not in (*AGREEING, *BAD)},
}


def write_xlsx(comparison: ComparisonData, file: Path, pairs: Pairs, progress: Progress | None = None) -> Path:
    """Write the workbook; returns its path."""
    library = xlsxwriter_module()
    with atomic_file(file) as draft:
        try:
            _write(library, comparison, draft, pairs, progress)
        except (OSError, library.exceptions.FileCreateError) as error:
            cause = error if isinstance(error, OSError) else error.args[0]
            _close_files(error)
            raise cause from None
    return file


def _write(library: Any, comparison: ComparisonData, file: Path, pairs: Pairs, progress: Progress | None) -> None:
    options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    book = library.Workbook(str(file), options | {"tmpdir": str(file.parent)})
    book.set_properties({"created": CREATED})
    _Workbook(book, comparison, pairs).write(progress)
    book.close()


def _close_files(error: BaseException | None) -> None:
    """Closes the files that a failed library has open. They try to write again when deleted; that error is hidden."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            gc.collect()
    finally:
        sys.unraisablehook = hook


def xlsxwriter_module() -> Any:
    """The library that writes workbooks, which is optional."""
    try:
        import xlsxwriter
    except ImportError:
        raise UsageError(
            "A workbook needs XlsxWriter, which is not installed: pip install 'astray[xlsx]'. "
            "The same rows can be had as CSV without it."
        ) from None
    return xlsxwriter


def sheet_ranges(rows: int) -> list[range]:
    """Which rows each sheet has, besides its head.

    >>> sheet_ranges(1_100_000)
    [range(0, 1048575), range(1048575, 1100000)]
    """
    each = SHEET_ROWS - 1
    return [range(begin, min(begin + each, rows)) for begin in range(0, max(rows, 1), each)]


def sheet_name(number: int) -> str:
    return "pairs" if number == 0 else f"pairs {number + 1}"


class _Workbook:
    def __init__(self, book: Any, comparison: ComparisonData, pairs: Pairs) -> None:
        self.book = book
        self.comparison = comparison
        self.pairs = pairs
        self.head = book.add_format({"bold": True, "bottom": 1})
        self.wrapped = book.add_format({"text_wrap": True, "valign": "top"})
        self.small = book.add_format({"num_format": "0.0E+00"})
        self.hidden = [name for name in pairs.names if not pairs[name].known.any()] if len(pairs) else []

    def write(self, progress: Progress | None) -> None:
        self._summary(self.book.add_worksheet("summary"))
        self._divergences(self.book.add_worksheet("first divergence"), self.comparison.firsts)
        if self.comparison.others:
            self._divergences(self.book.add_worksheet("wrong by itself"), self.comparison.others)
        for number, rows in enumerate(sheet_ranges(len(self.pairs))):
            self._rows(self.book.add_worksheet(sheet_name(number)), rows, progress)

    def _summary(self, sheet: Any) -> None:
        comparison = self.comparison
        first = comparison.first
        which = "Furthest off" if comparison.of_checkpoints else "First divergence"
        answer = f"{which}: {first.place.full}" if first else "No divergence"
        facts: list[tuple[str, Any]] = [
            ("answer", answer if first or comparison.same else f"{answer}, but some tensors are only in one run"),
            ("reference", str(comparison.reference.path)),
            ("candidate", str(comparison.candidate.path)),
            ("steps", len(comparison.steps)),
            ("ranks", len(comparison.reference.ranks)),
            ("calls", comparison.calls),
            ("tensors", len(comparison.pairs)),
            *(("wrong by itself", other.place.full) for other in comparison.others),
            *(("suspect", suspect_line(suspect, comparison)) for suspect in comparison.suspects),
            *((f"compared by {source}", count) for source, count in comparison.sources.items()),
            *(("note", text) for text in (*comparison.problems, *self._notes())),
        ]
        sheet.set_column(0, 0, 24)
        sheet.set_column(1, len(HEAD) - 1, 14)
        at = self._lines(sheet, 0, facts) + 1
        self._line(sheet, at, HEAD, self.head)
        rows = list(summary(comparison.pairs))
        for number, row in enumerate(rows, at + 1):
            self._line(sheet, number, row)

    def _notes(self) -> Iterator[str]:
        if self.pairs.asked:
            yield f"The rows are {self.pairs.described}, of {len(self.comparison.pairs):,} in all."
        sheets = [sheet_name(number) for number in range(len(sheet_ranges(len(self.pairs))))]
        if len(sheets) > 1:
            rows = counted(len(self.pairs), "row")
            yield f"{rows} are more than a sheet can hold ({SHEET_ROWS:,}): they go on in {', '.join(sheets[1:])}."
        if self.hidden:
            yield f"Columns in which nothing is known are hidden: {', '.join(self.hidden)}."

    def _divergences(self, sheet: Any, divergences: Sequence[Divergence]) -> None:
        """A column for each divergence."""
        sheet.set_column(0, 0, 24)
        sheet.set_column(1, max(len(divergences), 1), 70)
        if not divergences:
            sheet.write_string(0, 0, "No divergence.")
            return
        columns = [dict(facts_of(divergence)) for divergence in divergences]
        for at, name in enumerate(dict.fromkeys(name for facts in columns for name in facts)):
            self._line(sheet, at, [name, *(facts.get(name) for facts in columns)], self.wrapped)
        sheet.freeze_panes(0, 1)

    def _rows(self, sheet: Any, rows: range, progress: Progress | None) -> None:
        names = self.pairs.names
        sheet.freeze_panes(1, 0)
        sheet.autofilter(0, 0, len(rows), len(names) - 1)
        for at, name in enumerate(names):
            style = self.small if name in ("error", "deviation", "limit", "given") else None
            sheet.set_column(at, at, _width(name), style, {"hidden": name in self.hidden})
        verdict = names.index("verdict")
        for label, colour in _COLOURS.items():
            style = self.book.add_format({"bg_color": colour})
            rule = {"type": "cell", "criteria": "==", "value": f'"{label}"', "format": style}
            sheet.conditional_format(1, verdict, max(len(rows), 1), verdict, rule)
        self._line(sheet, 0, names, self.head)
        for begin in range(rows.start, rows.stop, _PIECE):
            numbers = self.pairs.rows[begin : min(begin + _PIECE, rows.stop)]
            columns = [_cells(self.pairs.columns.at(name, numbers)) for name in names]
            for at, row in enumerate(zip(*columns, strict=True), begin - rows.start + 1):
                self._line(sheet, at, row)
            if progress is not None:
                progress(begin + len(numbers), len(self.pairs))

    def _lines(self, sheet: Any, at: int, rows: list[tuple[str, Any]]) -> int:
        """Write names and their values; returns the next free row."""
        for name, value in rows:
            self._line(sheet, at, [name, value])
            at += 1
        return at

    @staticmethod
    def _line(sheet: Any, at: int, cells: Sequence[Any], style: Any = None) -> None:
        for column, cell in enumerate(cells):
            if isinstance(cell, str):
                sheet.write_string(at, column, cell_text(cell), style)
            elif isinstance(cell, bool):
                sheet.write_boolean(at, column, cell, style)
            elif cell is not None and math.isfinite(cell):
                sheet.write_number(at, column, cell, style)
            elif cell is not None and not math.isnan(cell):  # a sheet has no infinite numbers, so as text
                sheet.write_string(at, column, str(cell), style)


def cell_text(text: str) -> str:
    """A text as a workbook can hold it. Other characters that XML cannot hold are escaped by the library."""
    return _FORBIDDEN.sub("�", text)


def _width(name: str) -> int:
    stem = name.removesuffix("_reference").removesuffix("_candidate")
    return _WIDTHS.get(stem, max(9, min(len(name) + 3, 20)))  # three for the filter's arrow


def _cells(cells: ColumnCells) -> list[Any]:
    """A column in plain objects, what is not known as None."""
    column = cells.column
    if isinstance(column, DictionaryColumn):
        words = [*map(cell_word, column.values), None]
        return [words[code] for code in column.codes.tolist()]
    values: list[Any] = column.tolist()
    if column.dtype.kind == "u":
        values = [f"{cell:016x}" for cell in values]
    return [cell if known else None for cell, known in zip(values, cells.known.tolist(), strict=True)]


def facts_of(divergence: Divergence) -> Iterator[Fact]:
    """What is known of a divergence, as names and values: a column of the sheet of divergences."""
    yield "rank", divergence.rank
    yield "place", divergence.place.full
    yield "cause", divergence.cause
    yield from ((f"evidence {at}", text) for at, text in enumerate(divergence.evidence, 1))
    yield from ((f"set differently {at}", each.sentence) for at, each in enumerate(divergence.settings, 1))
    yield "verdict", divergence.verdict
    yield "how sure", divergence.sureness
    yield "judged by", divergence.judged.full
    for name in ("error", "surprise", "measure", "deviation", "limit", "given", "rule", "siblings"):
        yield name, getattr(divergence, name)
    for name in ("furthest", "magnitude"):
        yield name, getattr(divergence, name)
    yield "measured by", divergence.measured_by
    if divergence.replay is not None:
        yield "replay", str(divergence.replay)
    if divergence.frame is not None:
        yield "line", f"{divergence.frame.file}:{divergence.frame.line} in {divergence.frame.function}"
        yield "code", divergence.frame.code
    yield "inside", " › ".join(f"{site} ({kind})" if kind else site for site, kind in divergence.enclosing)
    if divergence.previous is not None:
        yield "before it", f"{divergence.previous}: {divergence.previous.verdict}"
    yield "wrong rows after it", divergence.victims
    yield from ((f"error at step {step}", error) for step, error in divergence.growth)
    for label, side in (("reference", divergence.reference), ("candidate", divergence.candidate)):
        yield from ((f"{name}, {label}", value) for name, value in _side(side))
    yield from divergence.metrics.items()


def _side(side: Side) -> Iterator[Fact]:
    yield "dtype", side.dtype
    yield "shape", figures.shape(side.shape)
    yield "device", side.device
    if side.statistics is not None:
        yield from side.statistics._asdict().items()
    if side.fingerprint is not None:
        yield "fingerprint", f"{side.fingerprint:016x}"
