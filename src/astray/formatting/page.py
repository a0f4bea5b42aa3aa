"""A screen of text: entries with labels, lines that fold at the width, tables, colours where they are wanted.

Whatever is laid out is made printable first; the only escape sequences on a page are its own colours. Cells of a
`TextTable` are cut in their middle, since a site's name says most at its end.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from astray.wording import printable

WIDTH = 100
MARGIN = 4
LABEL = 13  # the widest label and two spaces
_MIN_CODE = 20  # fewer characters of a line of code are not worth showing

RED, GREEN, YELLOW, BOLD, DIM = "31;1", "32;1", "33;1", "1", "2"

_COLOUR = re.compile(r"(\x1b\[(?:0|1|2|3[123](?:;1)?)m)")
"""Every escape sequence that a report has."""


def painted(text: str, code: str) -> str:
    """A text in a colour."""
    return f"\x1b[{code}m{printable(text)}\x1b[0m"


def without_controls(line: str, colour: bool = False) -> str:
    """A line with everything unprintable escaped; with `colour`, the colours of reports are kept."""
    if line.isprintable() or not colour:
        return printable(line)
    return "".join(part if _COLOUR.fullmatch(part) else printable(part) for part in _COLOUR.split(line))


class TextPage:
    """Lines of text with a layout. table_width: of tables, where it differs from that of the texts."""

    def __init__(self, width: int, colour: bool, table_width: int | None = None) -> None:
        self.width = max(width, 60)
        self.table_width = table_width or self.width
        self.colour = colour
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(without_controls(text.rstrip(), self.colour))

    def paint(self, text: str, code: str) -> str:
        return painted(text, code) if self.colour else printable(text)

    def entry(self, label: str, texts: str | Iterable[str], margin: int = MARGIN) -> None:
        """A label with a text beside it, folded at the width; further texts below it."""
        for text in [texts] if isinstance(texts, str) else texts:
            indent = margin + LABEL
            for line in self.folded(text, self.width - indent) or [""]:
                self.line(" " * margin + self.paint(label.ljust(LABEL), DIM) + line)
                label = ""

    def folded(self, text: str, width: int | None = None, later_indent: str = "") -> list[str]:
        """A text in lines that fit; names are never broken, however long."""
        return textwrap.wrap(
            printable(text),
            width or self.width,
            subsequent_indent=later_indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def clip(self, text: str, used: int) -> str:
        """A text that must stay on its line."""
        room = max(self.width - used, 20)
        return text if len(text) <= room else text[: room - 1] + "…"

    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def code(self, at: str, code: str) -> None:
        """A location in a program, with the line of code beside it; below it where that would be cut too short."""
        at, code = printable(at), printable(code)
        line = f"{' ' * MARGIN}{at}    "
        if self.width - len(line) < min(_MIN_CODE, len(code)):
            self.line(line)
            line = " " * (MARGIN + LABEL)
        self.line(line + self.paint(self.clip(code, len(line)), BOLD))


# -- tables ------------------------------------------------------------------------------------------------------------

Row = Mapping[str, str]
Widths = Mapping[str, int]


class TextTable:
    """The layout of a table's columns.

    words: columns of texts, which are aligned to the left; numbers are aligned to the right.
    droppable: columns that are left out, the last first, when the others would have to be cut below `min_widths`.
    min_widths: what columns shrink to before one is left out; those named first shrink first.
    last_resort: narrower widths, once all `droppable` columns are left out.
    """

    def __init__(
        self, words: Sequence[str], droppable: Sequence[str], min_widths: Widths, last_resort: Widths | None = None
    ) -> None:
        self._words = frozenset(words)
        self._droppable = droppable
        self._min_widths = (min_widths, last_resort or {})

    def lines(self, rows: Sequence[Row], width: int, paint: Callable[[str, str], str] | None = None) -> list[str]:
        """The head, then a line for each row. `paint` receives a column's name and a cell, and colours it."""
        rows = [{name: printable(cell) for name, cell in row.items()} for row in rows]
        widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
        widths = self._fitting({name: size for name, size in widths.items() if size}, width)
        paint = paint or (lambda _, cell: cell)
        lines = ["  ".join(self._cell(name, name, size) for name, size in widths.items()).rstrip()]
        for row in rows:
            cells = [paint(name, self._cell(name, row[name], size)) for name, size in widths.items()]
            lines.append("  ".join(cells).rstrip())
        return lines

    def _fitting(self, widths: dict[str, int], width: int) -> dict[str, int]:
        """The widths of the columns that fit into a line."""
        min_widths = self._min_widths[0]
        for name in reversed(self._droppable):
            if _line_width({name: min(size, min_widths.get(name, size)) for name, size in widths.items()}) <= width:
                break
            widths.pop(name, None)
        for min_widths in self._min_widths:
            for name in (name for name in min_widths if name in widths):
                excess = max(0, _line_width(widths) - width)
                widths[name] = max(min(widths[name], min_widths[name]), widths[name] - excess)
        return widths

    def _cell(self, name: str, text: str, width: int) -> str:
        text = cut(text, width)
        return text.ljust(width) if name in self._words else text.rjust(width)


def cut(text: str, width: int) -> str:
    """A text with its middle left out where it is too long.

    >>> cut("transformer.h.2.mlp.proj", 15)
    'transfo…lp.proj'
    """
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _line_width(widths: Widths) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)
