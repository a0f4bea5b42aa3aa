"""The guard as the user holds it: records into memory, looks at each step, and acts when something is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from astray.capture.adapters import Adapter, adapter_for
from astray.capture.engine import logger
from astray.capture.ranks import rank_and_world_size
from astray.capture.recorder import Recorder
from astray.errors import RecordError
from astray.guard.ends import OnTermination
from astray.guard.exact import ExactRecorder, Stop
from astray.guard.lookout import Condition, Lookout
from astray.guard.places import Places
from astray.guard.trip import Trip, Tripped
from astray.store import FlightRecorder, Intake
from astray.wording import counted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from astray.capture.settings import Given

On = Literal["raise", "warn"] | Callable[[Trip], object]

REMEMBER = 5
MOST_RUNS = 5
"""So many times at most the last steps are written, by a guard that lets the program go on."""
PATIENCE = 60.0  # seconds that a step is waited for


class Guard:
    """Watches a program for NaN and infinity, and names the call they come from.

    >>> with astray.guard(model):
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()

    A step ends with the step of the first optimizer, or where `step()` is called, from its first call on.

    model: a module, or a dict of modules whose names come in front of their sites.
    on: what to do when something is wrong: "raise" `Tripped` at the end of the step, "warn" through the logger
        "astray", or a function that is given the `Trip`.
    exact: stop at the very call, and keep the tensors. Slow, for looking closer.
    remember: how many steps are kept in memory, and written as a run when something is wrong.
    path: the folder for such runs; by default one of its own in `astray-guard`.
    spike: trip also when the loss, or the norm of all gradients, is so many times what it usually is.
    when: trip also when this function, given the rows of a step as a rank of a run, gives a text.
    max_memory: the bytes that the steps in memory may take.

    The other settings are those of `Recorder`, which lists them: level, match, keep and so on.
    """

    def __init__(
        self,
        model: Any,
        *,
        on: On = "raise",
        exact: bool = False,
        remember: int = REMEMBER,
        path: str | os.PathLike[str] | None = None,
        spike: float | None = None,
        when: Condition | None = None,
        max_memory: int = 512 << 20,
        **settings: Unpack[Given],
    ) -> None:
        if on not in ("raise", "warn") and not callable(on):
            raise RecordError(f"on={on!r} is nothing a guard can do. It is 'raise', 'warn', or a function.")
        if remember < 1:
            raise RecordError(f"remember={remember!r} is too little. The step that goes wrong is one.")
        if exact and settings.get("keep") is None:
            settings["keep"] = ["stats", "tensors"]
        self._on = on
        self._exact = exact
        self._remember = remember
        self._max_memory = max_memory
        self._adapter = model if isinstance(model, _Adapter) else _Adapter(adapter_for(model, paced=True))
        self.rank, world_size = self._adapter.it.rank_and_world_size() or rank_and_world_size(os.environ)
        self._places = Places(path, self.rank, world_size)
        self._lookout = Lookout(self.rank, spike, when)
        self._recording = _Recording.discovering(self._places.folder, self._adapter.it, writer=self._open, **settings)
        self._recording.after_step = self._after_step
        self._writer: FlightRecorder | None = None
        self._termination: OnTermination | None = None
        self._runs = 0
        self._raised = False
        self.trips: list[Trip] = []
        """What has gone wrong so far."""

    @classmethod
    def of_program(cls, adapter: Adapter, **named: Any) -> Guard:
        """A guard of a program whose models the adapter finds by itself."""
        return cls(_Adapter(adapter), **named)

    def start(self) -> Guard:
        """Puts the hooks in place."""
        self._recording.start()
        self._termination = OnTermination(self._terminated)
        return self

    def step(self) -> None:
        """Ends a step. From the first call on, steps end here alone."""
        self._adapter.it.let_program_pace()
        self._recording.step()

    def stop(self) -> None:
        """Removes every hook, and acts on what the last step shows. Stopping twice does no harm."""
        self._end("normally")
        self._act(self._lookout.take())

    @property
    def summary(self) -> str:
        """What was seen, in one line."""
        counts, found = self._lookout.counts, counted(len(self.trips), "alarm")
        parts = [found if self.trips else "no alarm"]
        if counts.skipped:
            parts.append(f"{counted(counts.skipped, 'update')} skipped by a GradScaler")
        if counts.harmless:
            parts.append(f"{counted(counts.harmless, 'call')} made NaN or infinity that reached nothing")
        if counts.repeated:
            parts.append(f"{counted(counts.repeated, 'repetition')} of an alarm")
        return ", ".join(parts)

    def __enter__(self) -> Guard:
        return self if self._writer is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.stop()
            return
        self._lookout.stopped = kind is Stop
        self._end(f"{kind.__name__}: {error}")
        trips = self._lookout.take()
        if kind is Stop:
            raise Tripped(self._note(trips[0] if trips else self._unexplained())) from None
        if kind is not Tripped and not trips:
            text = f"✗ {kind.__name__} in step {self._step}: {error}"
            trips = [Trip(self._step, self.rank, "exception", text)]
        for trip in trips:  # the program is going down as it is
            logger.warning("%s", self._note(trip))

    # -- what happens ------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._recording.count

    def _open(self, path: Path, rank: int, **named: Any) -> Intake:
        kind = ExactRecorder if self._exact else FlightRecorder
        self._writer = kind(
            path, rank, remember=self._remember, most_bytes=self._max_memory, on_step=self._lookout.look, **named
        )
        return self._writer

    def _after_step(self) -> None:
        """Acts on what has been seen: of the step that is over, or of those before where a device still works on it."""
        writer = self._writer
        if writer is None:
            return
        writer.wait_until_seen(self._step - (2 if writer.is_late else 1), PATIENCE)
        trips = self._lookout.take()
        for run in self._places.of_others():
            self._dump(run, "another rank has tripped")
            text = f"✗ Another rank has tripped: astray show {run} --alarms"
            trips.append(Trip(self._step - 1, self.rank, "rank", text).at(run))
        self._act(trips)

    def _act(self, trips: list[Trip]) -> None:
        for trip in trips:
            noted = self._note(trip)
            if self._on == "raise" and not self._raised:
                self._raised = True
                raise Tripped(noted)
            if callable(self._on):
                self._on(noted)
            else:
                logger.warning("%s", noted)

    def _note(self, trip: Trip) -> Trip:
        """Writes the last steps, unless that has happened often enough, and remembers the trip."""
        if trip.path is None and self._runs < MOST_RUNS:
            trip = trip.at(self._dump(self._places.run(trip.step, trip.what), _first_line(trip.text)))
        self.trips.append(trip)
        return trip

    def _dump(self, run: Path, why: str) -> Path | None:
        self._runs += 1
        if self._writer is None:
            return None
        dump = self._writer.dump(run, why)
        if dump.failure is not None:
            logger.warning("%s", dump.failure)
            return None
        return run

    def _terminated(self) -> None:
        trip = Trip(self._step, self.rank, "signal", f"✗ SIGTERM in step {self._step}")
        logger.warning("%s", self._note(trip))

    def _unexplained(self) -> Trip:
        return Trip(self._step, self.rank, "non-finite", "✗ A call has made NaN or infinity.")

    def _end(self, ended: str) -> None:
        if self._termination is not None:
            self._termination.remove()
        self._recording.stop(ended)


class _Recording(Recorder):
    """A recorder that says when a step is over."""

    after_step: Callable[[], None]
    count = 0

    def step(self) -> None:
        super().step()
        self.count += 1
        self.after_step()


class _Adapter:
    """An adapter in place of a model."""

    def __init__(self, it: Adapter) -> None:
        self.it = it


def _first_line(text: str) -> str:
    return text.partition("\n")[0].lstrip("✗ ")
