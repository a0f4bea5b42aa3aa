"""What the recorder needs of a framework: an `Adapter`, and its `TensorReader`. Chooses the adapter for a model.

A framework is only touched when the user's program has imported it: a torch model cannot exist where torch is not
loaded, so looking into `sys.modules` is enough. Numbers of tensors are read in one of two ways. Memory that this
process can reach is described, and measured here. What lies on a device is measured there, without waiting for it: the
reader gives a ticket, and the measurement comes later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from astray.capture.imports import FRAMEWORKS
from astray.capture.settings import Settings
from astray.errors import RecordError
from astray.records import Spelling

if TYPE_CHECKING:
    from astray.capture.engine import Engine  # which loads what is built for the framework


from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.capture.measurement_cache import CachedMeasurement, UnfilledMemory
from astray.records import Role
from astray.stats import ShardPosition, Strided
from astray.store import BackgroundWriter, DeferredBytes, DeferredMeasurements


class Adapter(Protocol):
    """What the recorder needs of a framework."""

    framework: str
    native: Any  # its compiled module, which has what native/core.pyi says
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

    def update_hooks(self) -> None:
        """Puts the hooks in place that the engine needs from now on, and removes the others."""

    def next_step(self) -> None: ...

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        """Records a value of the program's own, and the gradients that arrive at its tensors."""

    def module_called(self, module: Any, args: Any, frame: FrameType) -> None:
        """A module is called, from this frame of the framework's; the recording was started during this call."""

    def let_program_end_steps(self) -> None:
        """The program says from now on where its steps end: `end_step` is not called any more."""

    def stop(self) -> None:
        """Removes every hook."""


def adapter_for(model: Any, *, detects_steps: bool = False, discovers: bool = False, spelled: bool = False) -> Adapter:
    """The adapter for a model, or for a dict of models by name.

    detects_steps: it finds out by itself where steps end. discovers: it also finds modules outside of these models.
    spelled: functions are recorded as msprobe sees them: how they were called, and the gradients of their last node.
    """
    kinds = _module_classes()
    is_single = isinstance(model, tuple(kinds.values())) or not isinstance(model, Mapping)
    models = {"": model} if is_single else dict(model)
    for name in models:
        if not isinstance(name, str) or not name.isprintable() or (not name and not is_single):
            raise RecordError(f"A model is named {name!r}. Names of models are texts that can be printed.")
    if not models:
        raise RecordError("There is no model to record: the dict of models is empty.")
    frameworks = {name: _framework_of(module, kinds) for name, module in models.items()}
    for name, framework in frameworks.items():
        if framework is None:
            kind = type(models[name]).__name__
            what = f"{name!r} is a {kind}" if name else f"A {kind} was given"
            raise RecordError(
                f"{what}, which cannot be recorded. Pass a torch.nn.Module or a paddle.nn.Layer, or a dict of them by "
                "name."
            )
    if len(set(frameworks.values())) > 1:
        raise RecordError(
            "The models are of torch and of Paddle. Record those of each framework into a run of its own."
        )
    if "paddle" in frameworks.values():
        from astray.capture.paddle.adapter import PaddleAdapter

        if spelled:
            raise RecordError("msprobe's files hold functions of torch, and these models are of Paddle.")
        return PaddleAdapter(models, detects_steps=detects_steps, discovers=discovers)
    from astray.capture.pytorch.adapter import PyTorchAdapter

    return PyTorchAdapter(models, detects_steps=detects_steps, discovers=discovers, spelled=spelled)


def _module_classes() -> dict[str, type]:
    """The class of a model, for each framework that has been imported."""
    loaded = {name: getattr(sys.modules.get(name), "nn", None) for name in FRAMEWORKS}
    return {name: getattr(nn, FRAMEWORKS[name]) for name, nn in loaded.items() if nn is not None}


def _framework_of(module: Any, kinds: Mapping[str, type]) -> str | None:
    return next((name for name, kind in kinds.items() if isinstance(module, kind)), None)


def discovering_adapter(framework: str) -> Adapter:
    """An adapter that finds the models of a running program by itself. The framework has been imported."""
    if framework == "paddle":
        from astray.capture.paddle.adapter import PaddleAdapter

        return PaddleAdapter(None)
    from astray.capture.pytorch.adapter import PyTorchAdapter

    return PyTorchAdapter(None)


