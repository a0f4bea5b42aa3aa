"""Where msprobe has the arguments of a function that is written in Python: as they were given.

Such a function hands its arguments on in its own way, some by position and all others by name, given or not, and that
is how astray sees them. A recording for msprobe's files knows how the call was written, and puts them back.
"""

from __future__ import annotations

from collections.abc import Collection

from astray.records import Spelling


def arrangement(spelling: Spelling | None, count: int, words: Collection[str]) -> dict[str, str] | None:
    """The place of each argument that was given, by the place where astray has it, in the order of the call.

    count, words: how many arguments astray has by position, and which by name. None where it is not known how they
    were given, or where they are seen as they were.

    >>> call = Spelling(parameters=("input", "shape", "weight", "bias", "eps"), positional=3, keywords=("eps",))
    >>> arrangement(call, 2, ["weight", "bias", "eps"])
    {'0': '0', '1': '1', 'kwargs.weight': '2', 'kwargs.eps': 'kwargs.eps'}
    """
    if spelling is None or spelling.parameters is None:
        return None
    names = spelling.parameters
    seen = {name: str(place) for place, name in enumerate(names[:count])} | {word: f"kwargs.{word}" for word in words}
    given = {name: str(place) for place, name in enumerate(names[: spelling.positional])}
    given |= {word: f"kwargs.{word}" for word in spelling.keywords}
    if count > len(names) or spelling.positional > len(names) or not given.keys() <= seen.keys():
        return None
    return {seen[name]: place for name, place in given.items()}
