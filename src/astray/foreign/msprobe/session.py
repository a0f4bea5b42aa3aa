"""One dump in the making: a recorder that is paused and resumed as the program says `start` and `stop`.

A session belongs to a folder. It opens the recorder when something is first to be recorded, since only then the model
is known, and from then on steps are counted by the recorder. The dump's writer, which alone gives entries their names,
asks an `EntryFilter` which of them the configuration selects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from astray.capture.adapters import adapter_for
from astray.capture.recorder import BaseRecorder, WriterFactory
from astray.capture.settings import RecordingOptions
from astray.errors import RecordError
from astray.foreign.live_writer import live_writer
from astray.foreign.msprobe import translate
from astray.foreign.msprobe.configuration import Configuration
from astray.foreign.msprobe.translator import Task
from astray.log import logger
from astray.store import BackgroundWriter, RunInfo
from astray.store.formats import MakesTranslator

_TASKS: dict[str, Task] = {
    "statistics": "statistics",
    "tensor": "tensor",
    "overflow_check": "overflow_check",
    "acc_check": "statistics",  # which is what msprobe's check takes
    "structure": "structure",
}
_LEVELS = {"L0": ["module"], "L1": ["function"], "mix": ["module", "function"], "debug": ["module"]}

_FORWARD = re.compile(r"\.forward(\.\d+)?$")

_GRADIENT = re.compile(r"(.+)\.parameters_grad(?:\.(\d+))?")


class Session:
    """Records into one folder by one configuration.

    model: a module, or a list of them. overwrite: replace a dump that is there already.
    """

    def __init__(self, configuration: Configuration, model: Any = None, overwrite: bool = False) -> None:
        self.configuration = configuration
        self._model = model
        self._overwrite = overwrite
        self._recorder: BaseRecorder | None = None
        self._passed = 0  # steps that were over before anything was to be recorded
        self._version = configuration.version
        self._over = False

    def start(self, model: Any = None, rank: int | None = None) -> None:
        """Record from here on."""
        self._follow_the_file()
        self._choose(model)
        if rank is not None and self.configuration.ranks and rank not in self.configuration.ranks:
            return
        if self.configuration.level == "debug" or not self._is_due():
            return
        if self._recorder is None:
            self._recorder = self._open(self._asked_model(), rank)
        else:
            self._recorder.resume()

    def stop(self) -> None:
        """Record nothing until the next start, and wait until the files tell of what was before."""
        if self._recorder is not None and self.configuration.level != "debug":
            self._recorder.pause()
            self._recorder.flush()

    def step(self) -> None:
        """A step is over, and its files are complete."""
        if self._recorder is None:
            self._passed += 1
            return
        self._recorder.step()
        self._recorder.flush()

    def begin_at(self, step: int) -> None:
        """Count steps from here."""
        if self._recorder is not None:
            raise RecordError(f"set_init_step({step}) comes after the first start(). Call it before.")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RecordError(f"set_init_step({step!r}) is not possible. Steps are whole numbers from 0 on.")
        self._passed = step

    def end_forward(self) -> None:
        """Record only what has run so far in this step, and the backward of that."""
        if self._recorder is None:
            raise RecordError("forward_backward_dump_end() was called before start(), so there is nothing to end.")
        self._recorder.forward_end()

    def save(self, variable: Any, name: str, gradient: bool) -> None:
        """Record a value of the program's own."""
        if not isinstance(name, str) or not name:
            raise RecordError(f"save() was given the name {name!r}. It is a text, such as 'loss'.")
        if not isinstance(gradient, bool):
            raise RecordError(f"save() was given save_backward={gradient!r}. It is True or False.")
        if self._recorder is None and self.configuration.level == "debug" and self._is_due():
            self._recorder = self._open(None, None)
        if self._recorder is not None:
            self._recorder.save(name, variable, gradient)

    def close(self) -> None:
        """Remove every hook, and end the dump."""
        self._over = True
        if self._recorder is not None:
            self._recorder.stop()

    def _is_due(self) -> bool:
        if self._over:
            raise RecordError(f"The dump in {self.configuration.dump_path} has been closed. Make another debugger.")
        if not self.configuration.enabled:
            return False
        steps = self.configuration.steps
        return self._recorder is not None or not steps or self._passed <= max(steps)

    def _follow_the_file(self) -> None:
        """Takes over a `dump_enable` that somebody has written into config.json meanwhile, and nothing else."""
        version = self.configuration.version
        if version == self._version:
            return
        self._version = version
        try:
            found = self.configuration.read_again()
        except RecordError as error:
            logger.warning("%s The dump goes on as before.", error)
            return
        if differences := found.but_for_switch(self.configuration):
            logger.warning(
                "In %s: %s. Only dump_enable is read while a program runs; the rest holds for the next one.",
                found.file, "; ".join(differences),
            )  # fmt: skip
        self.configuration = replace(self.configuration, enabled=found.enabled)

    def _choose(self, model: Any) -> None:
        if model is None or model is self._model:
            return
        if self._recorder is not None and self.configuration.level in ("L0", "mix"):
            raise RecordError(
                f"start() was given another model than before ({type(model).__name__}). A debugger dumps one model, or "
                "one list of models: make another debugger, with its own dump_path, for the second."
            )
        self._model = model

    def _asked_model(self) -> Any:
        model = self._model
        if isinstance(model, list | tuple):
            return {str(number): one for number, one in enumerate(model)}
        if model is not None:
            return model
        if self.configuration.level in ("L0", "mix"):
            raise RecordError(
                f"level is {self.configuration.level!r}, which is about the modules of a model, and no model was "
                "given. Pass it: debugger.start(model)."
            )
        return None

    def _open(self, model: Any, rank: int | None) -> BaseRecorder:
        """A recorder that runs. Without a model it finds the modules that functions are called in."""
        asked = self.configuration
        if model is None:
            adapter = adapter_for(_nothing(), discovers=asked.level != "debug", spelled=True)
        else:
            adapter = adapter_for(model, spelled=True)
        if not self._overwrite and next(asked.dump_path.glob("step*/rank*"), None) is not None:
            logger.warning("%s holds a dump already. What is dumped again replaces the same step.", asked.dump_path)
        writer: WriterFactory = live_writer(_translator(asked, adapter.raw_names()))
        settings = settings_of(asked)
        if rank is not None:  # which has been looked at already
            writer = _Ranked(writer, rank)
            settings["ranks"] = None
        recorder = BaseRecorder.discovering(
            asked.dump_path, adapter, overwrite=self._overwrite, writer=writer, **settings
        ).start()
        if self._passed:
            with recorder.pause():
                for _ in range(self._passed):
                    recorder.step()
        return recorder


