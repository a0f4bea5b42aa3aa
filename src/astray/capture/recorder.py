"""A recording: start, step, stop. Users hold it as `astray.recorder.Recorder`.

Checks the settings, opens the writer, chooses an adapter for the model, and connects the two by an `Engine`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from astray import stats
from astray.capture.adapters import Adapter, adapter_for
from astray.capture.config_file import LiveConfig
from astray.capture.engine import engine_for
from astray.capture.graft_words import Graft
from astray.capture.selection import forecast
from astray.capture.settings import RecordingOptions, Settings
from astray.errors import RecordError
from astray.log import logger
from astray.process import absolute, rank_and_world_size, relative_to_cwd
from astray.records import ANY_CALL
from astray.store import BackgroundWriter, DeferredMeasurements, RunInfo, RunWriter
from astray.wording import counted, sized

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from astray.capture.engine import Engine


class WriterFactory(Protocol):
    """Opens the writer of one rank: `RunWriter`, or another `BackgroundWriter`."""

    def __call__(
        self,
        path: Path,
        rank: int,
        *,
        info: RunInfo,
        overwrite: bool,
        queue_bytes: int,
        deferred: DeferredMeasurements | None,
    ) -> BackgroundWriter: ...


class RecordingWatcher(Protocol):
    """Watches a recording while it is written to disk, and may end the program. `RecordingGuard` is one."""

    def check(self, settings: Settings) -> None:
        """Raises a RecordError when a recording with these settings would show it nothing."""

    def open(self, path: Path, rank: int, **named: Any) -> BackgroundWriter:
        """The writer of the recording, which shows it each step; takes what `WriterFactory` does."""

    def after_step(self, over: int) -> None:
        """`over` steps have ended. May raise."""

    def ended(self, error: BaseException) -> str | None:
        """How the recording ended, if this watcher has ended it; else None."""

    def finish(self, going_down: bool) -> None:
        """The recording is closed. May raise, unless the program is `going_down`."""


class BaseRecorder:
    """Records the tensors of a model's calls into a run; `astray.recorder.Recorder` explains what can be given.

    guard: watches the recording while it is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        *,
        overwrite: bool = False,
        guard: RecordingWatcher | None = None,
        writer: WriterFactory = RunWriter,
        **settings: Unpack[RecordingOptions],
    ) -> None:
        self.path = absolute(path)
        config = settings.get("config")
        self._live_config = LiveConfig(config, settings) if config is not None else None
        self.settings = Settings.check(**settings) if self._live_config is None else self._live_config.settings
        if guard is not None and writer is not RunWriter:
            raise RecordError("guard= looks at what is written to disk, and writer= takes it elsewhere. Leave out one.")
        if guard is not None:
            guard.check(self.settings)
        self.guard = guard
        # With a guard steps are detected though the program ends them: that is how a GradScaler's skips are known.
        self._finds_steps = isinstance(model, _GivenAdapter)
        self._adapter: Adapter = (
            model.adapter if self._finds_steps else adapter_for(model, detects_steps=self.guard is not None)
        )
        if self.settings.graft:
            self._check_grafts()
        self._overwrite = overwrite
        self._writer_factory: WriterFactory = writer if self.guard is None else self.guard.open
        self._started = False
        self._ranks = (0, 1)
        self._writer: BackgroundWriter | None = None
        self._engine: Engine | None = None
        self._failure_reported = False
        self._forecast_reported = writer is not RunWriter
        self.remarks: list[str] = []
        """Once it is stopped: sentences about what it has changed in the program, such as grafts."""
        self.report_forecast: Callable[[str], None] | None = None
        """Called with the forecast of the disk; by default it is logged."""
        self.on_step_end: Callable[[int], None] | None = None
        """Called at the end of each step with how many have ended. May raise, which ends the program."""

    def _check_grafts(self) -> None:
        framework = self._adapter.framework
        if framework != "torch":
            raise RecordError(f"graft= works with PyTorch so far, and this program is of {framework}. Leave it out.")
        if any(Graft.read(text).run == str(self.path) for text in self.settings.graft):
            raise RecordError(
                f"{relative_to_cwd(self.path)} cannot be grafted into itself. Record into another folder."
            )

    @classmethod
    def discovering(cls, path: str | os.PathLike[str], adapter: Adapter, **named: Any) -> Self:
        """A recorder for a program whose models and steps the adapter finds. `named`: as for `__init__`."""
        return cls(path, _GivenAdapter(adapter), **named)

    def start(self) -> Self:
        """Opens the run and puts the hooks in place. Does nothing on a rank that the settings leave out."""
        if self._started:
            raise RecordError(
                f"This recorder has already been started, on {relative_to_cwd(self.path)}. "
                "Make another for a second run."
            )
        self._started = True
        rank, world_size = self._ranks = self._adapter.rank_and_world_size() or rank_and_world_size(os.environ)
        if rank not in self.settings.ranks:
            return self
        if stats.BACKEND == "numpy" and "ASTRAY_KERNELS" not in os.environ:
            logger.warning(
                "astray was installed without a compiler, so measuring tensors takes many times as long. "
                "Install it again where there is one."
            )
        self._writer = self._writer_factory(
            self.path,
            rank,
            info=self._info(world_size),
            overwrite=self._overwrite,
            queue_bytes=self.settings.queue_bytes,
            deferred=self._adapter.reader.deferred,
        )
        self._engine = engine_for(self._adapter, self._writer, self.settings)
        try:
            self._adapter.start(self._engine, self.step)
            if self.guard is not None and not self._finds_steps:
                self._adapter.let_program_end_steps()
        except BaseException:  # an interrupt must not leave hooks or an empty run either; it is raised again below
            self.stop()
            self._writer.discard()
            raise
        return self

    def _info(self, world_size: int) -> RunInfo:
        return RunInfo.of_process(
            framework=self._adapter.framework,
            versions={**self._adapter.versions(), "astray kernels": stats.BACKEND},
            devices=self._adapter.devices(),
            seed=self._adapter.seed(),
            world_size=world_size,
            settings=self.settings.as_dict(),
        )

    @property
    def is_untouched(self) -> bool:
        """Whether no module has been called since it was started."""
        return self._engine is not None and not self._engine.step and not self._engine.has_begun

    def discard(self) -> None:
        """Removes every hook, and what was written."""
        writer = self._writer
        self.stop()
        if writer is not None:
            writer.discard()

    def missed(self, what: str, why: str) -> None:
        """Something could not be observed. It is counted and listed in the run."""
        if self._engine is not None:
            self._engine.missed(what, why)

    @property
    def recording(self) -> bool:
        """True between start and stop, in a step that the settings include."""
        return self._engine is not None and self._engine.recording

    def step(self) -> None:
        """Ends a step. Call it once an iteration, after the optimizer."""
        engine = self._running("step")
        if engine is None or not engine.in_own_process:
            return
        with self._reporting_failures(engine, "the end of a step"):
            self._adapter.next_step()
        engine.next_step()
        if not self._forecast_reported and "tensors" in self.settings.keep:
            with self._reporting_failures(engine, "what a step takes on the disk"):
                self._report_forecast(engine)
        with self._reporting_failures(engine, "a change of the settings"):
            self._apply_config_changes(engine)
            self._adapter.update_hooks()
        self._report_failure()
        if self.guard is not None:
            self.guard.after_step(engine.step)
        if self.on_step_end is not None:
            self.on_step_end(engine.step)

    def save(self, name: str, value: Any, gradient: bool = True) -> None:
        """Records a value of yours under a name: a tensor, a number, an array, or any nest of them.

        >>> rec.save("attention/scores", scores)
        >>> rec.save("batch", {"ids": ids, "lengths": [3, 5]})

        gradient: also record the gradients that arrive at its tensors in the backward pass.
        """
        engine = self._running("save")
        if engine is not None and engine.recording and engine.in_own_process:
            with self._reporting_failures(engine, f"the value saved as {name!r}"):
                self._adapter.save(str(name), value, gradient, sys._getframe(1))

    def module_called(self, module: Any, args: Any, frame: FrameType) -> None:
        """The recording was started during this call of a module, which is recorded too."""
        engine = self._engine
        if engine is not None and engine.in_own_process:
            with self._reporting_failures(engine, "the first call of a module"):
                self._adapter.module_called(module, args, frame)

    def forward_end(self) -> None:
        """Records only what has run so far in this step, and the backward of that. The next step is recorded again."""
        engine = self._running("forward_end")
        if engine is not None and engine.in_own_process:
            engine.end_forward()

    def pause(self) -> AbstractContextManager[None]:
        """Records nothing until `resume`, or until the end of the block:

        >>> with rec.pause():
        ...     evaluate(model)

        Calls made meanwhile are not numbered, so those that follow keep their numbers.
        """
        self._pause(True)
        return _Pause(self)

    def resume(self) -> None:
        """Goes on recording after `pause`."""
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        engine = self._running("pause" if paused else "resume")
        if engine is not None and engine.in_own_process:
            engine.pause(paused)
            with self._reporting_failures(engine, "a pause"):
                self._adapter.update_hooks()

    def flush(self) -> None:
        """Waits until everything recorded so far is in the files, where not even `kill -9` takes it away."""
        if self._running("flush") is not None and self._writer is not None:
            self._writer.flush()
            self._report_failure()

    def stop(self, ended: str = "normally", nothing: str | None = None) -> None:
        """Removes every hook and closes the run. Stopping twice does no harm.

        A guard acts on calls since the last step. `nothing`: the reason to give if no call was recorded.
        """
        if self._close(ended, nothing) and self.guard is not None:
            self.guard.finish(going_down=False)

    def stop_after(self, error: BaseException) -> None:
        """`stop` for a program that an exception has ended."""
        by_guard = self.guard.ended(error) if self.guard is not None else None
        if self._close(by_guard or f"{type(error).__name__}: {error}") and self.guard is not None:
            self.guard.finish(going_down=True)

    def _close(self, ended: str, nothing: str | None = None) -> bool:
        """Closes the run. Returns whether it was open."""
        engine, writer = self._engine, self._writer
        if engine is None or writer is None or not engine.in_own_process:
            return False
        self._engine = None
        with contextlib.ExitStack() as closing:  # a signal handler may raise in the middle of any of these
            closing.callback(self._adapter.reader.stop)
            closing.callback(self._close_writer, engine, writer, ended)
            with self._reporting_failures(engine, "the end of the recording"):
                engine.finish(nothing)
                self._adapter.stop()
                self.remarks = engine.remarks
        self._report_failure()
        return True

    def _close_writer(self, engine: Engine, writer: BackgroundWriter, ended: str) -> None:
        with self._reporting_failures(engine, "the end of the recording"):
            writer.close(ended)

    def _apply_config_changes(self, engine: Engine) -> None:
        """Applies changes of the config file since the last step."""
        if self._live_config is None:
            return
        try:
            settings = self._live_config.changed()
            if settings is not None and self.guard is not None:
                self.guard.check(settings)
        except RecordError as error:
            logger.warning("%s", error)
            return
        if settings is not None:
            self.settings = settings
            engine.apply(settings)
            self._adapter.apply(settings)
            engine.note("astray/settings", settings.as_dict())

    @contextlib.contextmanager
    def _reporting_failures(self, engine: Engine, doing: str) -> Iterator[None]:
        """Keeps our exceptions out of the user's program: they are reported in the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(doing, error)

    @property
    def calls(self) -> int:
        """How many calls a stopped recording holds."""
        end = self._writer.end if self._writer is not None else None
        return 0 if end is None else end.calls

    @property
    def is_incomplete(self) -> bool:
        """Whether a stopped recording is empty or incomplete."""
        end = self._writer.end if self._writer is not None else None
        return end is not None and (not end.complete or any(missed.what == ANY_CALL for missed in end.missed))

    def summary(self) -> str:
        """What a stopped recording holds, in one line."""
        end = self._writer.end if self._writer is not None else None
        if self._started and self._writer is None:
            return f"nothing was recorded here: ranks={self.settings.ranks} leaves this one out"
        if end is None:
            return f"{relative_to_cwd(self.path)} is still being recorded"
        reason = next((entry.why for entry in end.missed if entry.what == ANY_CALL), None)
        if reason is not None:
            return f"nothing was recorded in {relative_to_cwd(self.path)}: {reason}"
        parts = [counted(end.steps, "step"), counted(end.calls, "call"), counted(end.tensors, "tensor")]
        if end.value_bytes:
            parts.append(f"{sized(end.value_bytes)} of values")
        if end.waited_seconds >= 0.1:
            parts.append(f"waited {end.waited_seconds:.1f} s for the disk")
        if end.missed:
            parts.append(f"{sum(missed.count for missed in end.missed):,} not observed (see end.json)")
        return f"{', '.join(parts)} in {relative_to_cwd(self.path)}{self._rank_note()}"

    def _rank_note(self) -> str:
        """Says that this is one of several ranks. The others hold much the same and are not described."""
        rank, world_size = self._ranks
        return f" (on rank {rank}; {world_size} ranks)" if world_size > 1 else ""

    def __enter__(self) -> Self:
        return self if self._started else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop() if error is None else self.stop_after(error)

    def _running(self, method: str) -> Engine | None:
        if not self._started:
            raise RecordError(
                f"{method}() was called before start(). Start the recorder, or use `with astray.record(…)`."
            )
        return self._engine

    def _report_forecast(self, engine: Engine) -> None:
        """Reports, after the first step with kept values, how much disk a step takes and how many more steps fit."""
        step = engine.tensors.recorded
        if not step.values:
            return
        self._forecast_reported = True
        rank, world_size = self._ranks
        recording = [each for each in range(world_size) if each in self.settings.ranks]
        if rank != min(recording, default=rank):  # the others would say the same
            return
        try:
            disk = forecast(step, self.path, self.settings.max_bytes, len(recording))
        except OSError:  # a file system without this figure; a full disk is reported by the writer
            return
        if self.report_forecast is not None:
            self.report_forecast(disk.sentence)
        else:
            logger.log(logging.WARNING if disk.is_tight else logging.INFO, "%s: %s", self.path, disk.sentence)

    def _report_failure(self) -> None:
        """A disk that is full stops the recording, not the program; the user is warned once."""
        if self._writer is not None and self._writer.failure and not self._failure_reported:
            self._failure_reported = True
            logger.warning("%s", self._writer.failure)
            if self._engine is not None:
                self._engine.pause()


class _Pause(contextlib.AbstractContextManager[None]):
    """Ends a pause at the end of a block."""

    def __init__(self, recorder: BaseRecorder) -> None:
        self._recorder = recorder

    def __exit__(self, *_: object) -> None:
        self._recorder.resume()


class _GivenAdapter:
    """An adapter given in place of a model."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
