"""`Tracer`: a `Recorder` that writes hooktools' files, in hooktools' words.

Each `trace` … `untrace` is a recording of its own, so that nothing remains on the model in between; the numbers of the
files go on from one to the next.
"""

from __future__ import annotations

import operator
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import adapter_for
from astray.capture.recorder import Recorder
from astray.errors import RecordError
from astray.foreign.hooktools.config_keys import Given
from astray.foreign.hooktools.layout import Label
from astray.foreign.hooktools.series import Series
from astray.foreign.hooktools.tracer_config import FORWARD, TracerConfig
from astray.foreign.hooktools.translator import STACKS, translate
from astray.foreign.live_writer import live
from astray.log import logger
from astray.records import NOTHING
from astray.store import Intake
from astray.store.translator import MakesTranslator
from astray.wording import counted

if TYPE_CHECKING:
    from torch import nn


class ParameterGradient(dict[str, Any]):
    """A parameter and its gradient, as `trace_gradient` saves them."""


class Tracer:
    """Records a model's calls as hooktools does.

    >>> trace = Tracer("tracer_demo.yaml", model)
    >>> trace.trace(epoch=0, step=0)
    >>> model(batch).sum().backward()
    >>> trace.untrace()

    config: a YAML file, or a dict of what would stand in it; `astray help moving-from-hooktools` has every key.
    """

    def __init__(self, config: Given, model: nn.Module) -> None:
        self._config = TracerConfig.read(config)
        adapter_for(model)  # says so if it is none
        self._model = model
        self._label = Label()
        self._labels: list[Label] = []
        self._recorder: Recorder | None = None
        self._intake: Intake | None = None  # of the recorder
        self._told: set[tuple[str, str]] = set()
        self._series = Series(self._config.log_dir, self._config.tracer_name, int(time.time()))
        while self._series.folder.exists():  # another tracer's, of this second
            self._series.stamp += 1
        self._say(f"{self._config}")

    @property
    def folder(self) -> Path:
        """The folder of the run, in which the files are."""
        return self._series.folder

    def trace(self, epoch: int = -1, step: int = -1) -> None:
        """Record from here on. What was being recorded already goes on under the new epoch and step."""
        if not self._config.phases:
            return
        self._set(epoch, step)
        if self._recorder is None:
            self._labels = [self._label]
            self._recorder = self._start()
            self._say(f"tracing epoch {epoch}, step {step} into {self.folder}")

    def untrace(self) -> None:
        """Record no more. Every hook is gone, and every file is there."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.stop()
        self._label = Label()
        self._tell(recorder, self._intake)

    def update_step(self, step: int) -> None:
        """What runs from here on is this step."""
        self._set(self._label.epoch, step)

    def update_epoch(self, epoch: int) -> None:
        """What runs from here on is in this epoch."""
        self._set(epoch, self._label.step)

    def trace_gradient(self, epoch: int = -1, step: int = -1) -> None:
        """Save every parameter with its gradient as they are now. Call it before `zero_grad`."""
        if not self._config.phases:
            return
        self._set(epoch, step)
        from torch import nn

        # A recorder that observes nothing: values are handed to it.
        with Recorder(
            self._config.log_dir, nn.Identity(), writer=live(self._make([self._label])), keep="tensors", phases=FORWARD
        ) as saving:
            for name, parameter in self._model.named_parameters():
                if self._config.wants(name):
                    pair = ParameterGradient(gradient=parameter.detach(), gradient_grad=parameter.grad)
                    saving.save(name, pair, gradient=False)

    def _set(self, epoch: int, step: int) -> None:
        label = Label(_whole("epoch", epoch), _whole("step", step))
        if self._recorder is not None and label != self._label:
            self._labels.append(label)  # before the step ends: the files of the next are named after it
            self._recorder.step()
        self._label = label

    def _start(self) -> Recorder:
        config, open_writer = self._config, live(self._make(self._labels))

        def remembering(path: Path, rank: int, **more: Any) -> Intake:
            self._intake = open_writer(path, rank, **more)
            return self._intake

        return Recorder.discovering(
            config.log_dir,
            adapter_for(self._model, others=not config.only_model),
            writer=remembering,
            level=("module",) if config.functions is None else ("module", "function"),
            keep="tensors",
            phases=config.phases,
            roles=config.roles,
            match=config.match(self._model),
            functions=config.functions or None,
        ).start()

    def _make(self, labels: list[Label]) -> MakesTranslator:
        """Makes what writes rows as files of these epochs and steps."""
        return partial(translate, series=self._series, labels=lambda step: labels[min(step, len(labels) - 1)])

    def _tell(self, recorder: Recorder, intake: Intake | None) -> None:
        """Say what could not be traced, each thing once, and what was, if that was asked for."""
        summary = recorder.summary()
        if summary.startswith("nothing"):
            logger.warning("%s", summary)
        for missed in intake.end.missed if intake is not None and intake.end is not None else ():
            if missed.what not in (NOTHING, STACKS) and (missed.what, missed.why) not in self._told:
                self._told.add((missed.what, missed.why))
                logger.warning("%s: not traced %s times, because %s", missed.what, missed.count, missed.why)
        self._say(f"{self.folder} has {', '.join(f'{n:,} {phase}' for phase, n in self._series.counts.items())} files")
        if self._config.names_functions:
            for name, calls in sorted(self._series.functions.items()):
                self._say(f"    {name}: {counted(calls, 'call')}", always=True)

    def _say(self, what: str, *, always: bool = False) -> None:
        if self._config.verbose or always:
            print(what)  # noqa: T201 - that is what `verbose` asks for


def _whole(name: str, given: Any) -> int:
    try:
        number = operator.index(given)  # of numpy's integers too
    except TypeError:
        number = -2
    if not -1 <= number < 10**12:
        raise RecordError(f"{name}={given!r} cannot be traced: it should be a whole number, or -1 for none.")
    return number
