"""What a recorded step takes on the disk, and how many more fit: said once, when the first one is over.

Keeping all values fills a disk within minutes, and else shows only when it is full. Bytes of values are known exactly,
those of rows are estimated.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from astray.wording import sized

ROW_BYTES = 300
"""A row of `tensors` with its share of `calls`, as measured on a model of 20 layers."""

FEW = 20
"""With room for fewer steps than this, the sentence says what to do about it."""


class Taken(NamedTuple):
    """What was recorded so far: bytes of values, and rows."""

    values: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.values + ROW_BYTES * self.rows


class Forecast(NamedTuple):
    """How many more steps like the first one fit, and that in a sentence."""

    steps: int
    sentence: str

    @property
    def is_tight(self) -> bool:
        return self.steps < FEW


def forecast(step: Taken, folder: Path, max_bytes: int | None, ranks: int) -> Forecast:
    """What is to come of a step that took this much, on each of so many ranks. Raises OSError of the disk."""
    free = shutil.disk_usage(folder).free
    more, room = free // max(step.nbytes * ranks, 1), f"the {sized(free)} that are free at {folder}"
    if max_bytes is not None and max_bytes // max(step.values, 1) - 1 < more:
        more, room = max(max_bytes // max(step.values, 1) - 1, 0), f"max_bytes={max_bytes:,}"
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    fit = f"{more:,} more {'fits' if more == 1 else 'fit'} into {room}" if more else f"no more fits into {room}"
    advice = " Record fewer steps or sites, a slice or a sample (`astray help recording`)." if more < FEW else ""
    return Forecast(more, f"a step takes {sized(step.nbytes)} on the disk{each}; {fit}.{advice}")
