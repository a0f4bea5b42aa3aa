"""A table of statistics: rows to compute with, and the text that people read.

The text is laid out as pandas lays out a frame with headers to the left, which is what readers of such tables know:
columns of numbers share their digits, and go to scientific notation together when one of them is too small or too large
for six decimals. Pandas itself is needed only by `to_pandas`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isnan
from typing import Any, TypeAlias

Cell: TypeAlias = str | float | tuple[int, ...]

DECIMALS = 6
_LARGE, _SMALL, _LONG = 1e6, 10.0**-DECIMALS, DECIMALS + 6
"""Numbers beyond these would take too many characters, or show no digit at all."""


class Table:
    """Rows of statistics, as `describe` gives them.

    >>> table = state.describe(lw=True, display=False)
    >>> table.rows[0]["norm2"], table["norm2"][0], len(table)
    >>> print(table)

    `columns` has every column as a list, `rows` every row as a dict, and `to_pandas()` gives a frame.
    """

    def __init__(self, title: str, columns: Mapping[str, Sequence[Cell]]) -> None:
        self.title = title
        self.columns: dict[str, list[Cell]] = {name: list(cells) for name, cells in columns.items()}
        self._shown = False

    @property
    def rows(self) -> list[dict[str, Cell]]:
        """Every row as a dict from column to value."""
        return [dict(zip(self.columns, cells, strict=True)) for cells in zip(*self.columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __iter__(self) -> Iterator[dict[str, Cell]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[Cell]:
        try:
            return self.columns[column]
        except KeyError:
            raise KeyError(f"The table has no column {column!r}. It has {', '.join(self.columns)}.") from None

    def __str__(self) -> str:
        lines = layout(self.columns)
        banner = f"{f' {self.title} ':=^{len(lines[0])}}"
        return "\n".join([f"[{banner}]", *lines])

    def __repr__(self) -> str:
        # What was printed already is not shown a second time, when the prompt shows the result of `describe()`.
        if self._shown:
            rows, columns = len(self), len(self.columns)
            return f"<{rows} row{'s' * (rows != 1)} × {columns} column{'s' * (columns != 1)}>"
        return str(self)

    def show(self) -> Table:
        """Print the table; returns it."""
        print(self)  # noqa: T201 - it is what was asked for
        self._shown = True
        return self

    def to_pandas(self) -> Any:
        """The table as a pandas frame."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("to_pandas needs pandas, which is not installed. `table.rows` needs nothing.") from None
        return pd.DataFrame(self.columns)


def layout(columns: Mapping[str, Sequence[Cell]]) -> list[str]:
    """The lines of a table: the headers, then the rows, each with its number in front.

    >>> layout({"name": ["a", "b"], "std": [0.5, 12.25]})
    ['  name  std  ', '0  a     0.50', '1  b    12.25']
    """
    count = len(next(iter(columns.values()), []))
    width = len(str(count - 1)) if count else 0
    lines = [" " * width, *(str(row).ljust(width) for row in range(count))]
    for name, cells in columns.items():
        header, texts = _column(name, cells)
        width = max(map(len, [header, *texts]))
        lines = [f"{line} {text.ljust(width)}" for line, text in zip(lines, [header, *texts], strict=True)]
    return lines


def _column(name: str, cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """Header and cells of a column. Every cell begins with a blank or a sign; so does the header above numbers."""
    if cells and all(isinstance(cell, int | float) for cell in cells):
        numbers = [cell for cell in cells if isinstance(cell, int | float)]
        integers = all(isinstance(number, int) for number in numbers)
        texts = [f"{number: d}" for number in numbers if isinstance(number, int)] if integers else _floats(numbers)
        return f" {name}", _right(texts)
    if any(isinstance(cell, tuple) for cell in cells):  # shapes
        return name, _right([f" {cell}" for cell in cells])
    return name, [f" {cell}" for cell in cells]


def _right(texts: Sequence[str]) -> list[str]:
    width = max(map(len, texts))
    return [text.rjust(width) for text in texts]


def _floats(numbers: Sequence[float]) -> list[str]:
    texts = [_text(number, "f") for number in numbers]
    decimals = [text for text in texts if text[-1].isdigit()]
    needless = min((len(text) - len(text.rstrip("0")) for text in decimals), default=0)
    if needless:
        kept = DECIMALS - min(needless, DECIMALS - 1)  # 1.0 and not 1.
        texts = [text[: text.index(".") + 1 + kept] if text[-1].isdigit() else text for text in texts]
    sizes = [abs(number) for number in numbers]
    small = any(0 < size < _SMALL for size in sizes)
    large = any(size > _LARGE for size in sizes) and max(map(len, texts)) > _LONG
    return [_text(number, "e") for number in numbers] if small or large else texts


def _text(number: float, notation: str) -> str:
    if isnan(number):
        return " NaN"
    if abs(number) == inf:
        return f"{number: }"
    return f"{number: .{DECIMALS}{notation}}"
