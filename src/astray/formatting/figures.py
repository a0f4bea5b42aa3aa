"""How numbers are written in reports: as many digits as a reader can use."""

from __future__ import annotations

import math
import re

from astray.records import Statistics
from astray.wording import counted, two_digits

__all__ = ["change", "counted", "dtype", "error", "non_finite", "shape", "statistic", "surprise"]


def error(value: float) -> str:
    """An error: two digits.

    >>> error(0.00098765), error(0.5), error(0.0), error(float("inf"))
    ('9.9e-04', '0.50', '0', '∞')
    """
    if math.isnan(value):
        return "not known"
    if math.isinf(value):
        return "∞"
    return two_digits(value)


def surprise(value: float) -> str:
    """A surprise: how many times the error exceeds what can be explained.

    >>> surprise(float("inf")), surprise(128.04), surprise(2.55), surprise(0.4), surprise(2.2e8)
    ('∞', '128', '2.5', '0.40', '2.2e+08')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if 10 <= value < 1e6 else two_digits(value)


def statistic(value: float | None) -> str:
    """A statistic: six significant digits.

    >>> statistic(-0.123456789), statistic(12.0), statistic(None)
    ('-0.123457', '12', '–')
    """
    return "–" if value is None or math.isnan(value) else f"{value:.6g}"


def change(value: float) -> str:
    """A difference with its sign: two digits.

    >>> change(0.00098765), change(-3.0), change(0.0)
    ('+9.9e-04', '-3.0', '0')
    """
    return ("+" if value > 0 else "") + two_digits(value)


def shape(sizes: tuple[int, ...]) -> str:
    """A shape.

    >>> shape((4, 8)), shape(())
    ('4×8', 'scalar')
    """
    return "×".join(map(str, sizes)) or "scalar"


def dtype(name: str) -> str:
    """The customary short name of a dtype.

    >>> dtype("float32"), dtype("bfloat16"), dtype("uint8"), dtype("float8_e4m3fn")
    ('f32', 'bf16', 'u8', 'f8_e4m3fn')
    """
    name = re.sub(r"^(u?)int", r"\1i", name)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("ui", "u")):
        name = name.replace(long, short)
    return name


def non_finite(statistics: Statistics | None) -> str:
    """How many elements are not finite: "3 NaN, 1 Inf of 64"."""
    if statistics is None:
        return "not known"
    counts = [f"{count:,} {name}" for count, name in ((statistics.nan, "NaN"), (statistics.inf, "Inf")) if count]
    return f"{', '.join(counts) or 'none'} of {statistics.count:,}"
