"""The table of a state: one row for all of it, for each parameter, or for each group of parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from astray.errors import StateError
from astray.state.base import Base
from astray.state.naming import Pattern, grouped, matching
from astray.state.reductions import REDUCTIONS, Reduction, norm_reduction, reduce
from astray.state.table import Cell, Table
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

FACTS = ("no", "name", "shape", "numel", "dtype", "value")
"""Columns that need no statistics."""

DEFAULT = ("no", "name", "shape", "numel", "norm1", "norm1_mean", "norm2")
OF_NUMBERS = ("no", "name", "value")

_NORM = re.compile(r"norm(-?(?:\d+(?:\.\d+)?|inf))")


def described(
    state: Base,
    lw: bool,
    pattern: Pattern | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    group: Pattern | None,
) -> Table:
    """The table that `StateDict.describe` prints."""
    names = matching(state, pattern)
    by_name = lw and group is None
    groups = {name: [name] for name in names} if by_name else grouped(names, group) if group else {state.name: names}
    keys = _keys(include, exclude, OF_NUMBERS if by_name and state.is_numbers else DEFAULT)
    reductions = {key: _reduction(key) for key in keys if key not in FACTS}
    results = reduce(state, list(reductions.values()), groups)
    columns: dict[str, Sequence[Cell]] = dict(zip(reductions, results, strict=True))
    columns |= {key: _fact(key, state, groups, by_name) for key in keys if key in FACTS}
    return Table(f"Stats {state.name}", {key: columns[key] for key in keys})


def _keys(include: Sequence[str] | None, exclude: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    include, exclude = ([given] if isinstance(given, str) else given for given in (include, exclude))
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


def _fact(key: str, state: Base, groups: Mapping[str, Sequence[str]], by_name: bool) -> list[Cell]:
    """A column that is known without statistics."""
    match key:
        case "no":
            # Of a parameter its number in the state, of several how many there are.
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


def _value(state: Base, members: Sequence[str]) -> float:
    if len(members) != 1 or state.spec(members[0]).shape:
        raise StateError("The column 'value' is for numbers, one in each row. Use lw=True, or leave it out.")
    return float(state[members[0]])


def _dtype(state: Base, members: Sequence[str]) -> str:
    """The dtype of a row, or all of them."""
    found = (str(state.spec(name).dtype or "number").removeprefix("torch.") for name in members)
    return ", ".join(dict.fromkeys(found))
