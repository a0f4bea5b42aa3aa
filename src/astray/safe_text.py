"""Reads JSON and YAML out of files that may say anything: arguments of calls, settings, placements, names.

Python reads lists in lists as deep as its stack goes, and whole numbers of thousands of digits. Walking, comparing or
writing out the first takes more of the stack than reading did; the second do not fit a float, and cannot always be
written out. In YAML, references (`*name`) let a few lines stand for more than memory holds. None of these is in what
astray records, so all are refused where the text is read.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml


DEEPEST = 100
"""Levels of lists and objects: several times as many as are recorded of arguments. Walking one may take two or three
nested calls, of the thousand that Python allows."""

MOST_DIGITS = 300
"""Of a whole number: with 309 digits and more they are beyond float64."""

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def read_plain(text: str) -> Any:
    """The content of a text of JSON. Raises ValueError where it is not JSON, is nested too deep, or has huge numbers.

    >>> read_plain('{"args": ["<tensor>", 0.5]}')
    {'args': ['<tensor>', 0.5]}
    """
    check_depth(text)
    try:
        return _DECODER.decode(text)
    except RecursionError:  # of a caller that is deep in its own stack
        raise ValueError("it is nested too deep to be read here") from None


def check_depth(text: str) -> None:
    """Raises ValueError where a text of JSON has lists and objects in each other beyond `DEEPEST` levels."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        depth += 1 if sign in ("[", "{") else -1 if sign in ("]", "}") else 0
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


MOST = 100_000
"""Values in a YAML file of settings or names, each counted as often as it is referred to."""

_TOO_MANY = f"by its references it stands for more than {MOST:,} values"


@functools.cache
def bounded_loader() -> type[yaml.SafeLoader]:
    """A safe loader for YAML that does not follow `<<` without end."""
    import yaml

    class BoundedLoader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MOST:
                raise ValueError(_TOO_MANY)

    return BoundedLoader


def check_bounded(content: Any) -> None:
    """Raises ValueError where what was read has more than `MOST` values, counting what is referred to."""
    todo, seen = [content], 0
    while todo:
        one = todo.pop()
        inside = [*one, *one.values()] if isinstance(one, dict) else list(one) if isinstance(one, list) else []
        seen += len(inside)
        if seen > MOST:
            raise ValueError(_TOO_MANY)
        todo += inside
