"""Says on stderr what a guard has found in a script, as it is found: for `astray check` and `astray run --guard`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from astray.formatting.terminal import tell

if TYPE_CHECKING:
    from astray.guarding.trip import Trip

_SETTING = re.compile(r"\b(level|keep)='(\w+)'")


class Found:
    """Given each trip. Stops the script at the first, as long as it `may_stop` it."""

    def __init__(self, may_stop: bool) -> None:
        self.may_stop = may_stop
        self._told: list[Trip] = []

    def __call__(self, trip: Trip) -> None:
        """Says it at once, as the script may take its time to end."""
        from astray.guarding.trip import Tripped

        self._told.append(trip)
        if self.may_stop and trip.what != "signal":  # which ends it anyway
            self.may_stop = False  # a script that catches it goes on
            tell(f"{in_options(trip.text)}\n")  # where to look closer is said at the end
            raise Tripped(trip)
        tell(f"{in_options(str(trip))}\n")

    def tell_rest(self, trips: Iterable[Trip]) -> None:
        """Says what has not been said, since the script was stopped before."""
        for trip in trips:
            if trip not in self._told:
                self._told.append(trip)
                tell(f"{in_options(trip.text)}\n")


def look_closer(trips: Iterable[Trip]) -> str:
    """The command that shows more, to be put behind a line; empty when there is nothing to be shown."""
    return next((f" Look closer: {trip.look}" for trip in trips if trip.look is not None), "")


def in_options(text: str) -> str:
    """A text that advises a setting of a recording, for somebody who gives it as an option.

    >>> in_options("Record the same step with level='function' to see which line.")
    'Record the same step with --level function to see which line.'
    """
    return _SETTING.sub(r"--\1 \2", text)