class TensorIdentity(NamedTuple):
    """What a tensor is right now, as far as that is known without reading its numbers.

    `owner` is the living object that owns the memory; `key` changes whenever the numbers may have, and is the same for
    two tensors that hold the same numbers in the same order. `address` is 0 where the numbers cannot be read from one
    address. `version` counts the writes to the memory that are known of.
    """

    owner: Any
    key: Hashable
    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    version: int = 0


class TensorReading(NamedTuple):
    """A tensor as its adapter sees it.

    Its numbers are in `memory`, or are being measured under `ticket`. When they cannot be read there is neither, and
    `note` says why.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: Strided | None
    owner: Any = None  # keeps `memory` alive, when that is a copy of the tensor
    box: Strided | None = None  # the same memory, shaped as `shard` has it
    shard: ShardPosition | None = None
    placement: str | None = None
    note: str | None = None
    ticket: int | None = None


class SlowPath(NamedTuple):
    """What a `NativeObserver` leaves to Python: unusual tensors, and memory whose values are to be kept."""

    observe: Callable[[int, Role, str, Any], bool | None]
    observe_unread: Callable[[int, Role, str, Any], bool | None]
    written: Callable[[Any], None]
    changed: Callable[[Any], None]
    measure: Callable[[Any, TensorIdentity, int, Role, str], CachedMeasurement]  # measures, and keeps values
    unfilled: UnfilledMemory
    writer: BackgroundWriter


class NativeObserver(Protocol):
    """An adapter's native code that observes tensors, one call each."""

    @property
    def observe(self) -> Callable[[int, Role, str, Any], bool | None]: ...

    @property
    def observe_unread(self) -> Callable[[int, Role, str, Any], bool | None]: ...

    @property
    def written(self) -> Callable[[Any], None]: ...

    @property
    def changed(self) -> Callable[[Any], None]: ...

    def apply(self, on: bool, roles: frozenset[str], statistics: bool, values: bool, ops: bool, /) -> None:
        """Records by these settings from now on. Unless it is `on`, every tensor goes the slow path."""

    def report_nonfinite(self, on: bool, /) -> None:
        """Whether `observe` returns True for a tensor with NaN or infinities, where that is known at once."""

    def forget(self, owner: Any, /) -> None:
        """This memory was written to, so it holds another value now."""

    def value_number(self, owner: Any, version: int, /) -> int:
        """The number of the value that a memory holds in this version; the next number when it has none yet."""

    def written_ahead(self, owner: Any, version: int, /) -> None:
        """An op has written to this memory, and its version will say so when the op has returned."""

    def clear(self) -> None:
        """Uses no earlier measurement again."""

    def renumber(self) -> None:
        """The same, and every memory may hold another value."""

    def next_step(self) -> None:
        """The same, because a step is over."""

    def take_row_count(self) -> int:
        """The number of rows made since the last call."""


class TensorReader(Protocol):
    """What the recorder needs to know about tensors of a framework."""

    def native_observer(self, slow_path: SlowPath) -> NativeObserver:
        """Native code for this recording."""

    @property
    def deferred(self) -> DeferredMeasurements | None:
        """Where the tickets of its readings are redeemed; None when it gives none."""

    def start(self, forget: Callable[[], None], waited: Callable[[float], None], queue_bytes: int) -> None:
        """A recording starts.

        `forget` is called whenever no ticket given so far may be used for new rows, `waited` with the seconds that the
        program was blocked because more than `queue_bytes` of values were being copied.
        """

    def stop(self) -> None:
        """The recording is over, and everything has been written: frees all memory."""

    def identity(self, tensor: Any) -> TensorIdentity | None:
        """None when there is no way to know whether the tensor has changed."""

    def requires_grad(self, tensor: Any) -> bool: ...

    def device(self, tensor: Any) -> str: ...

    def owner(self, tensor: Any) -> Any:
        """The object that owns its memory; None when there is none to name."""

    def is_whole(self, tensor: Any) -> bool:
        """Whether it is all of the memory that its owner has."""

    def read(self, tensor: Any, identity: TensorIdentity | None, statistics: bool) -> TensorReading:
        """`identity` is what `identity()` has just returned for the tensor."""

    def fetch(self, tensor: Any, memory: Strided, positions: npt.NDArray[np.int64] | None) -> DeferredBytes | str:
        """Copies bytes of a tensor that has a ticket to this process: those of `memory`, whose address counts from the
        tensor's first byte, or of its elements at these positions.

        A str is the reason why that is impossible.
        """
