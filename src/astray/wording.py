"""How counts are put into words, wherever astray speaks."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(5310, "tensor")
    ('1 step', '5,310 tensors')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
