"""`Tracer`: a `Recorder` that writes hooktools' files, and the YAML file that configures it.

Each `trace` … `untrace` is a recording of its own, so that no hook remains on the model in between; the numbers of the
files continue from one to the next.
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
from astray.records import ANY_CALL, ROOT
from astray.store import BackgroundWriter
from astray.store.formats import TranslatorFactory
from astray.wording import counted, did_you_mean

if TYPE_CHECKING:
    from torch import nn


HOOK = "dump_pt_hook"

FORWARD, BACKWARD = ("forward",), ("backward",)

PHASES: dict[int, tuple[str, ...]] = {0: (), 1: FORWARD, 2: BACKWARD, 3: FORWARD + BACKWARD}
"""What each trace_mode records."""

FUNCTION_MODULES = ("torch.nn.functional", "torch", "torch.Tensor")
"""Where functions are searched that the user selects by a part of their names."""


class ParameterGradient(dict[str, Any]):
    """A parameter and its gradient, as `trace_gradient` saves them."""


class Tracer:
    """Records a model's calls as hooktools does.

    >>> trace = Tracer("tracer_demo.yaml", model)
    >>> trace.trace(epoch=0, step=0)
    >>> model(batch).sum().backward()
    >>> trace.untrace()

    config: a YAML file, or a dict with its content; `astray help hooktools` has every key.
    """

    def __init__(self, config: Given, model: nn.Module) -> None:
        self._config = TracerConfig.read(config)
        adapter_for(model)  # raises RecordError if it is not a model
        self._model = model
        self._label = Label()
        self._labels: list[Label] = []
        self._recorder: BaseRecorder | None = None
        self._writer: BackgroundWriter | None = None  # of the recorder
        self._reported: set[tuple[str, str]] = set()
        self._series = FileSeries(self._config.log_dir, self._config.tracer_name, int(time.time()))
        while self._series.folder.exists():  # of another tracer made in the same second
            self._series.stamp += 1
        self._print(f"{self._config}")

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self._series.folder

    def trace(self, epoch: int = -1, step: int = -1) -> None:
        """Record from here on. If a recording is running, it continues under the new epoch and step."""
        if not self._config.phases:
            return
        self._set(epoch, step)
        if self._recorder is None:
            self._labels = [self._label]
            self._recorder = self._start()
            self._print(f"tracing epoch {epoch}, step {step} into {self.folder}")

    def untrace(self) -> None:
        """End the recording: every hook is removed, and every file written."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.stop()
        self._label = Label()
        self._report(recorder, self._writer)

    def update_step(self, step: int) -> None:
        """Set the step of what runs from here on."""
        self._set(self._label.epoch, step)

    def update_epoch(self, epoch: int) -> None:
        """Set the epoch of what runs from here on."""
        self._set(epoch, self._label.step)

    def trace_gradient(self, epoch: int = -1, step: int = -1) -> None:
        """Save every parameter with its gradient as they are now. Call it before `zero_grad`."""
        if not self._config.phases:
            return
        self._set(epoch, step)
        from torch import nn

        # A recorder that observes nothing; values are passed to `save`.
        with BaseRecorder(
            self._config.log_dir,
            nn.Identity(),
            writer=live_writer(self._make([self._label])),
            keep="tensors",
            phases=FORWARD,
        ) as saving:
            for name, parameter in self._model.named_parameters():
                if self._config.selects(name):
                    pair = ParameterGradient(gradient=parameter.detach(), gradient_grad=parameter.grad)
                    saving.save(name, pair, gradient=False)

    def _set(self, epoch: int, step: int) -> None:
        label = Label(_step_number("epoch", epoch), _step_number("step", step))
        if self._recorder is not None and label != self._label:
            self._labels.append(label)  # before the step ends: the files of the next are named after it
            self._recorder.step()
        self._label = label

    def _start(self) -> BaseRecorder:
        config, open_writer = self._config, live_writer(self._make(self._labels))

        def open_and_keep(path: Path, rank: int, **options: Any) -> BackgroundWriter:
            self._writer = open_writer(path, rank, **options)
            return self._writer

        return BaseRecorder.discovering(
            config.log_dir,
            adapter_for(self._model, discovers=not config.only_model),
            writer=open_and_keep,
            level=("module",) if config.functions is None else ("module", "function"),
            keep="tensors",
            phases=config.phases,
            roles=config.roles,
            match=config.match(self._model),
            functions=config.functions or None,
        ).start()

    def _make(self, labels: list[Label]) -> TranslatorFactory:
        """Makes the translator into files of these epochs and steps."""
        return partial(translate, series=self._series, labels=lambda step: labels[min(step, len(labels) - 1)])

    def _report(self, recorder: BaseRecorder, writer: BackgroundWriter | None) -> None:
        """Log what could not be traced, each thing once, and print the number of files with `verbose`."""
        summary = recorder.summary()
        if summary.startswith("nothing"):
            logger.warning("%s", summary)
        for missed in writer.end.missed if writer is not None and writer.end is not None else ():
            if missed.what not in (ANY_CALL, STACKS) and (missed.what, missed.why) not in self._reported:
                self._reported.add((missed.what, missed.why))
                logger.warning("%s: not traced %s times, because %s", missed.what, missed.count, missed.why)
        self._print(
            f"{self.folder} has {', '.join(f'{n:,} {phase}' for phase, n in self._series.counts.items())} files"
        )
        if self._config.names_functions:
            for name, calls in sorted(self._series.functions.items()):
                self._print(f"    {name}: {counted(calls, 'call')}", always=True)

    def _print(self, text: str, *, always: bool = False) -> None:
        if self._config.verbose or always:
            print(text)  # noqa: T201 - for `verbose`


