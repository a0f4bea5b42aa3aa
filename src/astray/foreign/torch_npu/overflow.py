"""The guard behind `wrap_checkoverflow_hook`: stops at the very call that makes NaN or infinity, and saves its tensors.

The guard leaves the program by something that no program catches. People expect an error, so a mode of torch's, which
sees every function around the guard's own, turns one into the other.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import adapter_for
from astray.errors import AstrayError
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.names import order, stem, written_path
from astray.foreign.torch_npu.writer import CallTensor, line
from astray.guarding.exact import ExactStop
from astray.guarding.guard import Guard
from astray.guarding.trip import Trip
from astray.log import logger
from astray.process import rank_and_world_size
from astray.stats import DTYPES
from astray.store import RankRun, open_run

if TYPE_CHECKING:
    import torch

    from astray.capture.pytorch.calls.modes import Modes


class Overflow(AstrayError, ValueError):  # noqa: N818 - reads as the fact it states
    """A call has made NaN or infinity. `trip` has what is known of it, `path` the file with its tensors."""

    def __init__(self, call: str, trip: Trip, path: Path | None) -> None:
        saved = "" if path is None else f" Its stack, inputs and outputs are in {path}."
        super().__init__(f"Overflow in {call}.{saved}\n{trip}")
        self.call = call
        self.trip = trip
        self.path = path


class OverflowCheck:
    """The check, from the first model on, over all that were registered. It is over when it has found something."""

    def __init__(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._guard: Guard | None = None
        self._modes: Modes | None = None

    def add(self, model: torch.nn.Module) -> None:
        """Check this model too."""
        adapter_for(model)  # which says what is wrong with it
        models = [*(one for one in self._models if one is not model), model]
        self.stop()
        self._models = models
        one = models[0] if len(models) == 1 else {str(i): each for i, each in enumerate(models)}
        self._guard = Guard(one, exact=True, level="function", remember=1, path=_place_for_runs()).start()
        self._modes = _translating(self._found)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Remove every hook."""
        atexit.unregister(self.stop)
        guard, modes = self._guard, self._modes
        self._models, self._guard, self._modes = [], None, None
        if modes is not None:
            modes.switch(False)
        if guard is not None:
            guard.stop()

    def _found(self, stop: ExactStop) -> BaseException:
        """The error in place of what the guard has raised."""
        guard, self._guard = self._guard, None
        if guard is None:
            return stop
        trip = guard.stop_after(stop)[0]
        rank = open_run(trip.path).ranks.get(guard.rank) if trip.path is not None else None
        if rank is None or not len(rank.tensors):  # it could not be written; the trip says what is known
            return Overflow("a call that could not be saved", trip, None)
        call, lines = _told(rank)
        path = _free_name()
        try:
            path.write_text("".join(lines))
        except OSError as error:
            logger.warning("%s", f"{path} cannot be written: {error.strerror}. {trip.path} has the same.")
            return Overflow(call, trip, None)
        return Overflow(call, trip, path.resolve())


def _translating(found: Callable[[ExactStop], BaseException]) -> Modes:
    """Puts a mode in place that raises what `found` makes of the guard's stop."""
    from torch.overrides import TorchFunctionMode

    from astray.capture.pytorch.calls.modes import Modes
    from astray.capture.pytorch.compiled.code import never_compiled

    class TensorTranslator(TorchFunctionMode):
        @never_compiled
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return func(*args, **(kwargs or {}))
            except ExactStop as stop:
                error = found(stop)
            raise error

    modes = Modes()
    modes.use([TensorTranslator()])
    modes.switch(True)
    return modes


def _told(rank: RankRun) -> tuple[str, Iterator[str]]:
    """The name of the call that was observed last, and the lines that tell of it."""
    calls, tensors = rank.calls, rank.tensors
    call = calls.row(int(rank.call_rows[len(tensors) - 1]))
    frames = [] if call["stack"] is None else rank.stack(call["stack"])
    code = frames[0].code if frames else ""
    called = stem(call["kind"], call["type"], code) or call["type"]
    name = f"{called}_{'backward' if call['phase'] == 'backward' else 'forward'}"

    def lines() -> Iterator[str]:
        for i, frame in enumerate(frames):
            text = f"{frame.file}:{frame.line} in {frame.function}    {frame.code}"
            yield f"[{numbers.text(f'{name}_stack_info.{i}')}, {numbers.text(text)}]\n"
        kept = []
        for row in range(len(tensors)):
            values = rank.values(row) if tensors.numbers("seq")[row] == call["seq"] else None
            if values is not None and tensors["dtype"][row] in DTYPES:
                of = tensors.row(row)
                function = call["site"].rpartition("/")[2]
                side, place = written_path(function, of["role"], of["path"], call["phase"])
                plain = numbers.as_numbers(values, of["dtype"])
                kept.append(CallTensor(side, place, of["dtype"], of["shape"], plain))
        for one in sorted(kept, key=lambda one: (one.side, order(one.path))):
            yield line(f"{name}_{one.side}{'.' * bool(one.path)}{one.path}", one)

    return name, lines()


def _place_for_runs() -> Path | None:
    """Where the guard writes a run: a folder that no other check has had; None where several ranks have to agree."""
    if rank_and_world_size(os.environ)[1] > 1:
        return None
    return _unused(Path("astray-guard", f"overflow-{_stamp()}-{os.getpid()}"), "")


def _free_name() -> Path:
    """A file in the working directory that no other rank, and no earlier check, has written."""
    rank, world_size = rank_and_world_size(os.environ)
    return _unused(Path(f"Overflow_info_{_stamp()}{f'_rank{rank}' if world_size > 1 else ''}"), ".pkl")


def _stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d_%H%M%S")


def _unused(path: Path, ending: str) -> Path:
    names = (path.with_name(f"{path.name}{f'_{i}' if i else ''}{ending}") for i in itertools.count())
    return next(name for name in names if not name.exists())
