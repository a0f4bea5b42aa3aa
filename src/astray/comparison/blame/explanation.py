"""A surprise in words: what was measured, what explains how much of it, and how sure the answer is.

Reads the numbers that `judge` left in a row, feeds `divergence`, `suspects` and through them every report.
"""

from __future__ import annotations

import math

from astray.store import Table
from astray.wording import two_digits

_MEASURED = {
    "values": ("values", "are"),
    "worst": ("worst element", "is"),
    "slices": ("furthest slice", "is"),
    "typical": ("typical row", "is"),
    "norm": ("norm or std", "is"),
    "mean": ("mean", "is"),
    "extremes": ("extremes", "are"),
}

UNKNOWN = "not known"
CERTAIN = "certain"
ROUNDING = "no more than rounding"
SURENESS = (CERTAIN, "very likely", "likely", ROUNDING, UNKNOWN)
"""All results of `sureness`, and the word where only fingerprints were kept."""


def explained(
    *,
    measure: str,
    deviation: float,
    limit: float,
    given: float,
    rule: str,
    siblings: int,
    of: str = "",
    by: str = "",
    furthest: str = "",
) -> str:
    """How far off a tensor is, and what explains how much of it.

    >>> numbers = {"measure": "norm", "deviation": 6.2e-2, "limit": 9.8e-4, "given": 1.1e-4}
    >>> explained(**numbers, rule="siblings", siblings=11)
    'its norm or std is off by 0.062; what it came from (1.1e-04) and 11 siblings explain at most 9.8e-04'

    of: whose numbers these are, where that is not clear: "its parameter `weight`".
    by: what its values were known by, where that is not all of them: "sample".
    furthest: which slice of it is meant, where that is the measure: see `furthest_slice`.
    """
    part = f" (by {by})" if by not in ("", "values") and measure in ("values", "worst") else ""
    what = f"{_subject(measure, of, furthest)} off by {two_digits(deviation)}{part}"
    if rule == "seen before":
        return f"{what}, as where it was seen first"
    if rule == "replay":
        return f"{what}, which the call does not make of its inputs"
    if rule == "tolerance":
        return f"{what}; the tolerance is {two_digits(limit)}"
    if rule == "start":
        may = f", and rounding explains at most {two_digits(limit)}" if limit > 0 else " and should be the same"
        return f"{what}; it came from nothing that was recorded{may}"
    if rule == "unmoved":
        return f"{what}; only one run moved it since the step before, and both moved {siblings} siblings of it"
    if not limit > 0:
        same = f", though all it came from is bit-identical, and {siblings} siblings of it stayed so"
        return what + (same if rule == "siblings" else "; nothing may differ" if rule == "bits" else "")
    source = f"what it came from ({two_digits(given)})" if given > 0 else "rounding"
    others = {"siblings": f" and {siblings} siblings explain", "noise run": " and the noise run explain"}
    return f"{what}; {source}{others.get(rule, ' explains')} at most {two_digits(limit)}"


def furthest_slice(pairs: Table, row: int) -> str:
    """Which slice of a tensor is furthest off, where that is what it is judged by: "slice 3 of dimension 0"."""
    if pairs["measure"][row] != "slices":
        return ""
    dim, index = (pairs.numbers(name)[row] for name in ("slice_dim", "slice_index"))
    return "" if math.isnan(dim) else f"slice {int(index)} of dimension {int(dim)}"


def _subject(measure: str, of: str, furthest: str) -> str:
    """What is off: "its values are", "the extremes of input `0` of h.2 (Block) are"."""
    if measure not in _MEASURED:
        return f"{of or 'it'} is"
    noun, verb = _MEASURED[measure]
    noun = furthest or noun
    article = "" if furthest else "the "
    return f"{article}{noun} of {of} {verb}" if of else f"its {noun} {verb}"


def sureness(surprise: float) -> str:
    """How sure it is that something so surprising is wrong.

    Of thirty pairs of right runs none passed 0.7, and the limits leave half as much again for others.

    >>> sureness(63.0), sureness(2.5), sureness(1.2), sureness(0.4)
    ('certain', 'very likely', 'likely', 'no more than rounding')
    """
    if math.isnan(surprise) or surprise >= 10:
        return CERTAIN
    if surprise >= 2:
        return "very likely"
    return "likely" if surprise > 1 else ROUNDING


def times(surprise: float) -> str:
    """A surprise as a number to be read.

    >>> [times(value) for value in (1234.5, 63.2, 2.54, 1.04, 0.4)]
    ['more than 1,000', '63', '2.5', '1.04', '0.40']
    """
    if surprise >= 1000:
        return "more than 1,000"
    return f"{surprise:.0f}" if surprise >= 10 else f"{surprise:.1f}" if surprise >= 2 else f"{surprise:.2f}"