def settings_of(asked: Configuration) -> RecordingOptions:
    """What a recorder is to be told."""
    structure = asked.task == "structure"
    values = asked.task in ("tensor", "overflow_check") or asked.md5 or bool(asked.tensors)
    roles = {"state"} if structure else {*asked.roles, *(() if asked.level == "L1" else ("parameter", "gradient"))}
    phases = asked.phases | {"forward"}  # a backward call is numbered by its forward call
    updates = "forward" in asked.phases and asked.level in ("L1", "mix")
    if updates:
        phases |= {"update"}  # to msprobe, functions inside of an optimizer's step are functions like others
    return RecordingOptions(
        level=_LEVELS[asked.level],
        keep="tensors" if values else "fingerprint" if structure else "stats",
        steps=list(asked.steps),
        ranks=list(asked.ranks),
        phases=sorted(phases),
        optimizer="calls" if updates else None,
        roles=sorted(roles),
        functions=asked.functions,
    )


def _translator(asked: Configuration, wrapped: dict[str, str]) -> MakesTranslator:
    return partial(
        translate,
        task="md5" if asked.md5 and asked.task == "statistics" else _TASKS[asked.task],
        level=asked.level,
        asked=(lambda: EntryFilter(asked)) if EntryFilter.is_needed(asked) else None,
        with_values=partial(holds_one, asked.tensors) if asked.tensors else None,
        most=asked.overflows,
        extra_info=asked.extra_info,
        rounded=True,
        wrapped=wrapped,
        again=True,
    )


