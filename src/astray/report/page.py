"""A screen of text: entries with labels, lines that fold at the width, colours where they are wanted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 100
MARGIN = 4
LABEL = 13  # the widest label and two spaces
_LEAST_CODE = 20  # characters of a line of code that are worth showing

RED, GREEN, YELLOW, BOLD, DIM = "31;1", "32;1", "33;1", "1", "2"


class Page:
    """Lines of text, and how to lay them out."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width = max(width, 60)
        self.colour = colour
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text.rstrip())

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

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
            text,
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
        line = f"{' ' * MARGIN}{at}    "
        if self.width - len(line) < min(_LEAST_CODE, len(code)):
            self.line(line)
            line = " " * (MARGIN + LABEL)
        self.line(line + self.paint(self.clip(code, len(line)), BOLD))
