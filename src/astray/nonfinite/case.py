"""What is known of an origin when its kind is asked for, and how its numbers are put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from astray.nonfinite.alarm import Seen
from astray.nonfinite.flow import EventKind
from astray.safe_text import read_plain
from astray.stats import dtypes


@dataclass(frozen=True)
class Case:
    """An origin. `forward` are the tensors of the forward call, where it is a backward one.

    flushed: a sentence about the call that rounded an input to zero, where one did. weight: the name of a bad weight.
    before: of a gradient that was the first bad one, the parameter whose gradient came before.
    """

    event: EventKind
    function: str
    phase: str
    given: Sequence[Seen]
    made: Sequence[Seen]
    forward: Sequence[Seen] = ()
    args: str | None = None
    flushed: str = ""
    weight: str = ""
    before: str = ""

    @property
    def inputs(self) -> list[Seen]:
        """The floating point inputs; in backward those of the forward call, where the derivative is taken."""
        source = self.forward if self.forward else self.given
        return [one for one in source if one.role != "output" and is_float(one)]

    @property
    def result(self) -> Seen:
        """The first tensor that it spoilt."""
        return self.made[0]

    @property
    def limit(self) -> float:
        """The largest number of the result's dtype; of one that is not known, that of float64."""
        return dtypes.DTYPES.get(self.result.dtype, dtypes.DTYPES["float64"]).max

    def input(self, path: str) -> Seen | None:
        """The input at a place of the arguments."""
        return next((one for one in self.inputs if one.path == path), None)

    def constant(self, place: int) -> float | None:
        """An argument that is a plain number."""
        given = arguments(self.args)
        found = given[place] if place < len(given) else None
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def arguments(args: str | None) -> list[Any]:
    """The positional arguments of a call as they were recorded; tensors are `<tensor>`."""
    try:
        found = read_plain(args or "{}").get("args", [])
    except (ValueError, AttributeError):  # what another version of the recorder wrote
        return []
    return found if isinstance(found, list) else []


def is_float(one: Seen) -> bool:
    """Whether a tensor can hold infinities at all."""
    return one.dtype in dtypes.DTYPES and dtypes.find(one.dtype).kind in ("float", "complex")


def counts(one: Seen) -> str:
    """How many elements are no numbers: "3 NaN and 1 Inf among 64 elements"."""
    statistics = one.statistics
    found = [f"{count:,} {name}" for count, name in ((statistics.nan, "NaN"), (statistics.inf, "Inf")) if count]
    return f"{' and '.join(found)} among {statistics.count:,} elements"


def zeros(one: Seen, name: str = "") -> str:
    """How many elements are zero."""
    return f"{one.statistics.zeros:,} of {one.statistics.count:,} elements of {name or one.name} are zero"


def reach(one: Seen) -> str:
    """From where to where the finite elements go."""
    low, high = one.statistics.min, one.statistics.max
    return "has no finite element" if low is None or high is None else f"from {low:.4g} to {high:.4g}"
