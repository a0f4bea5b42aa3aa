"""`PrecisionDebugger` and `seed_all` as msprobe has them, and the recording behind a debugger.

msprobe has one debugger in a program, and ignores a second one with another configuration without a word. Here each
folder has a `Session` of its own; the same folder with another configuration is an error. A session opens its recorder
at the first `start` in which something is to be recorded, since only then the model is known; after that `start` and
`stop` resume and pause it, and the recorder counts the steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

import msgspec

from astray.capture.adapters import adapter_for
from astray.capture.recorder import BaseRecorder, WriterFactory
from astray.capture.settings import RecordingOptions
from astray.errors import RecordError, UsageError
from astray.experiment import seed_all as seed_everything
from astray.foreign.live_writer import live_writer
from astray.foreign.msprobe import translate
from astray.foreign.msprobe.configuration import Configuration, EntryFilter
from astray.foreign.msprobe.translator import Task
from astray.log import logger
from astray.store import BackgroundWriter, RunInfo
from astray.store.formats import TranslatorFactory

P = ParamSpec("P")
R = TypeVar("R")


class _AlsoOnClass(Generic[P, R]):
    """A method that may also be called on the class, where it acts on the only debugger there is."""

    def __init__(self, method: Callable[Concatenate[PrecisionDebugger, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, debugger: PrecisionDebugger | None, owner: type[PrecisionDebugger]) -> Callable[P, R]:
        @functools.wraps(self._method)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._method(owner.only() if debugger is None else debugger, *args, **kwargs)

        return bound


class PrecisionDebugger:
    """Dumps the tensors of a training in msprobe's layout.

    >>> debugger = PrecisionDebugger("config.json", dump_path="./dump")
    >>> for data, label in loader:
    ...     debugger.start(model)
    ...     loss = criterion(model(data), label)
    ...     loss.backward()
    ...     debugger.stop()
    ...     debugger.step()

    config_path: a config.json. The other arguments win over it; `astray help msprobe` has every key.
    model: a module or a list of modules, here or in `start`. Levels L0 and mix need one.
    step: which steps, such as [0, "4-6"]; [] for all.
    support_wrap_ops: your own list of functions, instead of editing the file inside of msprobe.
    overwrite: replace a dump that is in the folder already.
    """

    _sessions: ClassVar[dict[str, Session]] = {}

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        model: Any = None,
        step: Any = None,
        *,
        support_wrap_ops: Any = None,
        overwrite: bool = False,
    ) -> None:
        configuration = Configuration.check(config_path, task, dump_path, level, step, support_wrap_ops)
        self._folder = os.path.realpath(configuration.dump_path)
        session = self._sessions.get(self._folder)
        if session is None:
            session = self._sessions[self._folder] = Session(configuration, model, overwrite)
        elif differences := configuration.differences(session.configuration):
            raise RecordError(
                f"A debugger dumps into {configuration.dump_path} already, by another configuration: "
                f"{'; '.join(differences)}. Give this one another dump_path, or close() the first."
            )
        self._session = session

    @classmethod
    def only(cls) -> PrecisionDebugger:
        """The debugger that a method called on the class acts on. Raises RecordError unless there is exactly one."""
        if len(cls._sessions) == 1:
            debugger = cls.__new__(cls)
            ((debugger._folder, debugger._session),) = cls._sessions.items()
            return debugger
        if not cls._sessions:
            raise RecordError("There is no debugger yet. Make one: PrecisionDebugger('config.json').")
        raise RecordError(
            f"There are {len(cls._sessions)} debuggers, for {', '.join(cls._sessions)}, and it was not said which one "
            "is meant. Call the method on the debugger itself."
        )

    @_AlsoOnClass
    def start(
        self, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Record from here on. rank_id: which rank this is, where torch.distributed does not know."""
        for name, given in (("token_range", token_range), ("scheduled_tokens", scheduled_tokens)):
            if given is not None:
                raise RecordError(
                    f"start() was given {name}={given!r}, but tokens are not counted here. Call start() and stop() "
                    "around those that are meant."
                )
        self._session.start(model, rank_id)

    @_AlsoOnClass
    def stop(self) -> None:
        """Record nothing until the next `start`. When it returns, everything before is in the files."""
        self._session.stop()

    @_AlsoOnClass
    def step(self) -> None:
        """End a step. When it returns, the files of the step are complete."""
        self._session.step()

    @_AlsoOnClass
    def forward_backward_dump_end(self) -> None:
        """Record no further forward calls in this step, only the backward of what has run since `start`."""
        self._session.end_forward()

    @_AlsoOnClass
    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """Record a value of your own under a name, and the gradients that arrive at it, into debug.json."""
        self._session.save(variable, name, save_backward)

    @_AlsoOnClass
    def set_init_step(self, step: int) -> None:
        """Set the number of the first step, for a program that continues where another one stopped."""
        self._session.begin_at(step)

    @_AlsoOnClass
    def close(self) -> None:
        """Remove every hook and end the dump. Happens by itself when the program ends."""
        self._session.close()
        self._sessions.pop(self._folder, None)


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Give every source of random numbers the same seed, as `astray.experiment.seed_all` does.

    mode: also ask torch for the same bits each time.
    rm_dropout: turn off all dropout from here on, on this thread. `astray.experiment.without_dropout` does it for a
        block.
    is_enhanced: not supported. Record both programs instead and compare: random numbers that differ will show.
    """
    for name, given in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(given, bool):
            raise UsageError(f"{name}={given!r} is not possible. It is True or False.")
    if is_enhanced:
        raise UsageError(
            "is_enhanced=True is not supported: random numbers are drawn as the program draws them. Leave it out."
        )
    seed_everything(seed, deterministic=mode)
    if rm_dropout:
        _remove_dropout()


def _remove_dropout() -> None:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    from astray.capture.pytorch.experiments.determinism import WithoutDropout

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    inside = [mode for mode in stack if not isinstance(mode, DeviceContext)]
    if any(isinstance(mode, WithoutDropout) for mode in inside):
        return
    if inside:  # a mode that ends pops the top of the stack, which would be ours
        raise UsageError(
            "rm_dropout=True lasts until the program ends, and this is inside of a block of "
            f"{type(inside[-1]).__name__}. Call seed_all before it, or use "
            "`with astray.experiment.without_dropout():` in it."
        )
    WithoutDropout().__enter__()  # type: ignore[no-untyped-call]


# -- the recording into one folder -------------------------------------------------------------------------------------

_TASKS: dict[str, Task] = {
    "statistics": "statistics",
    "tensor": "tensor",
    "overflow_check": "overflow_check",
    "acc_check": "statistics",  # the input of msprobe's acc_check
    "structure": "structure",
}
_LEVELS = {"L0": ["module"], "L1": ["function"], "mix": ["module", "function"], "debug": ["module"]}


class Session:
    """Records into one folder by one configuration.

    model: a module, or a list of them. overwrite: replace a dump that is there already.
    """

    def __init__(self, configuration: Configuration, model: Any = None, overwrite: bool = False) -> None:
        self.configuration = configuration
        self._model = model
        self._overwrite = overwrite
        self._recorder: BaseRecorder | None = None
        self._skipped = 0  # steps that ended before the recorder was opened
        self._version = configuration.version
        self._closed = False

    def start(self, model: Any = None, rank: int | None = None) -> None:
        """Record from here on."""
        self._reload_file()
        self._set_model(model)
        if rank is not None and self.configuration.ranks and rank not in self.configuration.ranks:
            return
        if self.configuration.level == "debug" or not self._is_due():
            return
        if self._recorder is None:
            self._recorder = self._open(self._recorded_model(), rank)
        else:
            self._recorder.resume()

    def stop(self) -> None:
        """Record nothing until the next start, and wait until everything before is in the files."""
        if self._recorder is not None and self.configuration.level != "debug":
            self._recorder.pause()
            self._recorder.flush()

    def step(self) -> None:
        """End a step, and wait until its files are complete."""
        if self._recorder is None:
            self._skipped += 1
            return
        self._recorder.step()
        self._recorder.flush()

    def begin_at(self, step: int) -> None:
        """Count steps from here."""
        if self._recorder is not None:
            raise RecordError(f"set_init_step({step}) comes after the first start(). Call it before.")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RecordError(f"set_init_step({step!r}) is not possible. Steps are whole numbers from 0 on.")
        self._skipped = step

    def end_forward(self) -> None:
        """Record no further forward calls in this step, only the backward of those recorded so far."""
        if self._recorder is None:
            raise RecordError("forward_backward_dump_end() was called before start(), so there is nothing to end.")
        self._recorder.forward_end()

    def save(self, variable: Any, name: str, gradient: bool) -> None:
        """Record a value that the program passes."""
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
        self._closed = True
        if self._recorder is not None:
            self._recorder.stop()

    def _is_due(self) -> bool:
        if self._closed:
            raise RecordError(f"The dump in {self.configuration.dump_path} has been closed. Make another debugger.")
        if not self.configuration.enabled:
            return False
        steps = self.configuration.steps
        return self._recorder is not None or not steps or self._skipped <= max(steps)

    def _reload_file(self) -> None:
        """Take over `dump_enable` from config.json if the file has changed since; nothing else is taken over."""
        version = self.configuration.version
        if version == self._version:
            return
        self._version = version
        try:
            changed = self.configuration.read_again()
        except RecordError as error:
            logger.warning("%s The dump goes on as before.", error)
            return
        if differences := replace(changed, enabled=self.configuration.enabled).differences(self.configuration):
            logger.warning(
                "In %s: %s. Only dump_enable is read while a program runs; the rest holds for the next one.",
                changed.file, "; ".join(differences),
            )  # fmt: skip
        self.configuration = replace(self.configuration, enabled=changed.enabled)

    def _set_model(self, model: Any) -> None:
        if model is None or model is self._model:
            return
        if self._recorder is not None and self.configuration.level in ("L0", "mix"):
            raise RecordError(
                f"start() was given another model than before ({type(model).__name__}). A debugger dumps one model, or "
                "one list of models: make another debugger, with its own dump_path, for the second."
            )
        self._model = model

    def _recorded_model(self) -> Any:
        model = self._model
        if isinstance(model, list | tuple):
            return {str(number): part for number, part in enumerate(model)}
        if model is not None:
            return model
        if self.configuration.level in ("L0", "mix"):
            raise RecordError(
                f"level is {self.configuration.level!r}, which is about the modules of a model, and no model was "
                "given. Pass it: debugger.start(model)."
            )
        return None

    def _open(self, model: Any, rank: int | None) -> BaseRecorder:
        """Start a recorder. Without a model it finds the modules that functions are called in."""
        configuration = self.configuration
        if model is None:
            from torch import nn

            # a model that is never called: functions and saved values are recorded without one
            adapter = adapter_for(nn.Module(), discovers=configuration.level != "debug", spelled=True)
        else:
            adapter = adapter_for(model, spelled=True)
        if not self._overwrite and next(configuration.dump_path.glob("step*/rank*"), None) is not None:
            logger.warning(
                "%s holds a dump already. What is dumped again replaces the same step.", configuration.dump_path
            )
        writer: WriterFactory = live_writer(_translator(configuration, adapter.raw_names()))
        settings = recording_options(configuration)
        if rank is not None:  # `start` has checked it against `ranks`
            writer = _WithRank(writer, rank)
            settings["ranks"] = None
        recorder = BaseRecorder.discovering(
            configuration.dump_path, adapter, overwrite=self._overwrite, writer=writer, **settings
        ).start()
        if self._skipped:
            with recorder.pause():
                for _ in range(self._skipped):
                    recorder.step()
        return recorder


def recording_options(configuration: Configuration) -> RecordingOptions:
    """The recorder's options for a configuration."""
    structure = configuration.task == "structure"
    values = configuration.task in ("tensor", "overflow_check") or configuration.md5 or bool(configuration.tensors)
    roles = {"state"} if structure else set(configuration.roles)
    if not structure and configuration.level != "L1":
        roles |= {"parameter", "gradient"}
    phases = configuration.phases | {"forward"}  # a backward call is numbered by its forward call
    updates = "forward" in configuration.phases and configuration.level in ("L1", "mix")
    if updates:
        phases |= {"update"}  # to msprobe, functions inside of an optimizer's step are functions like others
    return RecordingOptions(
        level=_LEVELS[configuration.level],
        keep="tensors" if values else "fingerprint" if structure else "stats",
        steps=list(configuration.steps),
        ranks=list(configuration.ranks),
        phases=sorted(phases),
        optimizer="calls" if updates else None,
        roles=sorted(roles),
        functions=configuration.functions,
    )


def _translator(configuration: Configuration, wrapped: dict[str, str]) -> TranslatorFactory:
    return partial(
        translate,
        task="md5" if configuration.md5 and configuration.task == "statistics" else _TASKS[configuration.task],
        level=configuration.level,
        make_selector=(lambda: EntryFilter(configuration)) if EntryFilter.is_needed(configuration) else None,
        with_values=partial(_contains_any, configuration.tensors) if configuration.tensors else None,
        most_overflows=configuration.overflows,
        extra_info=configuration.extra_info,
        rounded=True,
        wrapped=wrapped,
        replace_steps=True,
    )


class _WithRank:
    """Opens the writer of the rank that the program passed to `start`."""

    def __init__(self, opens: WriterFactory, rank: int) -> None:
        self._opens, self._rank = opens, rank

    def __call__(self, path: Path, rank: int, *, info: RunInfo, **known: Any) -> BackgroundWriter:  # noqa: ARG002 - replaced
        world_size = max(info.world_size, self._rank + 1, 2)  # a program that passes its rank has others
        info = msgspec.structs.replace(info, world_size=world_size)
        return self._opens(path, self._rank, info=info, **known)


def _contains_any(parts: Sequence[str], name: str) -> bool:
    return any(part in name for part in parts)