def _step_number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)  # accepts numpy's integers too
    except TypeError:
        number = -2
    if not -1 <= number < 10**12:
        raise RecordError(f"{name}={value!r} cannot be traced: it should be a whole number, or -1 for none.")
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
        """From a file or a dict. Raises RecordError."""
        keys = Keys.of(config, RecordError)
        hooks = keys.take("register_hooks", _hooks, (HOOK,))
        mode = keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
        options = keys.section("dump_pt_hook_options")
        modules = options.section("hook_specifiy_modules", "hook_specify_modules")
        hacking = keys.take("hacker_non_nn_modules", truth, False)
        hacker = keys.section("hacker_options")
        only_input, only_output = keys.take("only_input", truth, False), keys.take("only_output", truth, False)
        checked = cls(
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
        if not hacking:  # checked without being used, as in the demo file
            hacker.take("supported_apis", _apis, ())
        for part in (modules, options, hacker, keys):
            part.done()
        return checked

    def selects(self, name: str) -> bool:
        """Whether a name is selected."""
        if not self.starts_with and not self.regular_expression:
            return True
        return name.startswith(self.starts_with) or any(re.search(pattern, name) for pattern in self.regular_expression)

    def match(self, model: nn.Module) -> str | None:
        """The recorder's `match` for the selected names; None for everything.

        Names are those of modules in the model, or as in hooktools the reprs of modules and full names of functions.
        """
        if not self.starts_with and not self.regular_expression:
            return None
        patterns = [*(f"^{re.escape(start)}" for start in self.starts_with), *self.regular_expression]
        for name, module in model.named_modules():
            described = repr(module) if next(module.children(), None) is None else type(module).__name__
            if self.selects(described):
                patterns.append(f"^{re.escape(name or ROOT)}$")
        if self.functions is not None:
            functions = self.functions or _all_functions()
            names = {function.rpartition(".")[2] for function in functions if self.selects(function)}
            patterns += [f"/{re.escape(name)}$" for name in sorted(names)]
        return "|".join(f"(?:{pattern})" for pattern in patterns)


def _hooks(value: Any) -> tuple[str, ...]:
    hooks = texts(value)
    for hook in hooks:
        if hook != HOOK:
            raise ValueError(f"there is no hook {hook!r}; there is {HOOK}")
    return hooks


def _apis(value: Any) -> tuple[str, ...]:
    """The functions of all groups."""
    if isinstance(value, dict):
        return tuple(dict.fromkeys(name for names in value.values() for name in texts(names or [])))
    return texts(value)


def _functions(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, checked to be functions of torch."""
    import torch

    for name in names:
        target: Any = torch
        first, *parts = name.split(".")
        for part in parts if first == "torch" else [None]:
            target = getattr(target, part, None) if part else None
            if target is None:
                known = did_you_mean(name, _all_functions())
                raise RecordError(
                    f"hacker_options.supported_apis has {name!r}, which is not a function of torch.{known} Functions "
                    "of others are made of torch's; to see what goes in and out of one, use astray.record and rec.save."
                )
    return names


def _all_functions() -> Iterator[str]:
    import torch

    modules = {"torch.nn.functional": torch.nn.functional, "torch": torch, "torch.Tensor": torch.Tensor}
    return (
        f"{module}.{name}" for module in FUNCTION_MODULES for name in dir(modules[module]) if not name.startswith("_")
    )
