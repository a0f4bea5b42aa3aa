"""`Tracer`: a `Recorder` that writes hooktools' files, and the YAML file that says what it records.

Each `trace` … `untrace` is a recording of its own, so that nothing remains on the model in between; the numbers of the
files go on from one to the next.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import adapter_for
from astray.capture.recorder import BaseRecorder
from astray.errors import RecordError
from astray.foreign.hooktools.config import Given, Keys, expressions, folder_name, one_of, text, texts, truth
from astray.foreign.hooktools.files import FileSeries, Label
from astray.foreign.hooktools.translator import STACKS, translate
from astray.foreign.live_writer import live_writer
from astray.log import logger
from astray.process import absolute
from astray.records import NOTHING, ROOT
from astray.store import BackgroundWriter
from astray.store.formats import MakesTranslator
from astray.wording import counted, did_you_mean

if TYPE_CHECKING:
    from torch import nn


HOOK = "dump_pt_hook"

FORWARD, BACKWARD = ("forward",), ("backward",)

PHASES: dict[int, tuple[str, ...]] = {0: (), 1: FORWARD, 2: BACKWARD, 3: FORWARD + BACKWARD}
"""What each trace_mode records."""

HOMES = ("torch.nn.functional", "torch", "torch.Tensor")
"""Where functions are looked for that are given by the beginning of their names."""


class ParameterGradient(dict[str, Any]):
    """A parameter and its gradient, as `trace_gradient` saves them."""


class Tracer:
    """Records a model's calls as hooktools does.

    >>> trace = Tracer("tracer_demo.yaml", model)
    >>> trace.trace(epoch=0, step=0)
    >>> model(batch).sum().backward()
    >>> trace.untrace()

    config: a YAML file, or a dict of what would stand in it; `astray help hooktools` has every key.
    """

    def __init__(self, config: Given, model: nn.Module) -> None:
        self._config = TracerConfig.read(config)
        adapter_for(model)  # says so if it is none
        self._model = model
        self._label = Label()
        self._labels: list[Label] = []
        self._recorder: BaseRecorder | None = None
        self._intake: BackgroundWriter | None = None  # of the recorder
        self._told: set[tuple[str, str]] = set()
        self._series = FileSeries(self._config.log_dir, self._config.tracer_name, int(time.time()))
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
        with BaseRecorder(
            self._config.log_dir,
            nn.Identity(),
            writer=live_writer(self._make([self._label])),
            keep="tensors",
            phases=FORWARD,
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

    def _start(self) -> BaseRecorder:
        config, open_writer = self._config, live_writer(self._make(self._labels))

        def remembering(path: Path, rank: int, **more: Any) -> BackgroundWriter:
            self._intake = open_writer(path, rank, **more)
            return self._intake

        return BaseRecorder.discovering(
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

    def _tell(self, recorder: BaseRecorder, intake: BackgroundWriter | None) -> None:
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


@dataclass(frozen=True)
class TracerConfig:
    """What stands in a tracer's YAML file, checked."""

    log_dir: Path
    tracer_name: str
    phases: tuple[str, ...]
    only_model: bool
    roles: tuple[str, ...]
    starts_with: tuple[str, ...]
    regular_expression: tuple[str, ...]
    verbose: bool
    functions: tuple[str, ...] | None  # () for all there are, None for none
    names_functions: bool

    @classmethod
    def read(cls, config: Given) -> TracerConfig:
        """From a file or a dict. A RecordError says what is wrong, and what would be right."""
        keys = Keys.of(config, RecordError)
        hooks = keys.take("register_hooks", _hooks, (HOOK,))
        mode = keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
        options = keys.inside("dump_pt_hook_options")
        modules = options.inside("hook_specifiy_modules", "hook_specify_modules")
        hacking = keys.take("hacker_non_nn_modules", truth, False)
        hacker = keys.inside("hacker_options")
        only_input, only_output = keys.take("only_input", truth, False), keys.take("only_output", truth, False)
        found = cls(
            log_dir=absolute(keys.take("log_dir", text, "./tmp")),
            tracer_name=keys.take("tracer_name", folder_name, ""),
            phases=PHASES[mode] if HOOK in hooks else (),
            only_model=keys.take("trace_granularity", one_of(0, 1), 0) == 1,
            roles=("input",) if only_input else ("output",) if only_output else ("input", "output"),
            starts_with=modules.take("starts_with", texts, ()),
            regular_expression=modules.take("regular_expression", expressions, ()),
            verbose=keys.take("verbose", truth, False),
            functions=_functions(hacker.take("supported_apis", _apis, ())) if hacking else None,
            names_functions=hacker.take("verbose", truth, False),
        )
        if not hacking:  # said without being asked for, as in the demo file
            hacker.take("supported_apis", _apis, ())
        for part in (modules, options, hacker, keys):
            part.done()
        return found

    def wants(self, name: str) -> bool:
        """Whether a name is one of those that were asked for."""
        if not self.starts_with and not self.regular_expression:
            return True
        return name.startswith(self.starts_with) or any(re.search(one, name) for one in self.regular_expression)

    def match(self, model: nn.Module) -> str | None:
        """What a recorder is told to record these; None for everything.

        A name is that of a module in the model; as hooktools knew modules by their reprs, and functions by their full
        names, those are understood too.
        """
        if not self.starts_with and not self.regular_expression:
            return None
        wanted = [*(f"^{re.escape(one)}" for one in self.starts_with), *self.regular_expression]
        for name, module in model.named_modules():
            described = repr(module) if next(module.children(), None) is None else type(module).__name__
            if self.wants(described):
                wanted.append(f"^{re.escape(name or ROOT)}$")
        if self.functions is not None:
            names = {one.rpartition(".")[2] for one in self.functions or _all_functions() if self.wants(one)}
            wanted += [f"/{re.escape(one)}$" for one in sorted(names)]
        return "|".join(f"(?:{one})" for one in wanted)


def _hooks(value: Any) -> tuple[str, ...]:
    found = texts(value)
    for one in found:
        if one != HOOK:
            raise ValueError(f"there is no hook {one!r}; there is {HOOK}")
    return found


def _apis(value: Any) -> tuple[str, ...]:
    """The functions of all groups."""
    if isinstance(value, dict):
        return tuple(dict.fromkeys(name for names in value.values() for name in texts(names or [])))
    return texts(value)


def _functions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Functions that torch has, by their full names."""
    import torch

    for name in names:
        place: Any = torch
        first, *parts = name.split(".")
        for part in parts if first == "torch" else [None]:
            place = getattr(place, part, None) if part else None
            if place is None:
                known = did_you_mean(name, _all_functions())
                raise RecordError(
                    f"hacker_options.supported_apis has {name!r}, which is no function of torch.{known} Functions of "
                    "others are made of torch's; to see what goes in and out of one, use astray.record and rec.save."
                )
    return names


def _all_functions() -> Iterator[str]:
    import torch

    places = {"torch.nn.functional": torch.nn.functional, "torch": torch, "torch.Tensor": torch.Tensor}
    return (f"{home}.{name}" for home in HOMES for name in dir(places[home]) if not name.startswith("_"))
