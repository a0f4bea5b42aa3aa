"""The options of a comparison that the page can set: those of `astray compare` that name no file.

They come as JSON from a browser, so names, types and sizes are all checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from astray.errors import UsageError
from astray.wording import did_you_mean

LONGEST = 1000
"""The most characters of a text; a regular expression for sites is the longest option."""


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise UsageError(f"{name} is a text of at most {LONGEST:,} characters.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is true or false.")
    return value


def _number(name: str, value: Any) -> int:
    if type(value) is not int or abs(value) > 1 << 53:
        raise UsageError(f"{name} is a whole number.")
    return value


def ranks_of(name: str, value: Any) -> list[int]:
    """From a text such as 0,3."""
    text = _text(name, value)
    try:
        return [int(rank) for rank in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it is numbers with commas between them, such as 0,3.") from None


def tolerances_of(name: str, value: Any) -> dict[str, float]:
    """From a text such as bfloat16=0.02, or several: a site (a regex) or a dtype, and the error to allow there."""
    items = value if isinstance(value, list) else _text(name, value).split(",")
    tolerances: dict[str, float] = {}
    for item in items:
        what, _, error = _text(name, item).strip().rpartition("=")
        try:
            tolerances[what] = float(error)
        except ValueError:
            what = ""
        if not what:
            raise UsageError(f"{name} is {item!r}; it is a site or a dtype and an error, such as bfloat16=0.02.")
    return tolerances


_KNOWN: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "steps": ("steps", _text),
    "ranks": ("ranks", ranks_of),
    "sites": ("sites", _text),
    "tolerance": ("tolerances", tolerances_of),
    "exact": ("exact", _flag),
    "by": ("by", _text),
    "shapes": ("shapes", _text),
    "micro": ("micro", _text),
    "offset": ("offset", _number),
}
"""The options of the page: the name of each in `compare`, and the function that reads it."""


def arguments_of(options: Any) -> dict[str, Any]:
    """The arguments of `compare`. Raises UsageError for what it does not accept; empty texts and null are left out."""
    if not isinstance(options, Mapping):
        raise UsageError('The options are an object, such as {"steps": "0:10"}.')
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _KNOWN:
            raise UsageError(f"There is no option {name!r:.40}.{did_you_mean(name, _KNOWN)}")
        if value not in (None, "", []):
            argument, read = _KNOWN[name]
            arguments[argument] = read(name, value)
    return arguments
