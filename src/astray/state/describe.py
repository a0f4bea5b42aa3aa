"""The table of a state: one row for all of it, for each parameter, or for each group of parameters.

`described` selects and computes the columns, `StatisticsTable` holds them, as rows to compute with and as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isnan
from typing import Any, TypeAlias

from astray.errors import StateError
from astray.state.mapping import StateMapping
from astray.state.naming import Pattern, grouped, matching
from astray.state.reductions import REDUCTIONS, Reduction, norm_reduction, reduce
from astray.wording import did_you_mean

FACTS = ("no", "name", "shape", "numel", "dtype", "value")
"""Columns that need no statistics."""

DEFAULT = ("no", "name", "shape", "numel", "norm1", "norm1_mean", "norm2")
OF_NUMBERS = ("no", "name", "value")

_NORM = re.compile(r"norm(-?(?:\d+(?:\.\d+)?|inf))")


def described(
    state: StateMapping,
    lw: bool,
    pattern: Pattern | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    group: Pattern | None,
) -> StatisticsTable:
    """The table that `StateDict.describe` prints."""
    names = matching(state, pattern)
    by_name = lw and group is None
    groups = {name: [name] for name in names} if by_name else grouped(names, group) if group else {state.name: names}
    keys = _keys(include, exclude, OF_NUMBERS if by_name and state.is_numbers else DEFAULT)
    reductions = {key: _reduction(key) for key in keys if key not in FACTS}
    results = reduce(state, list(reductions.values()), groups)
    columns: dict[str, Sequence[Cell]] = dict(zip(reductions, results, strict=True))
    columns |= {key: _fact(key, state, groups, by_name) for key in keys if key in FACTS}
    return StatisticsTable(f"Stats {state.name}", {key: columns[key] for key in keys})


def _keys(include: Sequence[str] | None, exclude: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    include, exclude = ([keys] if isinstance(keys, str) else keys for keys in (include, exclude))
    keys = list(dict.fromkeys(default if include is None else include))
    for key in (*keys, *(exclude or ())):
        if key not in FACTS and key not in REDUCTIONS and _NORM.fullmatch(key) is None:
            known = [*FACTS, *REDUCTIONS]
            raise StateError(f"There is no column {key!r}.{did_you_mean(key, known)} There are {', '.join(known)}.")
    return [key for key in keys if key not in (exclude or ())]


def _reduction(key: str) -> Reduction:
    """A statistic by the name of its column; `norm3` is the norm of power 3."""
    match = _NORM.fullmatch(key)
    return REDUCTIONS[key] if key in REDUCTIONS or match is None else norm_reduction(float(match[1]))


def _fact(key: str, state: StateMapping, groups: Mapping[str, Sequence[str]], by_name: bool) -> list[Cell]:
    """A column that is known without statistics."""
    match key:
        case "no":
            # For a parameter its number in the state, for a group the number of its members.
            numbers = {name: number for number, name in enumerate(state)}
            return [numbers[label] if by_name else len(members) for label, members in groups.items()]
        case "name":
            return list(groups)
        case "shape" if by_name:
            return [state.spec(name).shape for name in groups]
        case "numel" | "shape":
            counts = [sum(state.spec(name).numel for name in members) for members in groups.values()]
            return [*counts] if key == "numel" else [(count,) for count in counts]
        case "value":
            return [_value(state, members) for members in groups.values()]
        case _:
            return [_dtype(state, members) for members in groups.values()]


def _value(state: StateMapping, members: Sequence[str]) -> float:
    if len(members) != 1 or state.spec(members[0]).shape:
        raise StateError("The column 'value' is for numbers, one in each row. Use lw=True, or leave it out.")
    return float(state[members[0]])


def _dtype(state: StateMapping, members: Sequence[str]) -> str:
    """The dtypes of a row."""
    names = (str(state.spec(name).dtype or "number").removeprefix("torch.") for name in members)
    return ", ".join(dict.fromkeys(names))


# -- the table and its text --------------------------------------------------------------------------------------------


Cell: TypeAlias = str | float | tuple[int, ...]

DECIMALS = 6
_LARGE, _SMALL, _LONG = 1e6, 10.0**-DECIMALS, DECIMALS + 6
"""Numbers beyond these would take too many characters, or show no digit at all."""


class StatisticsTable:
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
        # Where a prompt shows the result of `describe()`, the table was printed already.
        if self._shown:
            rows, columns = len(self), len(self.columns)
            return f"<{rows} row{'s' * (rows != 1)} × {columns} column{'s' * (columns != 1)}>"
        return str(self)

    def show(self) -> StatisticsTable:
        """Print the table; returns it."""
        print(self)  # noqa: T201 - its purpose
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

    Laid out as pandas lays out a frame with headers to the left, which readers of such tables know: columns of numbers
    share their digits, and go to scientific notation together when one number is too small or too large for six
    decimals. Pandas itself is needed only by `to_pandas`.

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
    trailing = min((len(text) - len(text.rstrip("0")) for text in decimals), default=0)
    if trailing:
        kept = DECIMALS - min(trailing, DECIMALS - 1)  # 1.0 and not 1.
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
