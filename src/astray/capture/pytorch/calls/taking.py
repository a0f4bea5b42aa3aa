"""What the function and the op level have in common: a call is opened, its inputs taken, and then its outputs.

Whatever goes wrong in here stays out of the user's program.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunction

from astray.capture.engine import NOT_WRITTEN, Engine, OpenCall
from astray.capture.pytorch.calls.places import Named, Places
from astray.capture.pytorch.tensors import is_tensor
from astray.capture.structure import Flattener

Tensors = list[tuple[str, torch.Tensor]]


class Callee(Named, Protocol):
    """A function or op, as its calls are recorded."""

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
    """Takes the calls of functions or ops into a recording."""

    def __init__(self, engine: Engine, places: Places) -> None:
        self._engine = engine
        self._places = places
        self.flat = Flattener(is_tensor)

    def begin(
        self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> tuple[OpenCall | None, Tensors]:
        """A call starts: what the calls inside it need to know of it, and its inputs. None when it is not for us."""
        engine, call = self._engine, None
        try:
            with DisableTorchFunction():  # what is done here is no part of the program
                call = self._places.enter(callee, frame)
                if call is None or not call.recorded:
                    return call, []
                inputs, skeleton = callee.inputs(self.flat, args, kwargs)
                if call.seq != NOT_WRITTEN:
                    engine.begin(call, skeleton)
                    engine.observe_inputs(call.seq, inputs, callee.not_read(args, kwargs))
                return call, inputs
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed(f"a call of {callee.type}", error)
            if call is not None:
                engine.leave(call)  # or whatever follows would seem to be inside it
            return None, []

    def end(self, call: OpenCall, callee: Callee, take: Callable[..., object], *given: Any) -> None:
        """A call has returned: its results are taken by `take(call, callee, *given)`, if it is recorded."""
        try:
            if call.recorded:
                with DisableTorchFunction():
                    take(call, callee, *given)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the result of {callee.type}", error)
        finally:
            self._engine.leave(call)

    def take_outputs(
        self, call: OpenCall, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Tensors:
        """Records what a call gives, and returns it."""
        engine = self._engine
        for tensor in callee.written(args, kwargs):
            engine.written(tensor)
        outputs = callee.outputs(self.flat, args, kwargs, result)
        for path, tensor in outputs:
            engine.observe_unread(call.seq, "output", path, tensor)
            if callee.makes_buffers:
                engine.changed(tensor)
        return outputs

    def abandon(self, call: OpenCall, error: BaseException) -> None:
        """A call has raised. Checkpointing stops work done again by an exception of its own."""
        if call.recorded and not call.recompute:
            self._engine.missed(f"the output of {call.site.name}", f"it raised {type(error).__name__}")
        self._engine.leave(call)

    def made(self, result: Any, frame: FrameType) -> None:
        """Memory was made that nobody has filled yet. Who fills that of torch's machinery will not be seen."""
        if self._places.infrastructure.calls(frame):
            return
        try:
            with DisableTorchFunction():
                for _, tensor in self.flat.result(result):
                    self._engine.made(tensor)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed("memory that is not filled yet", error)
