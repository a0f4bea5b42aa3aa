"""Chooses the adapter for what the user wants recorded.

A framework is only touched when the user's program has imported it: a torch model cannot exist where torch is not
loaded, so looking into `sys.modules` is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from astray.capture.settings import Settings
from astray.capture.tensor_reader import TensorReader
from astray.errors import RecordError
from astray.records import Spelling

if TYPE_CHECKING:
    from astray.capture.engine import Engine  # which loads what is built for the framework


class Adapter(Protocol):
    """What the recorder asks of a framework."""

    framework: str
    internal: tuple[str, ...]  # folders whose frames are not part of the user's program
    reader: TensorReader
    spell: Callable[[FrameType], Spelling | None] | None  # how functions were called; None where no format needs it

    def versions(self) -> dict[str, str]: ...

    def devices(self) -> list[str]: ...

    def seed(self) -> int | None: ...

    def raw_names(self) -> dict[str, str]:
        """The sites of modules in models that are wrapped, such as by DDP, with the names that the framework has."""

    def rank_and_world_size(self) -> tuple[int, int] | None:
        """Which process of a distributed program this is; None when the framework does not know."""

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        """Puts the hooks in place. `end_step` is for an adapter that finds the steps by itself."""

    def apply(self, settings: Settings) -> None:
        """Observes at the levels these settings ask for."""

    def listen(self) -> None:
        """Puts in place what the engine wants to hear from now, and takes the rest away."""

    def next_step(self) -> None: ...

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        """Records a value of the program's own, and the gradients that arrive at its tensors."""

    def meet(self, module: Any, args: Any, frame: FrameType) -> None:
        """A module is called, from this frame of the framework's, that was about to be when the recording started."""

    def let_program_pace(self) -> None:
        """The program says from now on where its steps end: `end_step` is not called any more."""

    def stop(self) -> None:
        """Removes every hook."""


def adapter_for(model: Any, *, paced: bool = False, others: bool = False, spelled: bool = False) -> Adapter:
    """The adapter for a model, or for a dict of models by name.

    paced: it finds out by itself where steps end. others: it also finds modules that are in none of these models.
    spelled: functions are recorded as msprobe sees them: how they were called, and the gradients of their last node.
    """
    torch = sys.modules.get("torch")
    is_alone = (torch is not None and isinstance(model, torch.nn.Module)) or not isinstance(model, Mapping)
    models = {"": model} if is_alone else dict(model)
    for name in models:
        if not isinstance(name, str) or not name.isprintable() or (not name and not is_alone):
            raise RecordError(f"A model is named {name!r}. Names of models are texts that can be printed.")
    if not models:
        raise RecordError("There is no model to record: the dict of models is empty.")
    for name, one in models.items():
        if torch is None or not isinstance(one, torch.nn.Module):
            what = f"{name!r} is a {type(one).__name__}" if name else f"A {type(one).__name__} was given"
            raise RecordError(f"{what}, which cannot be recorded. Pass a torch.nn.Module, or a dict of them by name.")
    from astray.capture.pytorch.adapter import PyTorchAdapter

    return PyTorchAdapter(models, paced=paced, others=others, spelled=spelled)


def discovering_adapter(framework: str) -> Adapter:
    """An adapter that finds the models of a running program by itself. The framework has been imported."""
    if framework != "torch":
        raise RecordError(f"Programs that use {framework} cannot be recorded yet. Only torch can.")
    from astray.capture.pytorch.adapter import PyTorchAdapter

    return PyTorchAdapter(None)
