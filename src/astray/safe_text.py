"""Reads JSON and YAML from files that may hold anything: arguments of calls, settings, placements, names.

Python reads nested lists as deep as its stack allows, and whole numbers of thousands of digits. Walking, comparing or
writing the first takes more of the stack than reading did; the second do not fit a float, and cannot always be written.
In YAML, references (`*name`) let a few lines stand for more than memory holds. None of these occurs in what astray
records, so all are rejected where the text is read.
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


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raises ValueError where it is not JSON, is nested too deep, or has huge numbers.

    >>> parse_json('{"args": ["<tensor>", 0.5]}')
    {'args': ['<tensor>', 0.5]}
    """
    check_depth(text)
    try:
        return _DECODER.decode(text)
    except RecursionError:  # of a caller that is deep in its own stack
        raise ValueError("it is nested too deep to be read here") from None


def check_depth(text: str) -> None:
    """Raises ValueError where a JSON text nests lists and objects beyond `DEEPEST` levels."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        depth += 1 if bracket in ("[", "{") else -1 if bracket in ("]", "}") else 0
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


MOST_VALUES = 100_000
"""Values in a YAML file of settings or names, each counted as often as it is referred to."""

_TOO_MANY = f"by its references it stands for more than {MOST_VALUES:,} values"


@functools.cache
def bounded_loader() -> type[yaml.SafeLoader]:
    """A safe YAML loader with a bound on what `<<` merges."""
    import yaml

    class BoundedLoader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MOST_VALUES:
                raise ValueError(_TOO_MANY)

    return BoundedLoader


def check_bounded(content: Any) -> None:
    """Raises ValueError where what was read has more than `MOST_VALUES` values, counting what is referred to."""
    stack, count = [content], 0
    while stack:
        value = stack.pop()
        items = [*value, *value.values()] if isinstance(value, dict) else value
        children = items if isinstance(items, list) else []
        count += len(children)
        if count > MOST_VALUES:
            raise ValueError(_TOO_MANY)
        stack += children
