"""How counts, sizes, names and suggestions are worded in every message and report.

`numeral` is for the other direction: whole numbers in names, such as the 12 of `h.12` and the 0 of `out.0`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(5310, "tensor")
    ('1 step', '5,310 tensors')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def sized(nbytes: int) -> str:
    """A number of bytes, rounded to be read at a glance.

    >>> sized(40), sized(41_200), sized(5_500_000_000)
    ('40 bytes', '41.2 kB', '5.5 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return counted(nbytes, "byte")


def printable(text: str) -> str:
    """A text on one line of a terminal, with an escape for each character that cannot be printed.

    Names in a recording may hold anything: a carriage return or an escape sequence in one would write over the
    verdict, a line break would add a line, and marks of writing direction would reorder one.

    >>> printable("h.0\r✓ No divergence"), printable("red\x1b[31m"), printable("a\u202eb")
    ('h.0\\r✓ No divergence', 'red\\x1b[31m', 'a\\u202eb')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def as_utf8(text: str) -> bytes:
    r"""A text as bytes, with an escape for what UTF-8 cannot hold: stray bytes of a file name, lone surrogates in JSON.

    >>> as_utf8("h.0\udcff")
    b'h.0\\udcff'
    """
    return text.encode(errors="backslashreplace")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The nearest known word as a question to append to a message, or an empty text when none is near.

    >>> did_you_mean("kepp", ["keep", "steps"])
    " Did you mean 'keep'?"
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def two_digits(value: float) -> str:
    """A number to two significant digits, where only its size matters.

    >>> two_digits(0.00098765), two_digits(0.062), two_digits(0.5), two_digits(12.3), two_digits(1e6), two_digits(0.0)
    ('9.9e-04', '0.062', '0.50', '12.3', '1.0e+06', '0')
    """
    if not value:
        return "0"
    size = abs(value)
    if 0.01 <= size < 100:
        return f"{value:.{1 if size >= 1 else 2 if size >= 0.1 else 3}f}"
    return f"{value:.1e}"


MOST_DIGITS = 18
"""Any number with so many digits fits into 64 bits."""


def numeral(text: str, digits: int = MOST_DIGITS) -> int | None:
    """The number that a text consists of: digits 0 to 9, and at most so many. None for every other text.

    >>> numeral("12"), numeral("007"), numeral("²"), numeral("9" * 5000), numeral("")
    (12, 7, None, None, None)

    Names come from files that may hold anything: characters that only look like digits ("²"), or more digits than
    Python converts (4,300, beyond which `int` raises).
    """
    return int(text) if len(text) <= digits and text.isascii() and text.isdecimal() else None
