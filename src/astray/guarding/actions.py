"""What happens when a guard trips: the program is stopped or warned, or a function of the user's is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from astray.guarding.trip import Trip, Tripped
from astray.interrupts import pass_interrupt
from astray.log import logger

On = Literal["raise", "warn"] | Callable[[Trip], object]


class TripActions:
    """Acts on trips, as `on` says.

    save: makes sure that what a trip is about can be read, and gives the trip with its path.
    """

    def __init__(self, on: On, save: Callable[[Trip], Trip]) -> None:
        self.trips: list[Trip] = []
        self.raises = on == "raise"
        self._on = on
        self._save = save
        self._raised = False

    def act(self, trips: Sequence[Trip]) -> None:
        """Reports trips. The program is stopped once; if it goes on all the same, it is warned from then on."""
        noted = [self.note(trip) for trip in trips]
        stops = bool(noted) and self.raises and not self._raised
        for trip in noted[stops:]:
            self.tell(trip)
        if stops:
            self._raised = True
            raise Tripped(noted[0])

    def note(self, trip: Trip) -> Trip:
        """Saves what it is about, and remembers it."""
        trip = self._save(trip)
        self.trips.append(trip)
        return trip

    def tell(self, trip: Trip, going_down: bool = False) -> None:
        """Reports a trip without stopping the program, which may be `going_down` already."""
        if not callable(self._on):
            logger.warning("%s", trip)
            return
        try:
            self._on(trip)
        except Exception as error:
            if not going_down:
                raise
            pass_interrupt(error)
            logger.warning("%s", f"{type(error).__name__} in the function that was to be told: {error}")
