"""What is said of one place of a `Risk`: its head-room, its shares, the cause of its level, and other dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from astray.headroom.dtype_limits import Limits, limits
from astray.headroom.levels import HALF

Row = dict[str, Any]

_TOLD = 1e-3
"""A smaller share that would be lost is not worth a word."""


def headroom(row: Row) -> str:
    """How many times as large the numbers could be: `1.3×`, or `2^43` where nobody counts."""
    return "–" if math.isnan(row["headroom"]) else factor(row["headroom"])


def factor(value: float) -> str:
    """A factor as it is read best: two digits, or the power of two below it.

    >>> factor(1.31), factor(172.0), factor(100_000.0)
    ('1.3×', '172×', '2^16')
    """
    if value >= 1000:
        return power(value)
    return f"{value:.2g}×" if value < 100 else f"{value:.0f}×"


def power(value: float) -> str:
    """The power of two at or below a number: `2^-3`."""
    return f"2^{math.frexp(value)[1] - 1}"


def share(least: float, most: float, normal: float) -> str:
    """A share of which a lower and an upper bound are known, and an estimate: the most that can be said of it.

    >>> share(0.25, 0.25, 0.0), share(0.125, 0.5, 0.3), share(0.0, 0.9, 0.02), share(0.0, 0.9, 1e-9), share(0, 0, 0)
    ('25 %', '≥ 12 %', '~2 %', '~0', '0')
    """
    if math.isnan(least):
        return "–"
    if least == most:
        return percent(least)
    if least >= _TOLD:
        return f"≥ {percent(least, down=True)}"
    return f"~{percent(normal)}" if normal >= 1e-4 else "~0"


def percent(value: float, down: bool = False) -> str:
    """A share in percent, two digits; never `100 %` of what is not everything, nor more than there is where it bounds.

    >>> percent(0.5), percent(0.031), percent(0.9999), percent(1.0), percent(0.9578, down=True), percent(0.00012)
    ('50 %', '3.1 %', '99.9 %', '100 %', '95 %', '0.012 %')
    """
    if value in (0, 1):
        return f"{value * 100:.0f} %" if value else "0"
    if value >= 0.99:
        return f"{math.floor(value * 1000) / 10:.1f} %"
    if down:
        digits = 1 - math.floor(math.log10(value * 100))
        value = math.floor(value * 100 * 10**digits) / 10**digits / 100
    return f"{value * 100:.2g} %"


def why(row: Row) -> str:
    """The cause of a place's level, in words; nothing where it is calm."""
    said = _CAUSES.get(row["cause"])
    return said(row) if said else ""


def _nonfinite(row: Row) -> str:
    counts = [f"{row[name]:,} {word}" for name, word in (("nan", "NaN"), ("inf", "Inf")) if row[name]]
    often = row["observations"]
    return ", ".join(counts) + (f" (in {row['nonfinite']:,} of {often:,} rows)" if often > 1 else "")


def _headroom(row: Row) -> str:
    return f"the dtype ends at {row['largest']:.5g}"


def _growth(row: Row) -> str:
    rate = f"+{row['growth_bits']:.1g} bits/step"
    soonest, latest = (_about(row[name]) for name in ("gone_soonest", "gone_latest"))
    if not latest:
        return f"{rate}: {soonest} or more steps left"
    return f"{rate}: ~{soonest}" + (f"–{latest}" if latest != soonest else "") + " steps left"


def _about(steps: float) -> str:
    """A number of steps that is an extrapolation: one digit, or two below twenty."""
    if math.isnan(steps):
        return ""
    if steps < 20:
        return f"{max(1, round(steps))}"
    unit = 10 ** math.floor(math.log10(steps))
    return f"{round(steps / unit) * unit:,}"


def _limit(row: Row) -> str:
    known = limits(row["dtype"])
    return "fills its dtype: scaled or clipped?" if known and known.coarse else "exactly the limit: mask or clip?"


def _unmoved(row: Row) -> str:
    if math.isnan(row["update_ratio"]):
        return f"no bit changed in {row['still_steps']:,} of {row['watched_steps']:,} steps"
    least = row["unmoved_with_gradient"]
    return "no element moves" if row["unmoved"] == 1 else f"≥ {percent(least, down=True)} of it does not move"


def _subnormal(row: Row) -> str:
    known = limits(row["dtype"])
    ends = f"{known.tiny:.1e}" if known else "the smallest normal number"
    told = share(row["subnormal_least"], row["subnormal_most"], 0.0)
    return f"{told} below {ends} in step {row['subnormal_step']}"


_CAUSES: dict[str, Callable[[Row], str]] = {
    "non-finite": _nonfinite,
    "head-room": _headroom,
    "growth": _growth,
    "limit": _limit,
    "unmoved": _unmoved,
    "subnormal": _subnormal,
    "zeros": lambda _: "nothing but zeros: vanished?",
}


def imagined(row: Row, target: Limits) -> str:
    """What would become of a place in another dtype, with the scale that helps behind it, and of the weights' updates.

    `overflows 3.2× (fits ×2^-2)`, `≥ 93 % lost (~2 % lost ×2^14)`, `fits; ~90 % stuck`
    """
    at = target.name
    over = f"overflows {factor(2.0 ** -row[f'headroom_bits_{at}'])}" if row[f"overflows_{at}"] else ""
    told = over or _lost(row, "flushed", at) or "fits"
    scale, stuck = row[f"scale_{at}"], row[f"unmoved_estimate_{at}"]
    if told != "fits" and not math.isnan(scale) and scale != 1:
        told += f" ({_lost(row, 'scaled_flushed', at) or 'fits'} ×{power(scale)})"
    if not math.isnan(stuck) and stuck >= HALF:
        told += f"; {share(row[f'unmoved_least_{at}'], 1.0, stuck)} stuck"
    return told


def _lost(row: Row, name: str, at: str) -> str:
    least, most, normal = (row[f"{name}_{kind}_{at}"] for kind in ("least", "most", "normal"))
    return f"{share(least, most, normal)} lost" if max(least, normal) >= _TOLD else ""
