"""Whole numbers that stand in names, such as the 12 of `h.12` and the 0 of `out.0`.

Names come from files, and those may say anything: signs that only look like digits ("²"), and more digits than Python
makes a number of (4,300, beyond which it raises). Whoever reads a number out of a name asks here.
"""

from __future__ import annotations

MOST_DIGITS = 18
"""What a column of 64 bits holds, whatever the digits are."""


def numeral(text: str, digits: int = MOST_DIGITS) -> int | None:
    """The number that a text is: of the digits 0 to 9, and of at most so many. None of every other text.

    >>> numeral("12"), numeral("007"), numeral("²"), numeral("9" * 5000), numeral("")
    (12, 7, None, None, None)
    """
    return int(text) if len(text) <= digits and text.isascii() and text.isdecimal() else None
