"""Turns the values of config.json into what they mean, or into a RecordError that says what would be right.

Which keys there are is known to `configuration`; a check takes what was written under one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astray.errors import RecordError
from astray.wording import did_you_mean

_FUNCTION = r"(?!Module\.|Cell\.)\w+\..+\.\d+\.(forward|backward)"
_MODULE = r"(Module|Cell)\..+\.(forward|backward)\.\d+"
_NAMES = {"L0": _MODULE, "L1": _FUNCTION, "mix": f"{_FUNCTION}|{_MODULE}"}
_LARGEST = 1_000_000


def numbers(name: str, given: Any) -> tuple[int, ...]:
    """Steps or ranks as msprobe writes them: numbers, "3", and "4-6", which has its end.

    >>> numbers("step", [0, "4-6"])
    (0, 4, 5, 6)
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple | range):
        raise RecordError(f'{name} is {given!r}. It is a list such as [0, "4-6"]; [] means all.')
    found: set[int] = set()
    for one in given:
        span = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", one) if isinstance(one, str) else None
        if span is not None:
            first, last = int(span[1]), int(span[2] or span[1])
        elif isinstance(one, int) and not isinstance(one, bool):
            first = last = one
        else:
            raise RecordError(f'{name} has {one!r}. It holds whole numbers, or spans such as "4-6".')
        if not 0 <= first <= last <= _LARGEST:
            raise RecordError(f"{name} has {one!r}. Its numbers go from 0 to {_LARGEST:,}, the smaller one first.")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def scope(given: Any, level: str) -> tuple[str, str] | None:
    """The names of two entries, as this level has them."""
    if not given:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise RecordError(f"scope is {given!r}. It is two names, the first and the last entry that are dumped.")
    if level == "debug":
        raise RecordError("scope is given at level 'debug', where only what you save is recorded. Leave out either.")
    for name in given:
        if not re.fullmatch(_NAMES[level], name):
            example = "Module.fc.Linear.forward.0" if level == "L0" else "Functional.linear.0.forward"
            raise RecordError(f"scope has {name!r}, which is no name of level {level}. They look like {example}.")
    return given[0], given[1]


def overflows(given: Any) -> int | None:
    """How many entries with NaN or infinity to dump; None for all."""
    if given is None:
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or (given < 1 and given != -1):
        raise RecordError(f"overflow_nums is {given!r}. It is how many entries to dump, from 1 on, or -1 for all.")
    return None if given == -1 else given


def texts(section: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of names, or of parts of them."""
    given = section.get(name)
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) and one for one in given):
        raise RecordError(f'{name} is {given!r}. It is a list of names, or of parts of names: ["relu"].')
    return tuple(given)


def words(section: Mapping[str, Any], name: str, known: tuple[str, ...]) -> set[str]:
    """A list of known words."""
    found = texts(section, name)
    for word in found:
        if word not in known:
            raise RecordError(f"{name} has {word!r}. It holds {', '.join(known)}.{did_you_mean(word, known)}")
    return set(found)


def word(section: Mapping[str, Any], name: str, known: tuple[str, ...], default: str) -> str:
    """One of the known words."""
    given = section.get(name) or default
    if given == "xor":
        raise RecordError(f"{name} is 'xor'. That sum does not see two rows swapped: use 'md5'.")
    if given not in known:
        raise RecordError(f"{name} is {given!r}. It is one of {', '.join(known)}.{did_you_mean(given, known)}")
    return str(given)


def flag(held: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    given = held.get(name)
    if given is not None and not isinstance(given, bool):
        raise RecordError(f"{name} is {given!r}. It is true or false.")
    return default if given is None else given
