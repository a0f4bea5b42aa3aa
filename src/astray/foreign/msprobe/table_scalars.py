"""Arguments that are not tensors, as rows of msprobe's table: numbers, texts, None, sizes.

They are compared as they are. Which rows of tensors stand around them is the table's business.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from astray.foreign.msprobe.names import positional, short
from astray.safe_text import parse_json
from astray.store.run import RankRun
from astray.wording import as_utf8

TENSOR = "<tensor>"
MISSING, UNSUPPORTED = "N/A", "unsupported"
NO_FILES = str(["-1", "-1"])

Cell = str | float | int | bool


class ScalarArgument(NamedTuple):
    """An argument of a call; `path` as in the names of msprobe, without what kind of argument it is."""

    path: str
    value: Any


class ScalarArguments:
    """The arguments of the calls of one rank, each list in its order, tensors among them as a mark."""

    def __init__(self, rank: RankRun) -> None:
        self._calls = rank.call_rows.tolist()
        self._args = rank.calls.coded("args").tolist()
        self._kinds, self._types, self._phases = (rank.calls.coded(name).tolist() for name in ("kind", "type", "phase"))

    def of(self, row: int) -> tuple[ScalarArgument, ...]:
        """Those of the call that a tensor belongs to; none of a backward."""
        call = self._calls[row]
        if self._phases[call] == "backward" or not self._args[call]:
            return ()
        return _read(self._args[call], short(self._types[call]) if self._kinds[call] == "function" else "")


@lru_cache(1 << 14)
def _read(text: str, function: str) -> tuple[ScalarArgument, ...]:
    try:
        said = parse_json(text)
    except ValueError:
        return ()
    if not isinstance(said, dict):
        return ()
    args, kwargs = said.get("args"), said.get("kwargs")
    found: list[ScalarArgument] = []
    for place, one in enumerate(args if isinstance(args, list) else ()):
        found += _leaves(one, str(place))
    for word, one in (kwargs if isinstance(kwargs, dict) else {}).items():
        path = positional(function, f"kwargs.{word}").removeprefix("kwargs.") if one == TENSOR else word
        found += _leaves(one, path)
    return tuple(found)


def _leaves(value: Any, path: str) -> Iterator[ScalarArgument]:
    if isinstance(value, dict | list):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(one, f"{path}.{name}")
    elif value == TENSOR or not (isinstance(value, str) and value.startswith("<")):  # an object is nothing to msprobe
        yield ScalarArgument(path, value)


class ArgumentPair(NamedTuple):
    """One argument on both sides. A side without it has no name."""

    npu: str
    bench: str
    value: Any
    other: Any

    def cells(self, mode: str, stacks: bool) -> list[Cell]:
        """A row of the table."""
        agrees = bool(self.bench) and self.value == self.other and type(self.value) is type(self.other)
        messages = [] if agrees else [self._difference()]
        result = "pass" if agrees else "error" if self.bench else "warning"
        forms = [_form(self.value), _form(self.other) if self.bench else (MISSING, MISSING)]
        found: list[Cell] = [self.npu, self.bench or MISSING]
        found += [forms[0][0], forms[1][0], forms[0][1], forms[1][1], MISSING, MISSING]
        found += self._middle(mode, agrees)
        found += [True if self.bench else MISSING, result, json.dumps(messages, ensure_ascii=False)]
        return [*found, *([MISSING] if stacks else []), *([NO_FILES] if mode == "all" else [])]

    def _difference(self) -> str:
        if not self.bench:
            return "only in NPU: Bench has no such argument"
        return f"the argument is {self.value!r} in NPU and {self.other!r} in Bench"

    def _middle(self, mode: str, agrees: bool) -> list[Cell]:
        sides = [self.value, *([self.other] if self.bench else [])]
        if mode == "md5":
            prints: list[Cell] = [f"{zlib.crc32(as_utf8(str(one))):08x}" for one in sides]
            return [*prints, *([MISSING] * (2 - len(sides)))]
        summary: list[Cell] = [_shown(one) for one in sides for _ in range(4)]
        summary += [MISSING] * (8 - len(summary))
        if mode == "all":
            return [*([UNSUPPORTED if self.bench else MISSING] * 6), *summary]
        return [*_differences(self.value, self.other, agrees), *summary]


def _differences(value: Any, other: Any, agrees: bool) -> list[Cell]:
    if agrees:
        return [0] * 8
    numbers = [one for one in (value, other) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) < 2:
        return [MISSING] * 8
    difference = numbers[0] - numbers[1]
    relative = f"{abs(difference / numbers[1]) * 100}%" if numbers[1] else MISSING
    return [*([difference] * 4), *([relative] * 4)]


def _form(value: Any) -> tuple[str, str]:
    """What stands for the dtype and the shape of an argument."""
    if value is None:
        return MISSING, MISSING
    if _is_size(value):
        return "torch.Size", value[len("torch.Size(") : -1]
    return f"<class '{type(value).__name__}'>", "[]"


def _shown(value: Any) -> Cell:
    return "None" if value is None or _is_size(value) else value


def _is_size(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("torch.Size(")
