"""What made a guard trip, and the error that a program is stopped with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from astray.errors import AstrayError
from astray.process import relative_to_cwd

if TYPE_CHECKING:
    from astray.nonfinite.alarm import Alarm

What = Literal["non-finite", "spike", "condition", "exception", "signal", "rank"]


@dataclass(frozen=True)
class Trip:
    """One thing that went wrong.

    step, rank: where it was found.
    what: NaN or infinity that reached something that matters, a loss or gradient norm out of all proportion, a
        condition of yours, an exception, a signal, or another rank of the program that has tripped.
    text: the same in words; for NaN and infinity a screen of them.
    alarm: the origin of NaN or infinity.
    path: the run into which the last steps were written; None when that could not be done. In a recording that is
        guarded, the recording itself.
    is_recorded: whether it is that.
    """

    step: int
    rank: int
    what: What
    text: str
    alarm: Alarm | None = None
    path: Path | None = None
    is_recorded: bool = False

    def at(self, path: Path | None) -> Trip:
        """The same, with the last steps written there."""
        return replace(self, path=path)

    def recorded_in(self, path: Path) -> Trip:
        """The same, in a recording that has all of it."""
        return replace(self, path=path, is_recorded=True)

    @property
    def headline(self) -> str:
        """What it is about, in a line."""
        return self.text.partition("\n")[0].lstrip("✗ ")

    @property
    def look(self) -> str | None:
        """The command that shows more of it."""
        if self.path is None:
            return None
        option = "--alarms" if self.what in ("non-finite", "rank") else "--risk"
        return f"astray show {relative_to_cwd(self.path)} {option}"

    def __str__(self) -> str:
        if self.path is None:
            return self.text
        what = "All of it is" if self.is_recorded else "The last steps are"
        return f"{self.text}\n\n{what} in {relative_to_cwd(self.path)}: {self.look}"


class Tripped(AstrayError):  # noqa: N818 - reads as the fact it states
    """A guard has found something wrong. `trip` has what."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(str(trip))
        self.trip = trip
