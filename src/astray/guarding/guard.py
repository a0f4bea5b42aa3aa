"""The guard as the user holds it: records into memory, looks at each step, and acts when something is wrong.

`GuardRecorder` calls it at the end of each step, `StepMonitor` has queued what is wrong with the step, `TripActions`
raises, warns or calls the user's function. Exceptions and SIGTERM (`TerminationHandler`) that end the program make it
trip, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import Adapter, adapter_for
from astray.capture.recorder import BaseRecorder
from astray.guarding.exact import ExactFlightRecorder, ExactStop
from astray.guarding.options import Condition, Gradients, check_guard, check_has_statistics
from astray.guarding.step_monitor import STEP_TIMEOUT, StepMonitor
from astray.guarding.trip import On, SnapshotFolder, SnapshotWriter, Trip, TripActions, Tripped
from astray.log import logger
from astray.process import rank_and_world_size
from astray.records import ANY_CALL, STOPPED_BY_GUARD
from astray.store import BackgroundWriter, FlightRecorder
from astray.wording import counted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from astray.capture.settings import RecordingOptions

REMEMBER = 5
CALL_GRADIENTS = "the gradients that pass through calls"
"""What a guard leaves out while nothing is wrong, as the run's list of missed things names it."""


class Guard:
    """Watches a program for NaN and infinity, and names the call they come from.

    >>> with astray.guard(model):
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()

    A step ends with the step of the first optimizer, or where `step()` is called, from its first call on. An exception
    or SIGTERM that ends the program makes it trip, too.

    model: a module, or a dict of modules whose names come in front of their sites.
    on: what to do when something is wrong: "raise" `Tripped` at the end of the step, "warn" through the logger
        "astray", or a function that is given the `Trip`; what it raises ends the program.
    gradients: which are read while nothing is wrong: those of "parameters", or "all", those of every call too. By
        default those of parameters, where modules alone are watched: NaN that is born in the backward pass is then
        bounded in the step where it shows, and those of all calls are read in the steps after it.
    exact: stop at the very call, and keep the tensors. Slow, for looking closer. An infinity that a call makes of
        finite numbers stops it too, also where it is meant as a mask: `log(0)`, say.
    remember: how many steps are kept in memory, and written as a run when something is wrong.
    path: the folder for such runs; by default one of its own in `astray-guard`.
    spike: trip also when the norm of all gradients, a loss that an outermost module returns, or one passed to `loss`,
        is so many times what it usually is.
    when: trip also when this function, given the rows of a step as a rank of a run, returns a text.
    max_memory: the bytes that the steps in memory may take, such as "1 GiB".

    The other settings are those of `Recorder`, which lists them: level, match, keep and so on.
    """

    def __init__(
        self,
        model: Any,
        *,
        on: On = "raise",
        gradients: Gradients | None = None,
        exact: bool = False,
        remember: int = REMEMBER,
        path: str | os.PathLike[str] | None = None,
        spike: float | None = None,
        when: Condition | None = None,
        max_memory: int | str = 512 << 20,
        **settings: Unpack[RecordingOptions],
    ) -> None:
        remember, max_memory = check_guard(on, gradients, exact, remember, spike, when, max_memory)
        if exact and settings.get("keep") is None:
            settings["keep"] = ["stats", "tensors"]
        self._exact = exact
        self._remember = remember
        self._max_memory = max_memory
        self._adapter = model.adapter if isinstance(model, ChosenAdapter) else adapter_for(model, detects_steps=True)
        self.rank, world_size = self._adapter.rank_and_world_size() or rank_and_world_size(os.environ)
        if world_size > 1 and settings.get("optimizer") is None:
            settings["optimizer"] = "gradient"  # summed over ranks: shows first what another rank has made
        snapshots = SnapshotFolder(path, self.rank, world_size)
        self._snapshots = SnapshotWriter(snapshots)
        self._actions = TripActions(on, self._snapshots.write)
        self._monitor = StepMonitor(self.rank, spike, when, may_read_more=on != "raise")
        self._recorder = GuardRecorder.discovering(snapshots.folder, self._adapter, writer=self._open, **settings)
        check_has_statistics(self._recorder.settings)
        # A condition is given all rows, and a level of functions or ops is set to find the line.
        needs_all = exact or when is not None or self._recorder.settings.level != ("module",)
        self._gradients: Gradients = gradients or ("all" if needs_all else "parameters")
        self._recorder.after_step = self._after_step
        self._writer: FlightRecorder | None = None
        self._termination: TerminationHandler | None = None
        self._steps_end_by_call = False
        self._was_terminated = False  # by SIGTERM; an exception after it is how the program goes down

    @classmethod
    def of_program(cls, adapter: Adapter, **named: Any) -> Guard:
        """A guard of a program whose models the adapter finds by itself."""
        return cls(ChosenAdapter(adapter), **named)

    def start(self) -> Guard:
        """Puts the hooks in place."""
        self._recorder.start()
        self._choose_gradients()
        self._termination = TerminationHandler(self._terminated)
        return self

    @property
    def is_untouched(self) -> bool:
        """Whether no module has been called since it was started."""
        return self._recorder.is_untouched

    def module_called(self, module: Any, args: Any, frame: FrameType) -> None:
        """It was started during this call of a module, which is watched too."""
        self._recorder.module_called(module, args, frame)

    def step(self) -> None:
        """Ends a step. From the first call on, steps end here alone."""
        is_first, self._steps_end_by_call = not self._steps_end_by_call, True
        self._adapter.let_program_end_steps()
        if not (is_first and self._recorder.has_just_ended):  # by an optimizer, a moment ago
            self._recorder.step()

    def loss(self, value: Any) -> None:
        """Passes on the loss of this step, where no module returns it: a number, or a tensor of one element.

        Call it before the step ends. With `spike` it is followed; without, it trips when it is not finite and nothing
        that was recorded shows why.
        """
        self._monitor.add_loss(float(value), self._step)

    def stop(self) -> None:
        """Removes every hook, and acts on what the last step shows. Stopping twice does no harm."""
        was_stopped = self._is_stopped and not self.trips
        self._end("normally")
        trips = self._monitor.take()
        self._actions.act(trips or ([self._unexplained()] if was_stopped else []))

    def stop_after(self, error: BaseException) -> list[Trip]:
        """Removes every hook from a program that an exception has ended, and writes the last steps.

        Returns what is wrong: what the unfinished step shows, else the exception itself.
        """
        self._monitor.stopped = self._is_stopped
        self._end(STOPPED_BY_GUARD if self._is_stopped else f"{type(error).__name__}: {error}")
        trips = self._monitor.take()
        if self._is_stopped and not self.trips:
            trips = trips or [self._unexplained()]
        elif not trips and not isinstance(error, Tripped) and not _is_clean_exit(error) and not self._was_terminated:
            text = f"✗ {type(error).__name__} in step {self._step}: {error}"
            trips = [Trip(self._step, self.rank, "exception", text)]
        return [self._actions.save(trip) for trip in trips]

    @property
    def trips(self) -> list[Trip]:
        """What has gone wrong so far."""
        return self._actions.trips

    @property
    def steps(self) -> int:
        """How many steps were looked at. What a program still does after the last one does not count."""
        counts = self._monitor.counts
        has_rest = counts.last >= self._step and all(trip.step != counts.last for trip in self.trips)
        return counts.steps - (has_rest and counts.steps > 1)

    @property
    def unwatched(self) -> str | None:
        """Why nothing was looked at; None when something was."""
        if self._monitor.counts.steps:
            return None
        if self._writer is None:
            return f"ranks={self._recorder.settings.ranks} leaves this one out"
        missed = self._writer.end.missed if self._writer.end is not None else []
        return next((each.why for each in missed if each.what == ANY_CALL), "no call was recorded")

    @property
    def summary(self) -> str:
        """What was seen, in one line."""
        if self.unwatched is not None and not self.trips:
            return f"nothing was watched: {self.unwatched}"
        alarms = sum(trip.what in ("non-finite", "spike", "condition") for trip in self.trips)
        found = f"{counted(alarms, 'alarm') if alarms else 'no alarm'} in {counted(self.steps, 'step')}"
        return ", ".join([found, *self._monitor.counts.phrases()]) + self._not_watched()

    def _not_watched(self) -> str:
        """What was left out, to be appended to the summary; empty when nothing was."""
        missed = self._writer.end.missed if self._writer is not None and self._writer.end is not None else []
        missed = [each for each in missed if each.what != CALL_GRADIENTS]  # not a failure, but what was set
        if not missed:
            return ""
        more = f", and {len(missed) - 1} more" if len(missed) > 1 else ""
        return f"; not watched: {missed[0].what} ({missed[0].why}){more}"

    def __enter__(self) -> Guard:
        return self if self._writer is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            if self.unwatched is not None and self._writer is not None:
                logger.warning("%s", f"The guard has seen nothing: {self.unwatched}.")
            return
        stops = self._is_stopped and not self.trips
        trips = self.stop_after(error)
        for trip in trips[stops and self._actions.raises :]:  # the program is going down anyway
            self._actions.report(trip, going_down=True)
        if stops:
            cause = None if isinstance(error, ExactStop) else error
            raise Tripped(trips[0]).with_traceback(trace) from cause

    # -- called by the recorder and the signal handler -----------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._recorder.step_count

    @property
    def _is_stopped(self) -> bool:
        """Whether the program was stopped at a call; it may have caught even that, or be in another thread."""
        return isinstance(self._writer, ExactFlightRecorder) and self._writer.stopped

    def _open(self, path: Path, rank: int, **named: Any) -> BackgroundWriter:
        named |= {"remember": self._remember, "most_bytes": self._max_memory, "on_step": self._monitor.observe}
        if self._exact:
            self._writer = ExactFlightRecorder(path, rank, is_scaled=self._recorder.is_scaled, **named)
        else:
            self._writer = FlightRecorder(path, rank, catch=True, **named)
        self._snapshots.writer = self._writer
        return self._writer

    def _after_step(self) -> None:
        """Acts on the trips of the finished step; where a device still works on it, on those of the steps before."""
        writer = self._writer
        if writer is None:
            return
        finished = self._step - writer.listener.is_asynchronous
        writer.listener.wait_until_shown(finished - 1, STEP_TIMEOUT)
        self._monitor.check_losses(before=finished)
        self._choose_gradients()
        trips = self._monitor.take()
        for run in self._snapshots.join_others("another rank has tripped"):
            trips.append(Trip(self._step - 1, self.rank, "rank", "✗ Another rank has tripped.").in_snapshot(run))
        self._actions.act(trips)

    def _choose_gradients(self) -> None:
        """Decides which gradients of the next step are read: fewer while nothing is wrong."""
        if self._gradients != "all":
            self._recorder.read_call_gradients(self._monitor.wants_call_gradients)

    def _terminated(self) -> None:
        self._was_terminated = True
        trip = Trip(self._step, self.rank, "signal", f"✗ SIGTERM in step {self._step}")
        self._actions.report(self._actions.save(trip), going_down=True)

    def _unexplained(self) -> Trip:
        """The trip of a program stopped at a call of which no alarm was made."""
        return Trip(self._step, self.rank, "non-finite", "✗ A call has made NaN or infinity.")

    def _end(self, ended: str) -> None:
        if self._termination is not None:
            self._termination.remove()
        self._recorder.stop(ended)
        self._monitor.check_losses(self._step + 1)


