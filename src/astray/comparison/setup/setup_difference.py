"""A difference in how two runs were set up, and the raw finding that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "optimizer",
    "module",
    "argument",
    "precision",
    "data type",
    "kernel",
    "environment",
    "version",
    "device",
    "layout",
    "seed",
]
Effect = Literal["changes results", "changes rounding", "none known"]

ABSENT: Any = type("_Absent", (), {"__repr__": lambda _: "absent"})()
"""The value of what only the other run has."""


@dataclass(frozen=True)
class SetupDifference:
    """Something that was set differently in the two runs.

    rank, ranks: the first rank where it is so, and all of them.
    step: the first step in which it is so; None when it is from the start.
    subject: what was set: "optimizer AdamW, group 0", "module h.3.norm (RMSNorm)", "torch", "environment".
    site, sites: the first module, parameter or call that it is about, and all of them; empty when it is about all.
    name: what it is called: "eps", "lr", "dtype".
    reference, candidate: the two values; None for what is not set or not there.
    expected_effect: whether results change, or only their rounding, or neither as far as is known.
    epsilon: the unit roundoff of the coarser side, where the difference is one of precision: 2⁻⁸ for bfloat16.
    sentence: all of this in words.
    """

    rank: int
    step: int | None
    subject: str
    site: str
    name: str
    reference: Any
    candidate: Any
    kind: Kind
    expected_effect: Effect
    sentence: str
    epsilon: float | None = None
    sites: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """In how many places it is so."""
        return max(1, len(self.sites))

    def __str__(self) -> str:
        return self.sentence


class Finding(NamedTuple):
    """One value that differs in one place. `subject` is that of the recorded row, or "argument" or "parameter".

    `type` is the class of a module, the name of a function, or the optimizer's and its group.
    """

    subject: str
    site: str
    type: str
    name: str
    reference: Any
    candidate: Any
    step: int | None = None
