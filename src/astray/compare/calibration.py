"""What a pair may be off by, where somebody knows better than the model of `noise`.

Two can know: the user, who gives a tolerance for a site or a dtype, and a second recording of the reference, which
shows how far apart two runs get that are both right. That gives every tensor a floor of its own: the largest error that
it showed there in any step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.compare.keys import one_key
from astray.compare.rows import Floats, Ints, Rows
from astray.errors import CompareError
from astray.stats import DTYPES

MARGIN = 4
"""So many times as large as in the second recording an error may be: two runs show only one throw of the dice."""

SAME_TENSOR = ("micro", "site", "call", "phase", "again", "role", "path")


class Rule(IntEnum):
    """What decided about a pair."""

    NONE = 0
    BITS = 1
    MODEL = 2
    NOISE = 3
    TOLERANCE = 4


RULES = ["", "bits", "model", "noise run", "tolerance"]


@dataclass(frozen=True)
class Tolerances:
    """The largest errors that the user allows: by regular expressions for sites, the first that is found, or by dtype.

    >>> allowed = Tolerances.check({r"attn": 1e-3, "bfloat16": 0.02})
    >>> allowed.of("h.0.attn", "float32"), allowed.of("h.0.mlp", "bfloat16"), allowed.of("h.0.mlp", "float32")
    (0.001, 0.02, nan)
    """

    sites: tuple[tuple[re.Pattern[str], float], ...] = ()
    dtypes: Mapping[str, float] | None = None

    @classmethod
    def check(cls, given: Mapping[str, float] | None) -> Tolerances:
        """Raises CompareError for what is no tolerance."""
        sites: list[tuple[re.Pattern[str], float]] = []
        dtypes: dict[str, float] = {}
        for name, value in (given or {}).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise CompareError(f"The tolerance of {name!r} is {value!r}; it is a relative error, such as 1e-3.")
            if name in DTYPES:
                dtypes[name] = float(value)
                continue
            try:
                sites.append((re.compile(name), float(value)))
            except re.error as error:
                raise CompareError(
                    f"{name!r} is neither a dtype nor a regular expression for sites: {error}."
                ) from None
        return cls(tuple(sites), dtypes)

    def of(self, site: str, dtype: str) -> float:
        """What a tensor may be off by; NaN where nothing was said."""
        found = next((value for pattern, value in self.sites if pattern.search(site)), math.nan)
        return found if not math.isnan(found) else (self.dtypes or {}).get(dtype, math.nan)

    def column(self, rows: Rows, at: Ints, sites: list[str], dtypes: list[str]) -> Floats:
        """Of some rows, −1 for none; `sites` and `dtypes` are the words behind their codes."""
        if not self.sites and not self.dtypes:
            return np.full(len(at), np.nan)
        site, dtype = (np.append(rows.columns[name], -1)[at] for name in ("site", "dtype"))
        of_site = np.array([*(self.of(name, "") for name in sites), np.nan])[site]
        of_dtype = np.array([*((self.dtypes or {}).get(name, np.nan) for name in dtypes), np.nan])[dtype]
        return np.asarray(np.where(np.isnan(of_site), of_dtype, of_site))


def floors(rows: Rows, at: Ints, seen: tuple[Ints, Floats] | None) -> Floats:
    """For some rows of the reference (−1: none) the largest error that their tensor showed in a second recording.

    `seen` has rows of the reference's table of tensors and the error of each in that recording. NaN where it had none.
    """
    if seen is None or not len(rows):
        return np.full(len(at), np.nan)
    assert rows.run is not None, "there are rows"
    errors = np.full(len(rows.run.tensors), np.nan)
    errors[seen[0]] = seen[1]
    key = one_key([rows.columns[name] for name in SAME_TENSOR])
    _, number = np.unique(key, return_inverse=True)
    largest = np.full(int(number.max()) + 1, -np.inf)
    here = errors[rows.tensor]
    known = ~np.isnan(here)
    np.maximum.at(largest, number[known], here[known])
    found = np.where(np.isfinite(largest), largest, np.nan)[number]
    return np.append(found, np.nan)[at]


class Allowance(NamedTuple):
    """For each pair what is allowed by a tolerance, and what a second recording showed; NaN where it is not known."""

    tolerance: Floats
    floor: Floats

    def limits(self, at: Ints, rounding: Floats, drifting: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int8]]:
        """The model's two limits, or better ones, and which rule it was.

        A tensor may have been lucky in a second recording that shows noise anywhere. So none is held to less than the
        model allows, unless the whole recording is bit-identical.
        """
        tolerance, floor = self.tolerance[at], self.floor[at]
        rule = np.where(np.isnan(floor), Rule.MODEL, Rule.NOISE)
        least = drifting if np.nanmax(self.floor, initial=0.0) > 0 else rounding
        drifting = np.where(np.isnan(floor), drifting, np.maximum(least, MARGIN * floor))
        said = ~np.isnan(tolerance)
        rule = np.where(said, Rule.TOLERANCE, rule).astype(np.int8)
        return np.where(said, tolerance, rounding), np.where(said, tolerance, drifting), rule
