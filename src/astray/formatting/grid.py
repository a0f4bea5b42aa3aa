"""A table for a terminal: columns as wide as they need, and cut or left out where the line is too short.

Texts are made printable, and cut in their middle, since a site's name says most at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from astray.wording import printable

Row = Mapping[str, str]
Least = Mapping[str, int]


class TextTable:
    """How the columns of a table are laid out.

    words: columns of texts, which are aligned to the left; numbers are aligned to the right.
    droppable: columns that are left out, the last first, when the others would have to be cut below `least`.
    least: the widths that columns shrink to before one is left out; those named first shrink first.
    least_of_all: the widths once all `droppable` ones are left out.
    """

    def __init__(
        self, words: Sequence[str], droppable: Sequence[str], least: Least, least_of_all: Least | None = None
    ) -> None:
        self._words = frozenset(words)
        self._droppable = droppable
        self._least = (least, least_of_all or {})

    def lines(self, rows: Sequence[Row], width: int, paint: Callable[[str, str], str] | None = None) -> list[str]:
        """The head, then a line for each row. `paint` is given a column's name and its cell, and colours it."""
        rows = [{name: printable(cell) for name, cell in row.items()} for row in rows]
        wide = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
        wide = self._fitting({name: size for name, size in wide.items() if size}, width)
        paint = paint or (lambda _, cell: cell)
        lines = ["  ".join(self._cell(name, name, size) for name, size in wide.items()).rstrip()]
        for row in rows:
            cells = [paint(name, self._cell(name, row[name], size)) for name, size in wide.items()]
            lines.append("  ".join(cells).rstrip())
        return lines

    def _fitting(self, wide: dict[str, int], width: int) -> dict[str, int]:
        """The widths of the columns that fit into a line."""
        least = self._least[0]
        for name in reversed(self._droppable):
            if _length({name: min(size, least.get(name, size)) for name, size in wide.items()}) <= width:
                break
            wide.pop(name, None)
        for least in self._least:
            for name in (name for name in least if name in wide):
                over = max(0, _length(wide) - width)
                wide[name] = max(min(wide[name], least[name]), wide[name] - over)
        return wide

    def _cell(self, name: str, text: str, width: int) -> str:
        text = cut(text, width)
        return text.ljust(width) if name in self._words else text.rjust(width)


def cut(text: str, width: int) -> str:
    """A text with as much of its middle left out as must be.

    >>> cut("transformer.h.2.mlp.proj", 15)
    'transfo…lp.proj'
    """
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _length(wide: Mapping[str, int]) -> int:
    return sum(wide.values()) + 2 * (len(wide) - 1)
