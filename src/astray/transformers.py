"""astray for the transformers library: a callback that records the training of a `Trainer`.

    from astray.transformers import AstrayCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[AstrayCallback("runs/a")])
    trainer.train()

Importing this module imports transformers. Nothing else in astray does. A trainer does not call its callbacks when its
training ends by an exception, so that end is noticed only by a `with`, by the next training, or when the process ends.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from astray.capture.settings import RecordingOptions, Settings, with_absolute_paths
from astray.process import absolute
from astray.recorder import Recorder

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from astray.guarding.options import GuardSetting


__all__ = ["AstrayCallback"]


class AstrayCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there for the type checker
    """Records every training of a Trainer into a run.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[AstrayCallback("runs/a", steps="0:10")])
    >>> trainer.train()

    path: the folder of the run. A second `train()` of the same trainer goes into `runs/a-2`, and so on.
    overwrite: replace a run that is there already.
    guard: also watch for NaN and infinity, as `astray.record` does.
    settings: those of `astray.record`. A wrong one is refused here, before the training begins.

    A step is a step of the optimizer, counted from 0 in each training; the forwards of gradient accumulation are its
    micro steps. The trainer evaluates after a step has ended, so what an evaluation runs belongs to the step that
    follows.

    When the training may end by an exception that the program survives, as in a notebook, use it in a `with`: then
    recording ends there too, and nothing stays on the model.

    >>> with AstrayCallback("runs/a") as callback:
    ...     Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        guard: GuardSetting | None = None,
        **settings: Unpack[RecordingOptions],
    ) -> None:
        checked = Settings.check(**settings)
        if guard is not None:
            from astray.guarding.recording_guard import RecordingGuard

            RecordingGuard(guard).check(checked)  # both refuse what cannot be done
        self.path = absolute(path)
        self.recorder: Recorder | None = None  # of the training that goes on, or of the last one
        self._overwrite = overwrite
        self._guard = guard
        self._settings = with_absolute_paths(settings)
        self._trainings = 0

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Starts recording. Raises what `astray.record` does when the folder cannot be recorded into."""
        self.stop("by an exception, or in another way that the trainer did not report")
        self._trainings += 1
        path = self.path if self._trainings == 1 else self.path.with_name(f"{self.path.name}-{self._trainings}")
        self.recorder = Recorder(path, model, overwrite=self._overwrite, guard=self._guard, **self._settings).start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        if self.recorder is not None:
            self.recorder.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Closes the run."""
        self.stop()

    def stop(self, ended: str = "normally") -> None:
        """Ends the recording before the training does, or after it has ended by an exception. Calling it twice does no
        harm.
        """
        if self.recorder is not None:
            self.recorder.stop(ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop("normally" if kind is None else f"{kind.__name__}: {error}")
