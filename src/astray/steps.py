"""Selections of steps (or ranks): `0:10:2`, `7`, `1,3,5`, a list, a range, or all of them.

Used by capture, compare and cli alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from astray.errors import UsageError

_ENDLESS = 1 << 62
_FORM = "Write begin:end, begin:end:stride, one number, or numbers with commas (the end is not included)."


@dataclass(frozen=True)
class StepSelection:
    """A selection of step numbers.

    >>> 4 in StepSelection.parse("0:10:2"), 5 in StepSelection.parse("0:10:2"), 10 in StepSelection.parse("0:10:2")
    (True, False, False)
    >>> str(StepSelection.parse([1, 3, 8]))
    '1,3,8'
    """

    parts: tuple[range, ...] = ()

    @classmethod
    def parse(cls, value: str | int | Sequence[int] | range | StepSelection | None, of: str = "step") -> StepSelection:
        """A selection from what a user wrote; None, "all", an empty text and an empty list mean every step.

        of: what is counted, named in an error.
        """
        if isinstance(value, StepSelection):
            return value
        if value is None or (isinstance(value, str) and value == "all"):
            return cls()
        if isinstance(value, range):
            return cls((_checked(value, value, of),))
        if isinstance(value, str):
            return cls(tuple(_part(part.strip(), value, of) for part in value.split(",") if part.strip()))
        numbers = [value] if isinstance(value, int) else value
        if not isinstance(numbers, Iterable) or not all(type(number) is int for number in numbers):
            raise UsageError(f"{value!r} is not a selection of {of}s. {_FORM}")
        return cls(tuple(_checked(range(number, number + 1), value, of) for number in numbers))

    def __contains__(self, step: int) -> bool:
        return not self.parts or any(step in part for part in self.parts)

    def __bool__(self) -> bool:
        """False when every step is selected."""
        return bool(self.parts)

    def __str__(self) -> str:
        return ",".join(map(_text, self.parts)) or "all"


def _part(text: str, value: str, of: str) -> range:
    if re.fullmatch(r"\d{1,18}", text):
        return range(int(text), int(text) + 1)
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})(?::(\d{1,18}))?", text)
    if match is None:
        raise UsageError(f"{value!r} is not a selection of {of}s. {_FORM}")
    begin, end, stride = match.groups()
    if stride is not None and int(stride) == 0:
        raise UsageError(f"{value!r} has a stride of 0. {_FORM}")
    return _checked(range(int(begin or 0), int(end) if end else _ENDLESS, int(stride or 1)), value, of)


def _checked(part: range, value: object, of: str) -> range:
    if part.start < 0 or part.step < 1 or not part:
        raise UsageError(f"{value!r} selects no {of}. {_FORM}")
    return part


def _text(part: range) -> str:
    if len(part) == 1:
        return str(part.start)
    end = "" if part.stop == _ENDLESS else str(part.stop)
    return f"{part.start}:{end}" + (f":{part.step}" if part.step != 1 else "")
