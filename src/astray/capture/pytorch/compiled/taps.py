"""Records the calls inside compiled code (`compiled="modules"`): the hooks leave operators of ours in the graph.

Used by `modules`. The hooks are traced, and put `enter` and `leave` into the graph. When autograd is traced, these two
find out where gradients will pass, and put `gradient` there. When the graph runs, each hands its tensors to the
recording, in order. They change no number, but the compiler cannot fuse across them, and so may round differently.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch._functorch.config as functorch
from torch import nn
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch.compiler import is_compiling

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.compiled.operators import NO_CALL, SEPARATOR, NamedCall, define, recordings
from astray.capture.pytorch.hooks import TransparentHook
from astray.capture.pytorch.native.core import OpenCall, Site
from astray.capture.pytorch.torch_code import TORCH

_OURS = (TORCH, f"{Path(__file__).parent}{os.sep}")


class Taps:
    """What the operators call in a recording: `RecordingHooks`.

    `find` returns the site of a name and its module, `state` records the parameters and buffers of the module.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self,
        engine: Engine,
        find: Callable[[str], tuple[Site, nn.Module] | None],
        state: Callable[[Site, nn.Module, int], None],
    ) -> None:
        define()
        self._engine = engine
        self._find = find
        self._state = state
        self._calls: dict[int, _FinishedCall] = {}
        self._ids = itertools.count()
        self._hidden: set[str] = set()
        self._entered = False
        self.number = next(self._numbers)
        recordings[self.number] = self
        # A graph that comes from the disk has not been traced, and only then is it known what has to be left out of it.
        self._cached = functorch.enable_autograd_cache
        functorch.enable_autograd_cache = False
        if "torch._dynamo" in sys.modules:  # what is compiled already has no operators, and would be used again
            sys.modules["torch._dynamo"].reset()

    def put(self, module: nn.Module, site: str) -> list[Any]:
        """Makes the calls of a module leave operators in every graph they are compiled into."""
        return [
            module.register_forward_pre_hook(_TapBefore(site, self.number), with_kwargs=True),
            module.register_forward_hook(_TapAfter(site, self.number), with_kwargs=True),
        ]

    def next_step(self) -> None:
        """Forgets calls, except those of the step that ends, which may still wait for gradients."""
        self._calls = {number: call for number, call in self._calls.items() if call.step == self._engine.step}

    def remove(self) -> None:
        functorch.enable_autograd_cache = self._cached
        recordings.pop(self.number, None)
        self._calls.clear()

    def enter(self, name: str, inputs: NamedCall) -> None:
        engine, known = self._engine, self._find(name)
        if not engine.recording or known is None:
            return
        if not self._entered:
            self._entered = True
            why = "the compiler cannot fuse across the operators that show the calls inside, which may change roundings"
            engine.missed("compiled code as it is without astray", why)
        site, module = known
        outer = engine.innermost(site)
        if outer is not None and outer.runs_inner is False:  # its wrapper's call, which is recorded already
            outer.runs_inner = True
            return
        around = engine.enclosing
        frame = None if around is None else around.frame  # it has none of its own: the graph runs as a whole
        call = engine.enter(site, frame or _caller(), recompute=_in_backward())
        if call.recorded and call.seq != NO_ROW:
            engine.begin(call, None)
            self._observe(call.seq, "input", inputs)
            self._state(site, module, call.seq)

    def leave(self, name: str, outputs: NamedCall) -> int:
        engine, known = self._engine, self._find(name)
        call = None if known is None else engine.innermost(known[0])
        if call is None:
            return NO_CALL
        if call.runs_inner:
            call.runs_inner = False
            return NO_CALL
        if call.recorded and call.seq != NO_ROW:
            self._observe(call.seq, "output", outputs)
        engine.leave(call)
        number = next(self._ids)
        self._calls[number] = _FinishedCall(call)
        return number

    def gradient(self, number: int, role: Any, path: str, gradient: torch.Tensor) -> None:
        recorded = self._calls.get(number)
        if recorded is not None and self._engine.listening:
            self._observe(recorded.backward(self._engine, role, path), role, [(path, gradient)])

    def _observe(self, seq: int, role: Any, tensors: NamedCall) -> None:
        for path, tensor in tensors:
            self._engine.tensors.changed(tensor)  # compiled code reuses memory without changing the version counter
            self._engine.tensors.observe(seq, role, path, tensor)

    def note_hidden(self, name: str) -> None:
        """A call is traced where no operator is allowed: reported once for each module."""
        if name not in self._hidden:
            self._hidden.add(name)
            why = (
                "no operator of ours can be in what torch.compile checkpoints, vectorises, makes a branch or replays "
                "as a CUDA graph"
            )
            self._engine.missed(f"calls of {name} in compiled code", why)

    def guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """Runs one observation, and keeps its exceptions out of the compiled code."""
        if not self._engine.in_own_process:
            return None
        try:
            with DisableTorchFunction(), _DisableTorchDispatch():  # what is done here is not part of the program
                return action(*args)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("a call inside compiled code", error)
            return None


class _FinishedCall:
    """A call that has ended, and its current backward."""

    __slots__ = ("_call", "_seen", "_seq")

    def __init__(self, call: OpenCall) -> None:
        self._call = call
        self._seen: set[tuple[str, str]] = set()
        self._seq: int | None = None

    @property
    def step(self) -> int:
        return self._call.step

    def backward(self, engine: Engine, role: str, path: str) -> int:
        if self._seq is None or (role, path) in self._seen:  # a second backward through the same graph
            self._seq = engine.backward(self._call)
            self._seen.clear()
        self._seen.add((role, path))
        return self._seq


def _caller() -> FrameType:
    """The innermost frame of the program itself, which exists until its compiled code has run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_not_the_programs(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_not_the_programs(file: str) -> bool:
    return file.startswith((*_OURS, "<")) or "torchinductor" in file  # code that was generated


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


# -- traced by dynamo --------------------------------------------------------------------------------------------


class _Tap(TransparentHook):
    """A hook that does something only while it is traced, written so that dynamo can trace it without a graph break.

    It reads the export flag itself, since dynamo up to 2.11 evaluates `is_exporting` as always true.
    """

    def __init__(self, site: str, number: int) -> None:
        self.site = site
        self.number = number


class _TapBefore(_Tap):
    @never_compiled
    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling() and not torch.compiler._is_exporting_flag:
            tensors: list[torch.Tensor] = []
            paths: list[str] = []
            for index, value in enumerate(args):
                _collect(value, str(index), tensors, paths)
            for name, value in kwargs.items():
                _collect(value, f"kwargs.{name}", tensors, paths)
            torch.ops.astray.enter(tensors, self.site, SEPARATOR.join(paths), self.number)


class _TapAfter(_Tap):
    @never_compiled
    def __call__(self, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if is_compiling() and not torch.compiler._is_exporting_flag:
            tensors: list[torch.Tensor] = []
            paths: list[str] = []
            _collect(result, "out", tensors, paths)
            torch.ops.astray.leave(tensors, self.site, SEPARATOR.join(paths), self.number)


def _collect(value: Any, path: str, tensors: list[torch.Tensor], paths: list[str]) -> None:
    """Makes the same paths as `Flattener`, which dynamo cannot trace."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        paths.append(path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}.{key}", tensors, paths)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(item, f"{path}.{index}", tensors, paths)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name, None), f"{path}.{name}", tensors, paths)
