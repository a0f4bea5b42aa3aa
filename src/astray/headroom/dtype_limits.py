"""The limits of a floating-point dtype: the largest numbers, the smallest ones, and the spacing between numbers.

Built on `stats.dtypes`, which knows the bits. A complex dtype has the limits of its parts, as its statistics have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from astray.errors import UsageError
from astray.stats import dtypes
from astray.wording import did_you_mean

SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""Other names of dtypes."""

NARROW = 2.0**-30
"""A dtype whose smallest normal number is larger than this has gradients that vanish: float16 and the 8-bit floats."""


class DtypeLimits(NamedTuple):
    """The limits of a dtype, with rounding to nearest, ties to even.

    >>> limits("float16")
    DtypeLimits(name='float16', largest=65504.0, overflows=65520.0, tiny=6.103515625e-05, \
vanishes=2.9802322387695312e-08, eps=0.0009765625)
    """

    name: str
    largest: float
    overflows: float  # the smallest magnitude that rounds to something not finite
    tiny: float  # the smallest normal number; below it digits are lost
    vanishes: float  # the largest magnitude that rounds to zero
    eps: float  # from 1 to the next number: half of it is the most that a rounding changes, relative

    @property
    def narrow(self) -> bool:
        """Whether gradients are known to underflow in it."""
        return self.tiny > NARROW

    @property
    def coarse(self) -> bool:
        """Whether it is an 8-bit float, whose range is filled on purpose: each tensor has a scale of its own."""
        return self.eps >= 2.0**-3


@cache
def limits(name: str) -> DtypeLimits | None:
    """The limits of this dtype; None for one that is unknown, or not of floating-point numbers."""
    dtype = dtypes.DTYPES.get(name)
    if dtype is None or dtype.kind not in ("float", "complex"):
        return None
    step = math.ldexp(
        dtype.eps, math.frexp(dtype.max)[1] - 1
    )  # from the largest number to the next one, if there were one
    halfway = dtype.max + step / 2
    # A tie goes to the even number. That is the next one, unless the largest number is even itself, as 448 of
    # float8_e4m3fn is: the bits of its odd neighbour mean NaN.
    odd = (dtype.max / step) % 2 == 1
    overflows = halfway if odd else math.nextafter(halfway, math.inf)
    # float8_e8m0fnu has no zero: what is too small becomes its smallest number.
    vanishes = 0.0 if name == "float8_e8m0fnu" else dtype.tiny * dtype.eps / 2
    return DtypeLimits(name, dtype.max, overflows, dtype.tiny, vanishes, dtype.eps)


def targets(names: str | Iterable[str]) -> list[DtypeLimits]:
    """The dtypes of a list or of a text with commas (`float16,bf16`), each once. Raises UsageError for unknown ones."""
    words: Sequence[str] = names.split(",") if isinstance(names, str) and names else list(names)
    chosen: dict[str, DtypeLimits] = {}
    for word in (word.strip().removeprefix("torch.") for word in words):
        known = limits(SHORT.get(word, word))
        if known is None or dtypes.find(known.name).kind != "float":
            floats = [name for name, dtype in dtypes.DTYPES.items() if dtype.kind == "float"]
            raise UsageError(
                f"{word!r} is not a floating-point dtype.{did_you_mean(word, [*floats, *SHORT])} "
                f"There are {', '.join(floats)}."
            )
        chosen[known.name] = known
    return list(chosen.values())