def _is_clean_exit(error: BaseException) -> bool:
    """Whether a program that ends by this exception has not failed."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


class TerminationHandler:
    """Calls `act` when SIGTERM comes, as a scheduler sends it to end a program, and then the previous handler.

    Only the main thread can put it in place; in another thread, and where the program ignores the signal, it does
    nothing. Forked children only pass the signal on.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._previous: Any = None
        self._process: int | None = None  # where the handler is in place
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous not in (signal.SIG_IGN, None):  # None: by something other than Python
                signal.signal(signal.SIGTERM, self._on_signal)
                self._process = os.getpid()

    def remove(self) -> None:
        """Acts no more. Where the handler cannot be removed, it passes the signal on."""
        process, self._process = self._process, None
        if process is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._on_signal:  # else a later handler passes it on
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        process, self._process = self._process, None
        if process == os.getpid():
            self._act()
        if callable(self._previous):
            self._previous(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)


# -- the recorder of a guard -------------------------------------------------------------------------------------------


class GuardRecorder(BaseRecorder):
    """Calls `after_step` at the end of each step, and counts the steps."""

    after_step: Callable[[], None]
    step_count = 0

    def read_call_gradients(self, on: bool) -> None:
        """Reads the gradients that pass through calls from the next call on, or those of parameters alone.

        Each time they are turned off, the run notes that they were not read.
        """
        engine = self._engine
        if engine is not None and engine.reads_call_gradients != on:
            engine.reads_call_gradients = on
            if not on:
                engine.missed(CALL_GRADIENTS, "a guard reads those of parameters alone while nothing is wrong")

    def step(self) -> None:
        if self._engine is not None and not self._engine.in_own_process:
            return
        super().step()
        self.step_count += 1
        self.after_step()

    def is_scaled(self) -> bool:
        """Whether a loss of this step was scaled by a GradScaler."""
        return self._engine is not None and self._engine.scaled

    @property
    def has_just_ended(self) -> bool:
        """Whether a step has ended and nothing was called since."""
        return self.step_count > 0 and self._engine is not None and not self._engine.has_begun


class ChosenAdapter:
    """An adapter given in place of a model."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
