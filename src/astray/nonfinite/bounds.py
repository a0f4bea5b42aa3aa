"""Between which calls NaN or infinity was born, in a backward pass of which only the gradients of parameters were read.

autograd runs the backward of the last call first, and a parameter has its gradient as soon as its call's backward has
run. So the gradients come in the reverse order of the calls: the first bad one and the finite one before it are bounds.
"""

from __future__ import annotations

from typing import NamedTuple

from astray.nonfinite.step_rows import NO_ROW, StepRows


class Bounds(NamedTuple):
    """`candidates`: the forward calls of whose backward one did it, in the order of the backward pass.

    behind: the other forward calls that ran later; where a model branches, a gradient may have come from these.
    before: the parameter whose gradient came last before it, and is finite; empty when it is the first of all.
    """

    candidates: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    before: str = ""


def bounds_of(rows: StepRows, row: int) -> Bounds:
    """Where the gradient of a parameter, the first that is bad in its backward pass, may have become so."""
    call = rows.call_of[row]
    before = _finite_before(rows, row)
    forward = _forward_calls(rows, rows.micros[call])
    first = _first_of(rows, forward, call)
    last = _first_of(rows, forward, before) if before != NO_ROW else NO_ROW
    name = "" if before == NO_ROW else rows.sites[before]
    if first == NO_ROW:  # the module was not recorded
        return Bounds(before=name)
    around = _around(rows, first, last)
    later = [one for one in reversed(forward) if one >= first or one in around]
    candidates = tuple(
        one for one in later if one in around or last == NO_ROW or one <= last or rows.graph.is_inside(one, last)
    )
    return Bounds(candidates, tuple(one for one in later if one not in candidates), name)


def _forward_calls(rows: StepRows, micro: int) -> list[int]:
    """The calls of modules in a micro step, in order, without those that checkpointing made again."""
    again = rows.calls.numbers("recompute")
    return [
        call
        for call, kind in enumerate(rows.kinds)
        if kind == "module" and rows.phases[call] == "forward" and rows.micros[call] == micro and not again[call]
    ]


def _around(rows: StepRows, first: int, last: int) -> set[int]:
    """The calls around the first whose own code may have run up to the last: as far out as the one around both."""
    around = [*rows.graph.around(first), first]
    if last == NO_ROW:
        return set(around)
    common = set(around) & {*rows.graph.around(last), last}
    return {one for one in around if one not in common} | set(around[len(common) - 1 : len(common)])


def _finite_before(rows: StepRows, row: int) -> int:
    """The call of the last gradient of a parameter that came before, in the same micro step, and is finite."""
    call = rows.call_of[row]
    for other in range(row - 1, -1, -1):
        of = rows.call_of[other]
        known = of >= 0 and of != call and rows.kinds[of] == "parameter" and rows.micros[of] == rows.micros[call]
        if known and not rows.is_bad(other):
            return of
    return NO_ROW


def _first_of(rows: StepRows, forward: list[int], parameter: int) -> int:
    """The first call of the module that owns a parameter: its gradient is whole when that one's backward has run."""
    return next((one for one in forward if rows.sites[one] == rows.module(parameter)), NO_ROW)
