"""What is measured of a tensor, and how the measurements of several become one.

Every reduction is computed from it: a `Measurement` adds up over layers, over the blocks of a tensor on a device, and
over the parts of a distributed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from astray.stats.moments import Moments, merge


class Power(NamedTuple):
    """Σ(|x| / unit)ᵖ over finite elements. The unit keeps large and small powers within float64."""

    unit: float
    total: float


class Measurement(NamedTuple):
    """Moments, and a sum of powers for every p that was asked for.

    Those of complex numbers are of their magnitudes, and `magnitudes` says so.
    """

    moments: Moments
    powers: Mapping[float, Power]
    magnitudes: bool = False

    def numbers(self) -> list[float]:
        """Everything that `from_numbers` needs, to be sent to another process."""
        return [*map(float, self.moments), *(number for power in self.powers.values() for number in power)]

    def from_numbers(self, numbers: Sequence[float]) -> Measurement:
        """A measurement of the same kind as this one."""
        return self._replace(
            moments=moments_from(numbers), powers=powers_from(numbers[len(Moments._fields) :], list(self.powers))
        )


def moments_from(numbers: Sequence[float]) -> Moments:
    """Moments from their fields as floats, in order. Counts are exact up to 2⁵³."""
    counts, measures = numbers[:6], numbers[6 : len(Moments._fields) - 1]
    return Moments._make([*map(int, counts), *measures, int(numbers[len(Moments._fields) - 1])])


def powers_from(numbers: Sequence[float], exponents: Sequence[float]) -> dict[float, Power]:
    """Sums of powers from units and totals in turn."""
    return {p: Power(*pair) for p, pair in zip(exponents, zip(numbers[::2], numbers[1::2], strict=True), strict=True)}


def unite(parts: Sequence[Measurement]) -> Measurement:
    """What would be measured of all these elements together."""
    exponents = parts[0].powers if parts else ()
    return Measurement(
        merge([part.moments for part in parts]),
        {p: add_up([part.powers[p] for part in parts], p) for p in exponents},
        any(part.magnitudes for part in parts),
    )


def add_up(parts: Sequence[Power], p: float) -> Power:
    """The sum of powers of all, in the unit of the largest (for a negative power, of the smallest)."""
    some = [part for part in parts if part.total]
    if not some:
        return Power(1.0, 0.0)
    unit = max(part.unit for part in some) if p > 0 else min(part.unit for part in some)
    return Power(unit, math.fsum(part.total * (part.unit / unit) ** p for part in some))


def unit_for(found: Moments, p: float) -> float:
    """What to count magnitudes in, so that no power of them leaves the range of float64."""
    unit = found.absmax if p > 0 else found.absmin
    return unit if math.isfinite(unit) and unit > 0 else 1.0
