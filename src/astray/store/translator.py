"""What writes the rows of a recording as another tool's files: while a program runs, and when a run is converted.

Each foreign format has one. `foreign/live_writer.py` feeds it from a running program, `convert.py` from a run on
disk; both hand over the same rows in the same order, so a format is written in one place.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

from astray.records import Missed
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo


class Translator(Protocol):
    """Writes one rank. Its methods are called by one thread, which may not be the program's."""

    lost: Counter[str]
    """What the format cannot hold, in a few words, and how often it was met: "std of a tensor", "a micro step"."""

    def take(self, step: int, rows: RankRun) -> None:
        """Some more rows of a step, in their order.

        A step may come in several pieces, and so may the tensors of a call; a tensor's call is in the same piece or in
        an earlier one. Values can be had only now: `rows.values(row)`.
        """

    def sync(self) -> None:
        """Make the files say all that was taken, so that any reader may open them and a kill loses nothing of it.

        Called now and then in the middle of a step, and when somebody waits for it. Cheap where nothing new came.
        """

    def step_over(self, step: int) -> None:
        """Nothing more of this step will come."""

    def close(self, end: End) -> None:
        """Nothing more will come."""


class MakesTranslator(Protocol):
    """Makes the translator of a rank. Raises RunError or RunExists where it cannot write there."""

    def __call__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> Translator: ...


def losses(lost: Counter[str], format: str) -> list[Missed]:
    """What a format could not hold, as a run tells it."""
    return [Missed(what, f"{format} has no place for it", count) for what, count in sorted(lost.items())]
