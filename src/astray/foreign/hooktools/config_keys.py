"""Takes the keys of a configuration one by one, and has a sentence for every one that is wrong or not known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from astray.capture.config_file import load
from astray.errors import AstrayError
from astray.wording import did_you_mean

Given = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or what would stand in it."""

T = TypeVar("T")
D = TypeVar("D")


class Keys:
    """The keys of a mapping. `error` is what is raised, `where` what a sentence begins with.

    >>> with_keys = Keys({"trace_mode": 7}, "tracer_demo.yaml: ", RecordError)
    >>> with_keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
    RecordError: tracer_demo.yaml: trace_mode is 7; it can be 0, 1, 2, 3.
    """

    def __init__(self, given: Any, where: str, error: type[AstrayError], name: str = "") -> None:
        self._where, self._error, self._name = where, error, name
        if not isinstance(given, Mapping | None):
            raise error(f"{where}{name or 'The configuration'} is {given!r}. It should have keys with values.")
        self._left = {str(key): value for key, value in (given or {}).items()}
        self._known: list[str] = []

    @classmethod
    def of(cls, config: Given, error: type[AstrayError]) -> Keys:
        """Those of a file, or of a dict."""
        if isinstance(config, Mapping):
            return cls(config, "", error)
        try:
            found = load(config)
        except AstrayError as problem:
            raise error(str(problem)) from None
        return cls(found, f"{config}: ", error)

    def take(self, name: str, check: Callable[[Any], T], default: D, *spellings: str) -> T | D:
        """The value of a key, under any of its spellings. One without a value is one that is not there."""
        self._known += [name, *spellings]
        found = {key: self._left.pop(key) for key in (name, *spellings) if key in self._left}
        if len(found) > 1:
            raise self._error(f"{self._where}{' and '.join(found)} are the same key. Leave out one.")
        for key, value in found.items():
            if value is not None:
                try:
                    return check(value)
                except ValueError as error:
                    raise self._error(f"{self._where}{self._name}{key} is {value!r}; {error}.") from None
        return default

    def inside(self, name: str, *spellings: str) -> Keys:
        """The keys of a mapping that is the value of a key."""
        value = self.take(name, lambda given: given, None, *spellings)
        return Keys(value, self._where, self._error, f"{self._name}{name}.")

    def done(self) -> None:
        """Nothing else is known: complain about what is left."""
        for key in self._left:
            known = did_you_mean(key, self._known) or f" There are {', '.join(self._known)}."
            raise self._error(f"{self._where}There is no key {self._name}{key}.{known}")


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Checks for one of these."""

    def check(value: Any) -> Any:
        for one in values:
            if type(one) is type(value) and one == value:
                return one
        raise ValueError(f"it can be {', '.join(map(str, values))}")

    return check


def text(value: Any) -> str:
    """Checks for a text."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError("it should be a text")
    return os.fspath(value)


def folder_name(value: Any) -> str:
    """Checks for a text that can be the name of a folder."""
    name = text(value)
    if re.search(r"[/\\\0]", name) or name in (".", ".."):
        raise ValueError("it becomes the name of a folder, and cannot lead into another")
    return name


def texts(value: Any) -> tuple[str, ...]:
    """Checks for a text or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
        raise ValueError("it should be a list of texts")
    return tuple(found)


def expressions(value: Any) -> tuple[str, ...]:
    """Checks for regular expressions."""
    found = texts(value)
    try:
        for one in found:
            re.compile(one)
    except re.error as error:
        raise ValueError(f"{error.pattern!r} is no regular expression: {error}") from None
    return found


def truth(value: Any) -> bool:
    """Checks for yes or no."""
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError("it should be true or false")
    return bool(value)


def count(value: Any) -> int:
    """Checks for how many."""
    if type(value) is not int or value < 1:
        raise ValueError("it should be a whole number from 1 on")
    return value


def number(value: Any) -> float:
    """Checks for a number, also one that a YAML parser took for a text, as most do with 1e-5."""
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        found = None
    if found is None:
        raise ValueError("it should be a number, such as 1e-5")
    return found


def similarity(value: Any) -> float:
    """Checks for a number that a cosine can be."""
    found = number(value)
    if found > 1:
        raise ValueError("a similarity is no larger than 1")
    return found


class NumberRange:
    """Epochs or steps by number.

    >>> 7 in Chosen.parse("[0,8)"), 8 in Chosen.parse("[0,8)"), 2 in Chosen.parse("[1,3]"), 5 in Chosen.parse(-1)
    (True, False, False, True)
    """

    def __init__(self, numbers: frozenset[int] | range | None, given: object) -> None:
        self._numbers, self._given = numbers, given

    @classmethod
    def parse(cls, value: Any) -> NumberRange:
        """One number, −1 for all, "[0,8)" for 0 to 7, or a list: [1, 3] or "[1,3]". No list is a range."""
        if isinstance(value, str):
            return cls._of_text(value)
        numbers = [value] if isinstance(value, int) else value
        if not isinstance(numbers, Sequence) or not all(type(one) is int for one in numbers):
            raise ValueError("write one number, -1 for all, a list such as [1, 3], or '[0,8)' for 0 to 7")
        return cls(frozenset(numbers) if list(numbers) not in ([-1], []) else None, value)

    @classmethod
    def _of_text(cls, value: str) -> NumberRange:
        half_open = re.fullmatch(r"\s*([\[(])\s*(-?\d{1,12})\s*,\s*(-?\d{1,12})\s*([\])])\s*", value)
        if half_open and (half_open[1], half_open[4]) != ("[", "]"):
            first = int(half_open[2]) + (half_open[1] == "(")
            return cls(range(first, int(half_open[3]) + (half_open[4] == "]")), value)
        listed = re.fullmatch(r"\s*\[?((?:\s*-?\d{1,12}\s*,?)*)\]?\s*", value)
        return cls.parse([int(one) for one in re.findall(r"-?\d+", listed[1])] if listed else None)

    def __contains__(self, number: int) -> bool:
        return self._numbers is None or number in self._numbers

    def __str__(self) -> str:
        return "all" if self._numbers is None else str(self._given)


ALL = NumberRange(None, -1)
