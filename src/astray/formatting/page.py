"""A screen of text: entries with labels, lines that fold at the width, colours where they are wanted.

Whatever is laid out is made printable first; the only escape sequences on a page are its own colours.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from astray.wording import printable

WIDTH = 100
MARGIN = 4
LABEL = 13  # the widest label and two spaces
_LEAST_CODE = 20  # characters of a line of code that are worth showing

RED, GREEN, YELLOW, BOLD, DIM = "31;1", "32;1", "33;1", "1", "2"

_COLOUR = re.compile(r"(\x1b\[(?:0|1|2|3[123](?:;1)?)m)")
"""Every escape sequence that a report has."""


def painted(text: str, code: str) -> str:
    """A text in a colour."""
    return f"\x1b[{code}m{printable(text)}\x1b[0m"


def without_controls(line: str, colour: bool = False) -> str:
    """A line of which everything is printable; with `colour`, the colours of reports are left in it."""
    if line.isprintable() or not colour:
        return printable(line)
    return "".join(part if _COLOUR.fullmatch(part) else printable(part) for part in _COLOUR.split(line))


class TextPage:
    """Lines of text, and how to lay them out. table_width: of tables, where it is not that of the texts."""

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
        """A label and beside it a text folded at the width; further texts below it."""
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
        """A place in a program, and beside it the line of code there; below it where that would be cut too short."""
        at, code = printable(at), printable(code)
        line = f"{' ' * MARGIN}{at}    "
        if self.width - len(line) < min(_LEAST_CODE, len(code)):
            self.line(line)
            line = " " * (MARGIN + LABEL)
        self.line(line + self.paint(self.clip(code, len(line)), BOLD))
