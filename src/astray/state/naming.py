"""Choosing parameters by their names: by a pattern, into groups, and whether two states have the same ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from astray.errors import StateError
from astray.state.notices import warn
from astray.wording import counted

Pattern = str | re.Pattern[str]

OTHER = "(other)"
"""The group of the parameters that belong to none."""

_LAYER = r"^((?:[^.]+\.)*?\d+)(?:\.|$)"
"""Everything up to the first part of a name that is a number: `transformer.h.3` of `transformer.h.3.mlp.weight`."""

_SHOWN = 4  # names in a message


def matching(names: Collection[str], pattern: Pattern | None) -> list[str]:
    """The names that a regular expression matches, from their first character on; all of them without one."""
    if pattern is None:
        return list(names)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise StateError(f"The pattern {pattern!r} is no regular expression: {error}.") from None
    found = [name for name in names if expression.match(name)]
    if names and not found:
        warn(
            f"The pattern {expression.pattern!r} matches none of {counted(len(names), 'name')} such as "
            f"{next(iter(names))!r}. It is matched from the first character on: begin with '.*' to search."
        )
    return found


def grouped(names: Iterable[str], group: Pattern) -> dict[str, list[str]]:
    r"""The names by what a regular expression captures in them; "layer" takes everything up to the first number.

    Groups come in the order of their first member. Names without a match share the group `(other)`.

    >>> grouped(["h.0.w", "h.0.b", "h.1.w", "ln.w"], r"h\.(\d+)\.")
    {'0': ['h.0.w', 'h.0.b'], '1': ['h.1.w'], '(other)': ['ln.w']}
    """
    try:
        expression = re.compile(_LAYER if group == "layer" else group)
    except re.error as error:
        raise StateError(f"The group {group!r} is no regular expression: {error}.") from None
    groups: dict[str, list[str]] = {}
    for name in names:
        match = expression.search(name)
        captured = OTHER
        if match is not None:
            captured = ".".join(part for part in match.groups() if part is not None) or match.group()
        groups.setdefault(captured, []).append(name)
    return groups


def check_same(one: Collection[str], other: Collection[str], names: tuple[str, str]) -> None:
    """Raise, and say what is only in one of them, unless two states have the same names."""
    mine, theirs = dict.fromkeys(one), dict.fromkeys(other)
    first, second = [name for name in mine if name not in theirs], [name for name in theirs if name not in mine]
    if not first and not second:
        return
    parts = [
        f"only in {label}: {', '.join(extra[:_SHOWN])}" + (f" and {len(extra) - _SHOWN} more" * (len(extra) > _SHOWN))
        for label, extra in zip(_told_apart(names), (first, second), strict=True)
        if extra
    ]
    wrapped = any(part.startswith(("module.", "_")) for part in (*first, *second))
    hint = "If one model is wrapped, use unwrap()." if wrapped else "Use filter(pattern) on the larger one."
    raise StateError(f"The states have different parameters; {'; '.join(parts)}. {hint}")


def _told_apart(names: tuple[str, str]) -> tuple[str, str]:
    return ("the first", "the second") if names[0] == names[1] else (f"{names[0]!r}", f"{names[1]!r}")
