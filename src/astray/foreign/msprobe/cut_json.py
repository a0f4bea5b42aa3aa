"""The whole pairs of a JSON document that was cut in the middle, as a killed program leaves it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Pair(NamedTuple):
    """A pair of an object. Where its value is cut, that is None, and `cut` is where it begins."""

    name: str
    value: Any
    cut: int | None = None


def read_whole_pairs(text: str, inner: str) -> dict[str, Any]:
    """The pairs of a document that are whole; of the value of `inner`, if the cut is in it, its own whole pairs.

    >>> read_whole_pairs('{"task": "tensor", "data": {"a": [1, 2], "b": [3, ', "data")
    {'task': 'tensor', 'data': {'a': [1, 2]}}
    """
    found: dict[str, Any] = {}
    for pair in _pairs(text, _behind_space(text, 0)):
        if pair.cut is None:
            found[pair.name] = pair.value
        elif pair.name == inner:
            found[pair.name] = {one.name: one.value for one in _pairs(text, pair.cut) if one.cut is None}
    return found


def _pairs(text: str, at: int) -> Iterator[Pair]:
    """The pairs of the object that begins here."""
    separator = "{"
    while text[at : at + 1] == separator:
        name, at = _name(text, _behind_space(text, at + 1))
        if name is None:
            return
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield Pair(name, None, at)
            return
        if end == len(text) and text[end - 1] not in '}]"':  # a number may go on behind the cut
            yield Pair(name, None, at)
            return
        yield Pair(name, value)
        at, separator = _behind_space(text, end), ","


def _name(text: str, at: int) -> tuple[str | None, int]:
    """The name of a pair and where its value begins; None where there is none."""
    if text[at : at + 1] != '"':
        return None, at
    try:
        name, at = scanstring(text, at + 1)
    except ValueError:
        return None, at
    at = _behind_space(text, at)
    return (name, _behind_space(text, at + 1)) if text[at : at + 1] == ":" else (None, at)


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
