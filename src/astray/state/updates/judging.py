"""The measures of one parameter's update → a row with a verdict, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from astray.state.updates.table import Update, Verdict


def judged(known: Mapping[str, Any], why: str | None, numbers: Mapping[str, float] | None) -> Update:
    """The row of one parameter: what is known of it, why it was not checked (or not due to move), and its measures."""
    if numbers is None:
        return Update(**known, verdict="unchecked", why=why or "")
    made, due, weight = (math.sqrt(numbers[name]) for name in ("made", "due", "weight"))
    count, lr = math.prod(known["shape"]), known["lr"]
    factor = numbers["both"] / numbers["due"] if numbers["due"] else math.nan
    verdict, said = _verdict(numbers, factor, why, count)
    return Update(
        **known,
        verdict=verdict,
        why=said,
        made=made,
        due=due,
        factor=factor,
        error=math.sqrt(numbers["error"]) / due if due else math.nan,
        beyond=int(numbers["beyond"]),
        lost=numbers["lost"] / count if count else 0.0,
        ratio=made / weight if weight else math.nan,
        effective=made / math.sqrt(count) / abs(lr) if count and lr else math.nan,
    )


def _verdict(numbers: Mapping[str, float], factor: float, why: str | None, count: int) -> tuple[Verdict, str]:
    beyond, states = int(numbers["beyond"]), int(numbers["states"])
    if why is not None:
        return ("moved without gradient", f"{why}, yet {beyond} of {count} elements moved") if beyond else ("idle", why)
    if beyond and not numbers["moved"]:
        return "not updated", "no element has moved"
    if beyond and not math.isfinite(numbers["made"]):
        return "wrong", "elements have become NaN or infinite"
    if beyond:
        unexplained = numbers["error"] - (factor - 1) ** 2 * numbers["due"]  # of the error, by a factor alone
        if unexplained > 1e-4 * numbers["error"]:
            return "wrong", f"{beyond} of {count} elements are further off than rounding"
        return "wrong", f"{factor:.6g} times what is due"
    if states:
        return "wrong state", f"{states} elements of its states do not follow from the gradient"
    return "right", ""
