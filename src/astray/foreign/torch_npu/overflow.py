"""The guard behind `wrap_checkoverflow_hook`: stops at the very call that makes NaN or infinity, and saves its tensors.

The guard stops a program with `ExactStop`, a BaseException that programs do not catch. Users of this hook expect an
ordinary error, so a TorchFunctionMode around the guard's own replaces it by `Overflow`.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import adapter_for
from astray.errors import AstrayError
from astray.foreign.torch_npu.lines import as_numbers
from astray.foreign.torch_npu.names import path_order, stem, written_path
from astray.foreign.torch_npu.writer import CallTensor, format_line
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
    """A call has made NaN or infinity. `trip` describes it, `path` is the file with its tensors."""

    def __init__(self, call: str, trip: Trip, path: Path | None) -> None:
        saved = "" if path is None else f" Its stack, inputs and outputs are in {path}."
        super().__init__(f"Overflow in {call}.{saved}\n{trip}")
        self.call = call
        self.trip = trip
        self.path = path


class OverflowCheck:
    """Checks all registered models, from the first registration until an overflow is found."""

    def __init__(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._guard: Guard | None = None
        self._modes: Modes | None = None

    def add(self, model: torch.nn.Module) -> None:
        """Check this model too."""
        adapter_for(model)  # raises RecordError if it is not a model
        models = [*(known for known in self._models if known is not model), model]
        self.stop()
        self._models = models
        watched = models[0] if len(models) == 1 else {str(i): each for i, each in enumerate(models)}
        self._guard = Guard(watched, exact=True, level="function", remember=1, path=_snapshot_path()).start()
        self._modes = _replace_stops(self._overflow)
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

    def _overflow(self, stop: ExactStop) -> BaseException:
        """The error to raise in place of the guard's stop."""
        guard, self._guard = self._guard, None
        if guard is None:
            return stop
        trip = guard.stop_after(stop)[0]
        rank = open_run(trip.path).ranks.get(guard.rank) if trip.path is not None else None
        if rank is None or not len(rank.tensors):  # it could not be written; the trip describes what is known
            return Overflow("a call that could not be saved", trip, None)
        call, lines = _last_call(rank)
        path = _tensors_path()
        try:
            path.write_text("".join(lines))
        except OSError as error:
            logger.warning("%s", f"{path} cannot be written: {error.strerror}. {trip.path} has the same.")
            return Overflow(call, trip, None)
        return Overflow(call, trip, path.resolve())


def _replace_stops(error_for: Callable[[ExactStop], BaseException]) -> Modes:
    """Enter a mode that raises `error_for(stop)` in place of the guard's stop."""
    from torch.overrides import TorchFunctionMode

    from astray.capture.pytorch.calls.modes import Modes
    from astray.capture.pytorch.compiled.dynamo import never_compiled

    class StopReplacement(TorchFunctionMode):
        @never_compiled
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return func(*args, **(kwargs or {}))
            except ExactStop as stop:
                error = error_for(stop)
            raise error

    modes = Modes()
    modes.use([StopReplacement()])
    modes.switch(True)
    return modes


def _last_call(rank: RankRun) -> tuple[str, Iterator[str]]:
    """The name of the call that was observed last, and its stack and tensors as lines of a dump."""
    calls, tensors = rank.calls, rank.tensors
    call = calls.row(int(rank.call_rows[len(tensors) - 1]))
    frames = [] if call["stack"] is None else rank.stack(call["stack"])
    code = frames[0].code if frames else ""
    function_name = stem(call["kind"], call["type"], code) or call["type"]
    name = f"{function_name}_{'backward' if call['phase'] == 'backward' else 'forward'}"

    def lines() -> Iterator[str]:
        for i, frame in enumerate(frames):
            text = f"{frame.file}:{frame.line} in {frame.function}    {frame.code}"
            yield f"[{json.dumps(f'{name}_stack_info.{i}')}, {json.dumps(text)}]\n"
        kept = []
        for row in range(len(tensors)):
            values = rank.values(row) if tensors.numbers("seq")[row] == call["seq"] else None
            if values is not None and tensors["dtype"][row] in DTYPES:
                cells = tensors.row(row)
                function = call["site"].rpartition("/")[2]
                side, position = written_path(function, cells["role"], cells["path"], call["phase"])
                numbers = as_numbers(values, cells["dtype"])
                kept.append(CallTensor(side, position, cells["dtype"], cells["shape"], numbers))
        for tensor in sorted(kept, key=lambda tensor: (tensor.side, path_order(tensor.path))):
            yield format_line(f"{name}_{tensor.side}{'.' * bool(tensor.path)}{tensor.path}", tensor)

    return name, lines()


def _snapshot_path() -> Path | None:
    """The folder of the guard's snapshot, used by no other check; None with several ranks, which have to agree."""
    if rank_and_world_size(os.environ)[1] > 1:
        return None
    return _unused(Path("astray-guard", f"overflow-{_stamp()}-{os.getpid()}"), "")


def _tensors_path() -> Path:
    """A file in the working directory that no other rank and no earlier check has written."""
    rank, world_size = rank_and_world_size(os.environ)
    return _unused(Path(f"Overflow_info_{_stamp()}{f'_rank{rank}' if world_size > 1 else ''}"), ".pkl")


def _stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d_%H%M%S")


def _unused(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}{f'_{i}' if i else ''}{suffix}") for i in itertools.count())
    return next(name for name in names if not name.exists())
