"""Recording, as the user holds it: start, step, stop.

Puts the parts together: settings are checked, the writer opened, an adapter chosen for the model, and the engine
placed between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from astray import stats
from astray.capture.adapters import Adapter, adapter_for
from astray.capture.engine import Engine, logger
from astray.capture.ranks import rank_and_world_size
from astray.capture.settings import QUEUE_BYTES, SAMPLES, Settings
from astray.errors import RecordError
from astray.store import RunInfo, RunWriter
from astray.wording import counted


class Recorder:
    """Records the tensors of a model's calls into a run.

    >>> with astray.record("runs/a", model) as rec:
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         rec.step()

    path: the folder of the run. In a distributed program every rank gives the same one.
    model: a module, or a dict of modules whose names come in front of their sites.
    level: what is observed. "module": every call of every module in the model.
    keep: "stats" (statistics and fingerprint), "fingerprint", "sample", "tensors", or several.
    steps: record only these: "0:10:2", a list, a range. All by default.
    samples: how many values `keep="sample"` keeps of each tensor.
    overwrite: replace a run that is there already.
    queue_bytes: how much may wait for the disk before the program is made to wait.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        *,
        level: str | Iterable[str] = "module",
        keep: str | Iterable[str] = "stats",
        steps: str | int | Sequence[int] | range | None = None,
        samples: int = SAMPLES,
        overwrite: bool = False,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.path = Path(path)
        self.settings = Settings.check(level=level, keep=keep, steps=steps, samples=samples, queue_bytes=queue_bytes)
        self._adapter: Adapter = adapter_for(model) if not isinstance(model, _Chosen) else model.adapter
        self._overwrite = overwrite
        self._writer: RunWriter | None = None
        self._engine: Engine | None = None
        self._failure_told = False

    @classmethod
    def discovering(cls, path: str | os.PathLike[str], adapter: Adapter, **settings: Any) -> Recorder:
        """A recorder for a program whose models and steps the adapter finds by itself."""
        return cls(path, _Chosen(adapter), **settings)

    def start(self) -> Recorder:
        """Opens the run and puts the hooks in place."""
        if self._writer is not None:
            raise RecordError(f"This recorder has already been started, on {self.path}. Make another for a second run.")
        rank, world_size = self._adapter.rank_and_world_size() or rank_and_world_size(os.environ)
        if stats.BACKEND == "numpy" and "ASTRAY_KERNELS" not in os.environ:
            logger.warning(
                "astray was installed without a compiler, so measuring tensors takes many times as long. "
                "Install it again where there is one."
            )
        info = RunInfo.here(
            framework=self._adapter.framework,
            versions={**self._adapter.versions(), "astray kernels": stats.BACKEND},
            devices=self._adapter.devices(),
            seed=self._adapter.seed(),
            world_size=world_size,
            settings=self.settings.as_dict(),
        )
        self._writer = RunWriter(
            self.path,
            rank=rank,
            info=info,
            overwrite=self._overwrite,
            queue_bytes=self.settings.queue_bytes,
        )
        self._engine = Engine(self._writer, self.settings, self._adapter.reader, self._adapter.internal)
        try:
            self._adapter.start(self._engine, self.step)
        except BaseException:  # an interrupt too must leave no hook and no empty run; it goes on its way below
            self.stop()
            self._writer.discard()
            raise
        return self

    @property
    def recording(self) -> bool:
        """True between start and stop, in a step that was asked for."""
        return self._engine is not None and self._engine.recording

    def step(self) -> None:
        """Ends a step. Call it once an iteration, after the optimizer."""
        engine = self._running("step")
        if engine is None or not engine.belongs_here():
            return
        try:
            self._adapter.next_step()
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed("the end of a step", error)
        engine.next_step()
        self._tell_failure()

    def flush(self) -> None:
        """Waits until everything recorded so far is in the files, where not even `kill -9` takes it away."""
        if self._running("flush") is not None and self._writer is not None:
            self._writer.flush()
            self._tell_failure()

    def stop(self, ended: str = "normally") -> None:
        """Removes every hook and closes the run. Stopping twice does no harm."""
        engine, writer = self._engine, self._writer
        if engine is None or writer is None or not engine.belongs_here():
            return
        self._engine = None
        engine.recording = False
        try:
            self._adapter.stop()
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed("the end of the recording", error)
        writer.close(ended)
        self._tell_failure()

    def summary(self) -> str:
        """What a stopped recording holds, in one line."""
        end = self._writer.end if self._writer is not None else None
        if end is None:
            return f"{self.path} is still being recorded"
        parts = [counted(end.steps, "step"), counted(end.calls, "call"), counted(end.tensors, "tensor")]
        if end.value_bytes:
            parts.append(f"{end.value_bytes / 1e6:,.1f} MB of values")
        if end.waited_seconds >= 0.1:
            parts.append(f"waited {end.waited_seconds:.1f} s for the disk")
        if end.missed:
            parts.append(f"{sum(missed.count for missed in end.missed):,} not observed (see end.json)")
        return f"{', '.join(parts)} in {self.path}"

    def __enter__(self) -> Recorder:
        return self if self._engine is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop("normally" if kind is None else f"{kind.__name__}: {error}")

    def _running(self, asked: str) -> Engine | None:
        if self._writer is None:
            raise RecordError(
                f"{asked}() was called before start(). Start the recorder, or use `with astray.record(…)`."
            )
        return self._engine

    def _tell_failure(self) -> None:
        """A disk that is full stops the recording, not the program; the user hears of it once."""
        if self._writer is not None and self._writer.failure and not self._failure_told:
            self._failure_told = True
            logger.warning("%s", self._writer.failure)
            if self._engine is not None:
                self._engine.recording = False


class _Chosen:
    """An adapter given in place of a model."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
