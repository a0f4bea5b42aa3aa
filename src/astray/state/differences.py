"""How two states differ, parameter by parameter: as a table, and as the angle between them."""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal, overload

from astray.state.naming import Pattern, check_same, matching
from astray.state.pairs import NOTHING, Pair, pairs
from astray.state.state_dict import StateDict
from astray.state.table import Cell, Table


def diff(one: StateDict, other: StateDict, pattern: Pattern | None = None, *, sort: bool = True) -> Table:
    """A table of how far the second state is from the first, the parameters that differ most in front.

    >>> print(astray.diff(before, after, pattern=".*attn.*"))

    `diff` is the L2 norm of the difference, `relative` that over the norm of the first, `max` its largest element, and
    `changed` the share of elements that are not equal. The sums are over the elements that are finite on both sides; a
    column says how many are not, if there are any. Parameters that only one state has, or that have another shape,
    come last. sort=False keeps the order of the first state.
    """
    names = matching(dict.fromkeys([*one, *other]), pattern)
    both = [name for name in names if name in one and name in other]
    alike = [name for name in both if one.spec(name).shape == other.spec(name).shape]
    found = pairs(one, other, alike)
    if sort:
        alike.sort(key=lambda name: (found[name].finite - found[name].count, -found[name].relative))
    rows = [_row(name, one, found[name]) for name in alike]
    apart = [name for name in names if name not in found]
    rows += [_unpaired(name, one, other) for name in apart]
    columns: dict[str, list[Cell]] = {key: [row[key] for row in rows] for key in _row("", one, NOTHING)}
    if all(found[name].finite == found[name].count for name in alike):
        del columns["non-finite"]
    if not apart:
        del columns["unpaired"]
    return Table(f"{other.name} − {one.name}", columns)


@overload
def cosine(one: StateDict, other: StateDict, lw: Literal[False] = False, pattern: Pattern | None = None) -> float: ...
@overload
def cosine(one: StateDict, other: StateDict, lw: Literal[True], pattern: Pattern | None = None) -> StateDict: ...
def cosine(one: StateDict, other: StateDict, lw: bool = False, pattern: Pattern | None = None) -> float | StateDict:
    """The cosine of the angle between two states: of all parameters together, or of each.

    Of the gradients of successive steps it tells whether training goes on in one direction (near 1), is lost in noise
    (near 0), or swings back and forth across a valley (below 0). NaN where one of the two is zero.

    >>> before = astray.from_grad(model, clone=True)
    ...
    >>> astray.cosine(before, astray.from_grad(model))
    """
    first, second = matching(one, pattern), matching(other, pattern)
    check_same(first, second, (one.name, other.name))
    found = pairs(one, other, first)
    if lw:
        return StateDict({name: found[name].cosine for name in first}, name="cosine")
    return reduce(Pair.plus, found.values(), NOTHING).cosine


def _row(name: str, state: StateDict, pair: Pair) -> dict[str, Cell]:
    return {
        "name": name,
        "shape": state.spec(name).shape if name in state else (),
        "norm2": math.sqrt(pair.one),
        "other": math.sqrt(pair.other),
        "diff": math.sqrt(pair.apart),
        "relative": pair.relative,
        "max": pair.largest,
        "cosine": pair.cosine,
        "changed": pair.different / pair.count if pair.count else 0.0,
        "non-finite": pair.count - pair.finite,
        "unpaired": "",
    }


def _unpaired(name: str, one: StateDict, other: StateDict) -> dict[str, Cell]:
    """A parameter without a counterpart: nothing but its name, its shape, and why."""
    first, second = (state.spec(name).shape if name in state else None for state in (one, other))
    why = (
        f"{second} in the second"
        if first is not None and second is not None
        else f"only in the {'first' if second is None else 'second'}"
    )
    nothing = dict.fromkeys(("norm2", "other", "diff", "relative", "max", "cosine", "changed"), math.nan)
    shape: Cell = second or () if first is None else first
    return {"name": name, "shape": shape, **nothing, "non-finite": 0, "unpaired": why}
