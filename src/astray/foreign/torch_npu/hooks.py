"""`register_hook` and `set_dump_path`, the recordings behind them, and the schedule of the steps they dump.

`wrap_acc_cmp_hook` writes values into a file, `wrap_async_datadump_hook` fills a folder of arrays, and
`wrap_checkoverflow_hook` is in `overflow.py`. torch_npu's recordings have no end, write one file for all models, and
may be given another file at any time. So a recording runs until the program ends, over all registered models:
registering another model restarts it on the same file, and another file replaces the current one without a restart. A
`schedule` selects the steps that are dumped; the program counts them with `step_schedule`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from astray.capture.adapters import Adapter, adapter_for
from astray.capture.recorder import BaseRecorder
from astray.errors import RunExists, UsageError
from astray.experiment import seed_all
from astray.foreign.live_writer import live_writer
from astray.foreign.torch_npu import lines
from astray.foreign.torch_npu.names import SAMPLE
from astray.foreign.torch_npu.overflow import OverflowCheck
from astray.foreign.torch_npu.writer import DumpForm, TorchNpuTranslator, first_positions, rank_path, translate
from astray.log import logger
from astray.process import absolute, rank_and_world_size
from astray.store.run_info import RunInfo

if TYPE_CHECKING:
    import torch


class DumpRecorder:
    """Dumps in one of the two forms, starting when both a model and a path are known.

    arrays: into a folder of .npy files instead of a file of lines.
    """

    def __init__(self, *, arrays: bool = False) -> None:
        self._arrays = arrays
        self._reset()

    def _reset(self) -> None:
        self._path: Path | None = None
        self._models: list[torch.nn.Module] = []
        self._sample = True
        self._schedule: Schedule = every_step
        self._recorder: BaseRecorder | None = None
        self._adapter: Adapter | None = None
        self._translator: TorchNpuTranslator | None = None
        self._form: DumpForm | None = None
        self._paused = False

    def add(self, model: torch.nn.Module, *, sample: bool, schedule: Schedule | None, path: Path | None = None) -> None:
        """Dump this model too, into `path` if given. The options of the last model hold for all."""
        adapter_for(model)  # raises RecordError if it is not a model
        self._models = [*(known for known in self._models if known is not model), model]
        self._sample, self._schedule = sample, schedule or every_step
        if self._form is not None:
            self._form.sample = sample and not self._arrays
        self._end()
        if path is not None and path != self._path:
            self._path, self._form = path, None
        if self not in _active:
            _active.append(self)
            step_schedule.listeners.append(self.step)
            atexit.register(self.stop)
        self._begin()

    def set_path(self, path: Path) -> None:
        """Dump into this path from here on."""
        if self._recorder is None:
            self._path, self._form = path, None
            self._begin()
            return
        self.settle()
        form = self._new_form(path)
        if self._form is not None:
            self._form.close()
        self._path, self._form = path, form
        if self._translator is not None:
            self._translator.form = form

    def settle(self) -> None:
        """Wait until everything that has run is in the file. It ends a step, which the file does not show."""
        if self._recorder is not None:
            self._recorder.step()
            self._recorder.flush()

    def stop(self) -> None:
        """Remove every hook, and forget models and path."""
        if self._models and self._path is None and not self._arrays:
            logger.warning(
                "register_hook was called and set_dump_path was not, so nothing was dumped. Call it with the name of a "
                "file before the model runs."
            )
        self._end()
        self._reset()

    # -- the recording -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._path is None or not self._models:
            return
        models = self._models
        recorded = models[0] if len(models) == 1 else {str(i): model for i, model in enumerate(models)}
        self._adapter = adapter_for(recorded, detects_steps=True)
        if self._form is None:
            self._form = self._new_form(self._path)
        self._recorder = BaseRecorder.discovering(
            self._path,
            self._adapter,
            writer=live_writer(self._translate, first_positions),
            level="function",
            keep="sample" if self._first_only else "tensors",
            samples=SAMPLE,
            roles=("input", "output"),
        )
        self._recorder.start()
        self._paused = False
        self._follow(step_schedule.step_num)

    def _end(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    @property
    def _first_only(self) -> bool:
        """Whether the first values of each tensor are enough: the rest need not leave the device."""
        return self._sample and not self._arrays

    def _translate(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> TorchNpuTranslator:  # noqa: ARG002
        assert self._form is not None, "set before the recording begins"
        self._translator = TorchNpuTranslator(self._form, first_only=self._first_only)
        return self._translator

    def _new_form(self, path: Path) -> DumpForm:
        known = self._adapter.rank_and_world_size() if self._adapter is not None else None
        rank, world_size = known or rank_and_world_size(os.environ)
        own_path = rank_path(path, rank, world_size, folder=self._arrays)
        if not self._arrays and own_path.is_file() and own_path.stat().st_size and not lines.recognises(own_path):
            raise RunExists(f"{own_path} is there already, and is not a dump. Choose another name, or remove it.")
        info = RunInfo(astray="", created="", world_size=world_size)
        return translate(path, rank, info, overwrite=True, sample=self._sample, arrays=self._arrays).form

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """End a step; `number` is that of the next."""
        if self._recorder is None or self._adapter is None:
            return
        self._adapter.let_program_end_steps()
        self._recorder.step()
        self._follow(number)

    def _follow(self, step: int) -> None:
        paused = not self._schedule(step)
        if self._recorder is None or paused == self._paused:
            return
        self._paused = paused
        self._recorder.pause() if paused else self._recorder.resume()


Schedule = Callable[[int], bool]
"""Whether a step is dumped."""


def schedule(begin: int = 0, end: int = sys.maxsize, stride: int = 1) -> Schedule:
    """The steps from `begin` to `end`, both of them included, and every `stride`-th of these.

    >>> [step for step in range(12) if schedule(4, 10, 2)(step)]
    [4, 6, 8, 10]
    """
    if begin < 0 or end < begin or stride < 1:
        raise UsageError(
            f"schedule({begin}, {end}, {stride}) has no step in it. It takes begin ≥ 0, end ≥ begin and stride ≥ 1."
        )
    return range(begin, end + 1, stride).__contains__


def every_step(step: int) -> bool:  # noqa: ARG001 - a Schedule
    """The default schedule."""
    return True


class StepSchedule:
    """Counts steps, and calls its listeners with the number of each. Programs use the instance `step_schedule`."""

    def __init__(self) -> None:
        self.step_num = 0
        self.listeners: list[Callable[[int], None]] = []

    def step(self) -> None:
        """End a step."""
        self._set_step(self.step_num + 1)

    def reset_step(self) -> None:
        """Count from 0 again, as at the start of an epoch."""
        self._set_step(0)

    def _set_step(self, step: int) -> None:
        self.step_num = step
        for listener in self.listeners:
            listener(step)


step_schedule = StepSchedule()


# -- what programs call ------------------------------------------------------------------------------------------------


class HookOptions(Enum):
    """What `register_hook` can do."""

    VALUES = "wrap_acc_cmp_hook"
    ARRAYS = "wrap_async_datadump_hook"
    OVERFLOW = "wrap_checkoverflow_hook"

    @property
    def __name__(self) -> str:
        return self.value


wrap_acc_cmp_hook = HookOptions.VALUES
wrap_async_datadump_hook = HookOptions.ARRAYS
wrap_checkoverflow_hook = HookOptions.OVERFLOW

_values = DumpRecorder()
_arrays = DumpRecorder(arrays=True)
_check = OverflowCheck()
_active: list[DumpRecorder] = []
"""The recorders that have been started: they listen to `step_schedule`, and are stopped when the program ends."""


def set_dump_path(fpath: str | os.PathLike[str] | None = None) -> None:
    """Set the file into which `wrap_acc_cmp_hook` dumps from here on; an older dump there is replaced.

    May be called again: what follows goes to the new file, numbered from 0. With several ranks each writes a file of
    its own: `npu.pkl` becomes `npu_rank0.pkl`.
    """
    if fpath is None or not str(fpath):
        raise UsageError(f"{fpath!r} is not the name of a file. Give one, such as './npu_model.pkl'.")
    path = Path(fpath)
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file in it, such as {path / 'npu_model.pkl'}.")
    _values.set_path(absolute(path))


def register_hook(
    model: torch.nn.Module,
    hook: HookOptions,
    *,
    sample: bool = True,
    path: str | os.PathLike[str] = "./",
    schedule: Schedule | None = None,
    seed: int = 1234,
    capacity: int | None = None,  # noqa: ARG001 - torch_npu: the length of a queue on the device; there is none here
) -> None:
    """Dump the inputs and outputs of functions, or check them for overflow, until the program ends or calls `stop`.

    >>> register_hook(model, wrap_acc_cmp_hook)
    >>> register_hook(model, wrap_async_datadump_hook, path="./output", schedule=schedule(1, 2))

    hook: `wrap_acc_cmp_hook`, `wrap_async_datadump_hook` or `wrap_checkoverflow_hook`.
    sample: for `wrap_acc_cmp_hook`: the first ten values, maximum, minimum and mean of each tensor, or every value.
    path: for `wrap_async_datadump_hook`: the folder.
    schedule: which steps, as `step_schedule` counts them; all by default. Any function of a step's number will do.
    seed: for `seed_all`, which is called here.
    """
    if not isinstance(hook, HookOptions):
        raise UsageError(f"{hook!r} is not a hook. Give one of {', '.join(option.value for option in HookOptions)}.")
    seed_all(seed)
    if hook is HookOptions.OVERFLOW:
        _check.add(model)
    elif hook is HookOptions.ARRAYS:
        _arrays.add(model, sample=False, schedule=schedule, path=absolute(path))
    else:
        _values.add(model, sample=sample, schedule=schedule)


def settle() -> None:
    """Wait until everything that has run is in the files."""
    for recorder in _active:
        recorder.settle()


def stop() -> None:
    """End every recording and check, and remove every hook. Happens by itself when the program ends."""
    _values.stop()
    _arrays.stop()
    _check.stop()
