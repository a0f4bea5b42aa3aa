"""What the function and the op level share: a call is opened, its inputs are recorded, and then its outputs.

Exceptions of our own stay out of the user's program.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunction
from torch._ops import OpOverload

from astray.capture.engine import Engine
from astray.capture.nonfinite_values import ObservedTensor
from astray.capture.pytorch.calls.sites import FunctionSites, is_overriding
from astray.capture.pytorch.gradients import InputEdges, LastNodes, LiveGradients
from astray.capture.pytorch.native.core import OpenCall, _torch
from astray.capture.pytorch.tensors import PLAIN, is_tensor
from astray.capture.pytorch.torch_code import is_machinery
from astray.capture.sites import CallName
from astray.capture.structure import Flattener, ObjectFlattener

Tensors = list[tuple[str, torch.Tensor]]
OutputRecorder = Callable[..., Tensors | None]

_SPELLED: dict[type, Callable[[Any], str]] = {torch.Size: str} | {
    kind: lambda value: f"<torch.{type(value).__name__} {value}>"
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format)
}
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


Mode: Any = _torch.Mode
"""The native base of the modes: torch calls the method that it provides, without running Python code."""


def _set_torch_types() -> None:
    """Gives the native code `is_overriding`, and the class of operators whose `__call__` only calls `_op`, if any."""
    _torch.set_torch_types(OpOverload if OpOverload.__call__.__code__.co_names == ("_op",) else None, is_overriding)


_set_torch_types()


def flattener(
    objects: ObjectFlattener | None = None, too_large: Callable[[str], None] = lambda _: None, spelled: bool = False
) -> Flattener:
    """Finds the tensors among arguments and results of torch.

    spelled: a torch.Size is written differently from a list, and a dtype or a device differently from the text of its
        name.
    """
    return Flattener(_torch, is_tensor, objects, too_large, PLAIN, _VALUES, _SPELLED if spelled else None)


class CalledFunction(CallName, Protocol):
    """A function or op, as its calls are recorded."""

    @property
    def is_plain(self) -> bool:
        """Whether, unless it is given `out`, it only reads its arguments and returns its result."""

    @property
    def is_only_view(self) -> bool:
        """Whether, unless it is given `out`, it only returns a view of its first argument."""

    @property
    def makes_buffers(self) -> bool:
        """Whether its result is often filled later, by a kernel that does not change its version counter."""

    def inputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensors, str]:
        """The input tensors of a call, with their paths, and the structure of its arguments."""

    def outputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensors:
        """The output tensors of a call."""

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors a call writes into."""

    def not_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call does not read: it only writes into them, or only returns views of them."""


class CallCapture:
    """Records the calls of functions or ops; their gradients too when `gradients` is given."""

    def __init__(
        self, engine: Engine, sites: FunctionSites, gradients: LiveGradients | LastNodes | None = None
    ) -> None:
        self._engine = engine
        self._sites = sites
        self.flat = flattener(spelled=isinstance(gradients, LastNodes))
        self.native = _torch.FunctionCalls(
            engine,
            self,
            sites,
            sites.outside_modules,
            self.flat.native,
            gradients,
            InputEdges,
            is_machinery,
            sites.origins,
        )

    def begin(
        self, callee: CalledFunction, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> tuple[OpenCall | None, tuple[Any, ...], dict[str, Any]]:
        """A call starts: the open call, None when it is not recorded, and the arguments it is to be made with."""
        begun: tuple[OpenCall | None, tuple[Any, ...], dict[str, Any]] = self.native.begin(callee, args, kwargs, frame)
        return begun

    def grafted(self, call: OpenCall, callee: CalledFunction, result: Any) -> Any:
        """What takes the place of the result of a call, the same where nothing does."""
        return self.native.grafted(call, callee, result)

    def end(
        self,
        call: OpenCall,
        callee: CalledFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        record_outputs: OutputRecorder | None = None,
    ) -> Tensors | None:
        """A call has returned.

        Its results are recorded by `record_outputs`, if that is given. Returns the tensors that were recorded; None
        when the settings exclude them.
        """
        taken: Tensors | None = self.native.end(call, callee, args, kwargs, result, record_outputs)
        return taken

    def on_nonfinite(
        self, call: OpenCall, callee: CalledFunction, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Tensors
    ) -> None:
        """A call has returned NaN or infinities, and a guard keeps such calls: its tensors are still alive."""
        plain = callee.is_plain and "out" not in kwargs
        inputs, skeleton = self.flat.arguments(args, kwargs) if plain else callee.inputs(self.flat, args, kwargs)
        tensors: list[ObservedTensor] = [("input", *named) for named in inputs]
        tensors += [("output", *named) for named in outputs]
        self._engine.tensors.on_nonfinite(call.seq, tensors, skeleton)

    def call_raised(self, call: OpenCall, error: BaseException) -> None:
        """A call has raised. Checkpointing ends a recomputation by an exception, which is not reported."""
        if call.recorded and not call.recompute:
            self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
        call.input_edges = None
        self._engine.leave(call)

    def allocated(self, result: Any, frame: FrameType | None) -> None:
        """Memory was allocated that is not filled yet. Memory of torch's machinery is filled unseen, and not noted."""
        if self.native.is_machinery(frame):
            return
        try:
            with DisableTorchFunction():
                for _, tensor in self.flat.result(result):
                    self._engine.tensors.allocated(tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("memory that is not filled yet", error)
