"""The states of the random generators that a call draws from, kept with its tensors: it can be executed again later.

Used by `functions`, for functions that may draw and only where tensors are kept. The states are tensors of the call in
the role `state`, under the paths `records.GENERATOR`. A generator is read before and after the call, and nothing is
written of one that has not moved. Nothing is drawn, and no device is waited for: the state of a GPU's generator is a
seed and a count in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunction

from astray.capture.engine import Engine
from astray.capture.observer import NO_ROW
from astray.capture.pytorch.native.core import OpenCall
from astray.interrupts import pass_interrupt
from astray.records import GENERATOR

_DRAWING_INSIDE = frozenset(
    """
    dropout1d dropout2d dropout3d gumbel_softmax multi_head_attention_forward fractional_max_pool2d
    fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices svd_lowrank pca_lowrank
    """.split()  # noqa: SIM905 - a list of quoted words is harder to read
)
"""Functions in Python that draw by calling others. No operator has their names."""


def may_draw(function: Callable[..., Any]) -> bool:
    """Whether a function of torch draws random numbers with some arguments: one of its operators is tagged so."""
    name = getattr(function, "__name__", "")
    if name in _DRAWING_INSIDE:
        return True
    operator: Any = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    overloads: Any = getattr(operator, "overloads", tuple)()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, each).tags for each in overloads)


class GeneratorStates(NamedTuple):
    """The generators that a call may draw from, and their states before it."""

    before: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def of(
        cls, engine: Engine, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GeneratorStates | None:
        """Reads them. None where values are not kept, or none can be read."""
        if not call.recorded or call.seq == NO_ROW or "tensors" not in engine.settings.keep:
            return None
        try:
            with DisableTorchFunction(), torch._C._DisableTorchDispatch():  # recording is not part of the program
                return cls([(each, each.get_state()) for each in _generators(args, kwargs)])
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            pass_interrupt(error)
            engine.missed("the state of a random generator", f"{type(error).__name__}: {error}")
            return None

    def record(self, engine: Engine, call: OpenCall) -> None:
        """The call has returned: records the generator that it has drawn from."""
        try:
            with DisableTorchFunction(), torch._C._DisableTorchDispatch():
                for generator, before in self.before:
                    after = generator.get_state()
                    if bytes(before.numpy()) != bytes(after.numpy()):
                        for path, state in zip(GENERATOR, (before, after), strict=True):
                            engine.tensors.observe(call.seq, "state", path, state)
                        return
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            engine.failed("the state of a random generator", error)


def _generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Generator]:
    """The generator among the arguments, or else the one of the process and those of the devices that are named."""
    values = [*args, *kwargs.values()]
    given = [value for value in values if isinstance(value, torch.Generator)]
    if given:
        yield given[0]
        return
    yield torch.default_generator
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    devices += [torch.device(kwargs["device"]) if kwargs.get("device") is not None else torch.get_default_device()]
    for kind, index in {(device.type, device.index) for device in devices if device.type not in ("cpu", "meta")}:
        backend = getattr(torch, kind, None)
        known = getattr(backend, "default_generators", ())
        if backend is None or not known or _is_capturing(backend):
            continue
        yield known[backend.current_device() if index is None else index]


def _is_capturing(backend: Any) -> bool:
    """Whether kernels are recorded into a graph: then the generator has no state of its own."""
    asked = getattr(backend, "is_current_stream_capturing", None)
    return asked is not None and bool(asked())
