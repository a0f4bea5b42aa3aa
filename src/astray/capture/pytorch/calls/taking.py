"""What the function and the op level have in common: a call is opened, its inputs taken, and then its outputs.

Whatever goes wrong in here stays out of the user's program.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunction, _current_autograd_node, _current_graph_task_id, _get_tracing_state
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload

from astray.capture.calls import native
from astray.capture.catching import Found
from astray.capture.engine import Engine, OpenCall
from astray.capture.objects import Objects
from astray.capture.observer import NOT_WRITTEN
from astray.capture.pytorch.backward.gradients import InputEdges, LiveGradients
from astray.capture.pytorch.backward.last_nodes import LastNodes
from astray.capture.pytorch.calls.places import Named, Places, is_overriding
from astray.capture.pytorch.tensors import PLAIN, is_tensor
from astray.capture.structure import Flattener

Tensors = list[tuple[str, torch.Tensor]]
Take = Callable[..., Tensors | None]

_NOTHING: list[torch.Tensor] = []
_SPELLED: dict[type, Callable[[Any], str]] = {torch.Size: str} | {
    kind: lambda value: f"<torch.{type(value).__name__} {value}>"
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format)
}
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class _Untold:
    """Stands for the native base of modes where there is none."""


Told: Any = _Untold if native is None else native.Told
"""The other base of the modes: torch gets their method from it, without a line of Python."""


def _equip() -> None:
    """Tells the native part how torch is asked. What this torch does not have is None, and then Python serves."""
    compiler = vars(torch.compiler)
    watching = getattr(getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", None)
    operator = OpOverload if OpOverload.__call__.__code__.co_names == ("_op",) else None
    native.equip(
        DisableTorchFunction, _current_graph_task_id, torch.is_grad_enabled, _get_tracing_state, _get_sequence_nr,
        _current_autograd_node, operator, compiler if "_is_compiling_flag" in compiler else None, watching,
        is_overriding,
    )  # fmt: skip


if native is not None:
    _equip()


def flattener(
    objects: Objects | None = None, too_large: Callable[[str], None] = lambda _: None, spelled: bool = False
) -> Flattener:
    """Finds the tensors among arguments and results of torch.

    spelled: it tells a torch.Size from a list, and a dtype or a device from the text that is its name.
    """
    return Flattener(is_tensor, objects, too_large, PLAIN, _VALUES, _SPELLED if spelled else None)


class Callee(Named, Protocol):
    """A function or op, as its calls are recorded."""

    @property
    def is_plain(self) -> bool:
        """Whether all it does, unless it is given `out`, is to read its arguments and to return its result."""

    @property
    def is_only_view(self) -> bool:
        """Whether all it does, unless it is given `out`, is to look at its first argument in another way."""

    @property
    def makes_buffers(self) -> bool:
        """Whether its result is often filled by a kernel that no version counter knows of."""

    def inputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensors, str]:
        """The tensors a call gets, with their paths, and the structure of its arguments."""

    def outputs(self, flat: Flattener, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensors:
        """The tensors a call gives."""

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors a call writes into."""

    def not_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call does not read: it writes into them, or only looks at them in another way."""


class Taking:
    """Takes the calls of functions or ops into a recording; their gradients too when `gradients` is given."""

    def __init__(self, engine: Engine, places: Places, gradients: LiveGradients | LastNodes | None = None) -> None:
        self._engine = engine
        self._places = places
        self._gradients = gradients
        self.flat = flattener(spelled=isinstance(gradients, LastNodes))
        self.native: Any = None  # does the same for plain calls, and hands over to us what is out of the ordinary
        if native is not None:
            self.native = native.Taking(
                engine, self, places, places.outside, engine.tensors, self.flat.native, gradients, InputEdges,
                places.infrastructure.is_machinery, places.origins,
            )  # fmt: skip

    def begin(
        self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> OpenCall | None:
        """A call starts: what the calls inside it need to know of it. None when it is not for us."""
        engine, call = self._engine, None
        try:
            with DisableTorchFunction():  # what is done here is no part of the program
                call = self._places.enter(callee, frame)
                if call is None or not call.recorded:
                    return call
                has_row = call.seq != NOT_WRITTEN
                watched = self._gradients is not None and call.phase == "forward"
                watched = watched and engine.follows_gradients(call) and torch.is_grad_enabled()
                if has_row or watched:
                    plain = callee.is_plain and "out" not in kwargs
                    found = self.flat.arguments(args, kwargs) if plain else callee.inputs(self.flat, args, kwargs)
                    inputs, skeleton = found
                    if has_row:
                        engine.begin(call, skeleton)
                        unread = _NOTHING if plain else callee.not_read(args, kwargs)
                        engine.tensors.observe_inputs(call.seq, inputs, unread)
                    if watched:
                        call.adapter = InputEdges(inputs)
                return call
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            try:
                engine.failed(f"a call of {callee.type}", error)
            finally:
                if call is not None:
                    engine.leave(call)  # or whatever follows would seem to be inside it
            return None

    def end(
        self,
        call: OpenCall,
        callee: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        take: Take | None = None,
    ) -> Tensors | None:
        """A call has returned. Its results are taken by `take`, if that is not to be done as it always is.

        Gives back what was taken; None when nobody asked for it.
        """
        try:
            if call.recorded:
                with DisableTorchFunction():
                    return (take or self._take_outputs)(call, callee, args, kwargs, result)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the result of {callee.type}", error)
        finally:
            call.adapter = None
            self._engine.leave(call)
        return None

    def _take_outputs(
        self, call: OpenCall, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Tensors | None:
        tensors, seq, edges = self._engine.tensors, call.seq, call.adapter
        plain = callee.is_plain and "out" not in kwargs
        if not plain:
            for tensor in callee.written(args, kwargs):
                tensors.written(tensor)
        if seq == NOT_WRITTEN and edges is None and not callee.makes_buffers:
            return None
        outputs = self.flat.result(result) if plain else callee.outputs(self.flat, args, kwargs, result)
        if seq != NOT_WRITTEN:
            bad = [tensors.observe_unread(seq, "output", path, tensor) for path, tensor in outputs]
            if any(bad):
                self.gave_bad(call, callee, args, kwargs, outputs)
        if callee.makes_buffers:
            for _, tensor in outputs:
                tensors.changed(tensor)
        if edges is not None and self._gradients is not None:
            self._gradients.watch(self._engine, call, edges, outputs)
        return outputs

    def gave_bad(
        self, call: OpenCall, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Tensors
    ) -> None:
        """A call has given NaN or infinities, and somebody wants to know: its tensors are still there."""
        plain = callee.is_plain and "out" not in kwargs
        inputs, skeleton = self.flat.arguments(args, kwargs) if plain else callee.inputs(self.flat, args, kwargs)
        found: list[Found] = [("input", *one) for one in inputs]
        found += [("output", *one) for one in outputs]
        self._engine.tensors.gave_bad(call.seq, found, skeleton)

    def abandon(self, call: OpenCall, error: BaseException) -> None:
        """A call has raised. Checkpointing stops work done again by an exception of its own."""
        if call.recorded and not call.recompute:
            self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
        call.adapter = None
        self._engine.leave(call)

    def made(self, result: Any, frame: FrameType | None) -> None:
        """Memory was made that nobody has filled yet. Who fills that of torch's machinery will not be seen."""
        if self._places.infrastructure.calls(frame):
            return
        try:
            with DisableTorchFunction():
                for _, tensor in self.flat.result(result):
                    self._engine.tensors.made(tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("memory that is not filled yet", error)
