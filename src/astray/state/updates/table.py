"""The update of each parameter in each step, with a verdict by its optimizer's rule, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from astray.formatting.figures import counted, dtype, error, shape
from astray.formatting.page import TextTable

UpdateVerdict = Literal["right", "wrong", "not updated", "wrong state", "moved without gradient", "idle", "unchecked"]

WRONG = frozenset({"wrong", "not updated", "wrong state", "moved without gradient"})
_ORDER = ["not updated", "wrong", "moved without gradient", "wrong state", "unchecked", "right", "idle"]
_GRID = TextTable(
    words=["parameter", "verdict", "why"],
    droppable=["dtype", "shape", "ratio"],
    min_widths={"parameter": 16, "why": 24},
)
MOST_SHOWN = 20


@dataclass(frozen=True)
class Update:
    """One parameter in one step."""

    step: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: str
    lr: float
    verdict: UpdateVerdict
    why: str
    """In words; empty where all is right."""
    made: float = math.nan
    """The L2 norm of the update that was made."""
    due: float = math.nan
    """The L2 norm of the update recomputed in float64."""
    factor: float = math.nan
    """The number by which the update due best fits the one made."""
    error: float = math.nan
    """The L2 norm of their difference, relative to the update due."""
    beyond: int = 0
    """Elements that are further off than rounding explains."""
    lost: float = 0.0
    """The share of the elements that should have moved and did not, since the update was below half a spacing."""
    ratio: float = math.nan
    """The update made, relative to the weight."""
    effective: float = math.nan
    """How far an element has moved on average (root mean square), in units of the learning rate."""

    @property
    def is_wrong(self) -> bool:
        return self.verdict in WRONG


class Updates(Sequence[Update]):
    """The updates of the steps that were checked, the wrong ones first."""

    def __init__(self, rows: Sequence[Update]) -> None:
        self._rows = sorted(rows, key=lambda row: (_ORDER.index(row.verdict), row.step, -row.lost))

    @property
    def wrong(self) -> list[Update]:
        """The rows that were not updated as their optimizer says."""
        return [row for row in self if row.is_wrong]

    @overload
    def __getitem__(self, index: int) -> Update: ...
    @overload
    def __getitem__(self, index: slice) -> list[Update]: ...
    def __getitem__(self, index: int | slice) -> Update | list[Update]:
        return self._rows[index]

    def __iter__(self) -> Iterator[Update]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Updates: {self._headline()}>"

    def text(self, width: int = 120, most: int = MOST_SHOWN) -> str:
        """The table, of at most so many rows."""
        if not self:
            return "No update was seen: no optimizer has stepped while it was watched."
        shown = self._rows[:most]
        lines = [self._headline(), "", *_GRID.lines([_cells(row) for row in shown], width)]
        if len(self) > most:
            lines.append(f"… and {len(self) - most} more")
        return "\n".join(lines)

    def _headline(self) -> str:
        steps = len({row.step for row in self})
        checked = sum(row.verdict not in ("unchecked", "idle") for row in self)
        result = (
            f"{len(self.wrong)} of {counted(checked, 'update')} wrong" if self.wrong else f"{checked} updates as due"
        )
        unchecked = sum(row.verdict == "unchecked" for row in self)
        headline = f"{result} in {counted(steps, 'step')}" + (f", {unchecked} not checked" if unchecked else "")
        lost = max(row.lost for row in self)
        return headline + (f"; up to {lost:.0%} of a parameter's elements too fine to move" if lost >= 0.01 else "")


def _cells(row: Update) -> dict[str, str]:
    return {
        "step": str(row.step),
        "parameter": row.name,
        "dtype": dtype(row.dtype),
        "shape": shape(row.shape),
        "verdict": row.verdict,
        "made": _number(row.made),
        "due": _number(row.due),
        "error": _number(row.error),
        "lost": f"{row.lost:.1%}" if row.lost else "",
        "ratio": _number(row.ratio),
        "steps of lr": _number(row.effective),
        "why": row.why,
    }


def _number(value: float) -> str:
    return "" if math.isnan(value) else error(value)


def judged(facts: Mapping[str, Any], why: str | None, numbers: Mapping[str, float] | None) -> Update:
    """The row of one parameter, from its facts, why it was not checked (or not due to move), and its measures."""
    if numbers is None:
        return Update(**facts, verdict="unchecked", why=why or "")
    made, due, weight = (math.sqrt(numbers[name]) for name in ("made", "due", "weight"))
    count, lr = math.prod(facts["shape"]), facts["lr"]
    factor = numbers["both"] / numbers["due"] if numbers["due"] else math.nan
    verdict, reason = _verdict(numbers, factor, why, count)
    return Update(
        **facts,
        verdict=verdict,
        why=reason,
        made=made,
        due=due,
        factor=factor,
        error=math.sqrt(numbers["error"]) / due if due else math.nan,
        beyond=int(numbers["beyond"]),
        lost=numbers["lost"] / count if count else 0.0,
        ratio=made / weight if weight else math.nan,
        effective=made / math.sqrt(count) / abs(lr) if count and lr else math.nan,
    )


def _verdict(numbers: Mapping[str, float], factor: float, why: str | None, count: int) -> tuple[UpdateVerdict, str]:
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
