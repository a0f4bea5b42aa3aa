"""The largest errors that the user allows, by site or by dtype. They are final: where one is given it decides alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from astray.comparison.rows import Floats, Ints, Rows
from astray.errors import CompareError
from astray.stats import DTYPES


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
        """Raises CompareError for what is not a tolerance."""
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
        """What a tensor may be off by; NaN where no tolerance was given."""
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
