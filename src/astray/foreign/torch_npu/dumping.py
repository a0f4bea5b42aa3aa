"""The recordings behind `register_hook`: one that writes values into a file, one that fills a folder of arrays.

torch_npu's recordings have no end, write one file for all models, and may be given another file at any time. So a
recording here runs until the program ends, over all models that were registered; a further model begins it anew on the
same file, and another file takes the place of the last without the recording being touched. `schedule` says which steps
are dumped, and `step_schedule` counts them as the program tells it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from astray.capture.adapters import Adapter, adapter_for
from astray.capture.recorder import BaseRecorder
from astray.errors import RunExists, UsageError
from astray.foreign.live_writer import live_writer
from astray.foreign.torch_npu import lines
from astray.foreign.torch_npu.names import SAMPLE
from astray.foreign.torch_npu.writer import DumpForm, TorchNpuTranslator, first_positions, place_of, translate
from astray.log import logger
from astray.process import absolute, rank_and_world_size
from astray.store.run_info import RunInfo

if TYPE_CHECKING:
    import torch


_running: list[DumpRecorder] = []


class DumpRecorder:
    """What is dumped in one of the two forms, from the first model and the first path on.

    arrays: a folder of numpy's files, and not a file of lines.
    """

    def __init__(self, *, arrays: bool = False) -> None:
        self._arrays = arrays
        self._forget()

    def _forget(self) -> None:
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
        """Dump this model too, and where, if that is known. What was said for the last one holds for all."""
        adapter_for(model)  # which says what is wrong with it
        self._models = [*(one for one in self._models if one is not model), model]
        self._sample, self._schedule = sample, schedule or every_step
        if self._form is not None:
            self._form.sample = sample and not self._arrays
        self._end()
        if path is not None and path != self._path:
            self._path, self._form = path, None
        _run(self)
        self._begin()

    def turn_to(self, path: Path) -> None:
        """What comes from here on goes there."""
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
        """Wait until everything that has run is in the file. A step may end anywhere: the file knows of none."""
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
        self._forget()

    # -- the recording -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._path is None or not self._models:
            return
        one = self._models[0] if len(self._models) == 1 else {str(i): model for i, model in enumerate(self._models)}
        self._adapter = adapter_for(one, detects_steps=True)
        if self._form is None:
            self._form = self._new_form(self._path)
        self._recorder = BaseRecorder.discovering(
            self._path,
            self._adapter,
            writer=live_writer(self._translate, first_positions),
            level="function",
            keep="sample" if self._takes_first else "tensors",
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
    def _takes_first(self) -> bool:
        """Whether of each tensor the first values are enough: the rest need not leave the device."""
        return self._sample and not self._arrays

    def _translate(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> TorchNpuTranslator:  # noqa: ARG002
        assert self._form is not None, "made before the recording begins"
        self._translator = TorchNpuTranslator(self._form, first_only=self._takes_first)
        return self._translator

    def _new_form(self, path: Path) -> DumpForm:
        rank, world_size = _rank_and_world_size(self._adapter)
        place = place_of(path, rank, world_size, folder=self._arrays)
        if not self._arrays and place.is_file() and place.stat().st_size and not lines.recognises(place):
            raise RunExists(f"{place} is there already, and is no dump. Choose another name, or remove it.")
        info = RunInfo(astray="", created="", world_size=world_size)
        return translate(path, rank, info, overwrite=True, sample=self._sample, arrays=self._arrays).form

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """A step is over, and this is the number of the next."""
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


def dump_path(given: str | os.PathLike[str] | None) -> Path:
    """The path of a dump, checked."""
    if given is None or not str(given):
        raise UsageError(f"{given!r} is no name of a file. Give one, such as './npu_model.pkl'.")
    path = Path(given)
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file in it, such as {path / 'npu_model.pkl'}.")
    return absolute(path)


def settle() -> None:
    """Wait until everything that has run is in the files."""
    for dumping in _running:
        dumping.settle()


def _run(dumping: DumpRecorder) -> None:
    """See to it that it hears of steps, and is stopped when the program ends."""
    if dumping not in _running:
        _running.append(dumping)
        step_schedule.listeners.append(dumping.step)
        atexit.register(dumping.stop)


def _rank_and_world_size(adapter: Adapter | None) -> tuple[int, int]:
    known = adapter.rank_and_world_size() if adapter is not None else None
    return known or rank_and_world_size(os.environ)


Schedule = Callable[[int], bool]


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


def every_step(step: int) -> bool:  # noqa: ARG001 - as a schedule has it
    """The schedule of those who give none."""
    return True


class StepSchedule:
    """Counts steps. Whoever wants to know is told of each: `step_schedule` is the one that programs use."""

    def __init__(self) -> None:
        self.step_num = 0
        self.listeners: list[Callable[[int], None]] = []

    def step(self) -> None:
        """A step is over."""
        self._go_to(self.step_num + 1)

    def reset_step(self) -> None:
        """Counting begins anew, as at the start of an epoch."""
        self._go_to(0)

    def _go_to(self, step: int) -> None:
        self.step_num = step
        for listener in self.listeners:
            listener(step)


step_schedule = StepSchedule()