class _Ranked:
    """Opens the writer of the rank that the program says it is."""

    def __init__(self, opens: WriterFactory, rank: int) -> None:
        self._opens, self._rank = opens, rank

    def __call__(self, path: Path, rank: int, *, info: RunInfo, **known: Any) -> BackgroundWriter:  # noqa: ARG002 - a guess
        world_size = max(info.world_size, self._rank + 1, 2)  # it has a number, so there are others
        info = msgspec.structs.replace(info, world_size=world_size)
        return self._opens(path, self._rank, info=info, **known)


def _nothing() -> Any:
    """A model that is never called, for what is recorded without one: functions, and what the program saves."""
    from torch import nn

    return nn.Module()


class EntryFilter:
    """Which entries of one step are dumped: `list`, `scope`, `tensor_list`, `white_list` and `black_list`.

    Called once for each entry, in the order in which they start.

    >>> wanted = EntryFilter(Configuration(Path("dump"), level="mix", names=("fc1",)))
    >>> wanted("Module.fc1.Linear.forward.0"), wanted("Functional.linear.0.forward", ["Module.fc1.Linear.forward.0"])
    (True, True)
    """

    def __init__(self, configuration: Configuration) -> None:
        self._names = configuration.names
        self._scope = configuration.scope
        self._whole = configuration.level == "mix"  # a module stands for what is inside it
        self._white, self._black = frozenset(configuration.white), frozenset(configuration.black)
        self._forward = "forward" in configuration.phases
        self._open = self._closing = False

    @staticmethod
    def is_needed(configuration: Configuration) -> bool:
        """False when everything is asked for."""
        asked = (configuration.names, configuration.scope, configuration.white, configuration.black)
        return any(asked) or "forward" not in configuration.phases

    def __call__(self, name: str, around: Sequence[str] = ()) -> bool:
        """Whether an entry is dumped. around: the entries of the modules around it."""
        is_in_scope = self._is_in_scope(name, around)  # which must hear of every entry
        return is_in_scope and self._is_of_phase(name) and self._is_listed(name, around) and self._is_checked(name)

    def _is_in_scope(self, name: str, around: Sequence[str]) -> bool:
        """From the start of the first entry to the end of the last, whatever is inside it included."""
        if self._scope is None:
            return True
        begin, end = self._scope
        if self._closing and name != end and end not in around:
            self._open = self._closing = False
        if name == begin:
            self._open, self._closing = True, False
        if name == end and self._open:
            self._closing = True
        return self._open

    def _is_of_phase(self, name: str) -> bool:
        """The calls of the forward must be recorded, or those of the backward would have no numbers."""
        return self._forward or not _FORWARD.search(name)

    def _is_listed(self, name: str, around: Sequence[str]) -> bool:
        if not self._names:
            return True
        gradient = _GRADIENT.fullmatch(name)  # goes with the backward of its module
        told = [name, f"{gradient[1]}.backward.{gradient[2] or 0}"] if gradient else [name]
        if self._whole:
            told += around
        return any(part in one for one in told for part in self._names)

    def _is_checked(self, name: str) -> bool:
        if not self._white and not self._black:
            return True
        function = ".".join(name.split(".")[1:-2])
        return function not in self._black and (not self._white or function in self._white)


def holds_one(parts: Sequence[str], name: str) -> bool:
    """Whether one of these texts is in a name."""
    return any(part in name for part in parts)
