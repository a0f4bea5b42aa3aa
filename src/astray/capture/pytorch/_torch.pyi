# Built by native/build.py and loaded by its `load`; before that it cannot be imported by name.
from collections.abc import Callable
from typing import Any

from astray.capture.native.core import Calls as Calls
from astray.capture.native.core import Finalizer as Finalizer
from astray.capture.native.core import OpenCall as OpenCall
from astray.capture.native.core import Site as Site
from astray.capture.native.core import StackWalk as StackWalk
from astray.capture.native.core import Structures as Structures
from astray.records import Role

class NodeOrigins:
    """Finds the module call that made an autograd node."""

    wanted: bool
    def clear(self) -> None: ...

class WatchedModule:
    """How one module is watched, whether or not its hooks are in place. `before` and `after` are None by default."""

    before: Callable[..., Any] | None
    after: Callable[..., Any] | None
    children: Any
    called: bool
    def __init__(
        self, before: Callable[..., Any] | None, after: Callable[..., Any] | None, children: Any, /
    ) -> None: ...

class InputEdges:
    def __new__(cls, inputs: list[tuple[str, Any]], /) -> InputEdges: ...

class LiveGradients:
    def watch(self, engine: Any, call: Any, edges: InputEdges, outputs: list[tuple[str, Any]], /) -> None: ...
    def finish(self) -> None: ...
    def remove(self) -> None: ...

class LeafHook:
    arrives: bool
    def run(self, gradient: Any, /) -> None: ...

class AccumulatedHook:
    def __new__(cls, engine: Any, site: Any, /) -> AccumulatedHook: ...
    def run(self, parameter: Any, /) -> None: ...
    def writes(self, gradient: Any, /) -> int: ...

class ArrivingHook:
    def __new__(cls, accumulated: AccumulatedHook, parameter: Any, /) -> ArrivingHook: ...
    def run(self, gradient: Any, /) -> None: ...

class TensorObserver:
    """Observes the plain tensors of one recording. See `astray.capture.adapters.NativeObserver` and
    `TorchReader.native_observer`.

    `examples` has a tensor of every dtype with the name of it, `devices` the names of devices, `cuda_measurers` the
    measurer of each CUDA device. `stream` returns the current stream of a device, `measure_together` measures tensors
    of a device by one launch, `measuring` is the capsule of the kernels: `slow_measure` measures memory of this process
    where it is None.
    """

    def __new__(
        cls,
        examples: list[tuple[Any, str]],
        parameter_type: type,
        devices: dict[Any, str],
        cuda_measurers: dict[Any, Any],
        stream: Callable[[int], int] | None,
        measure_together: Callable[..., list[int] | None],
        measuring: Any,
        make_identity: Callable[..., Any],
        unfilled: dict[int, Any],
        writer: Any,
        row_buffer: Any,
        batch: int,
        slow_observe: Callable[..., bool | None],
        slow_observe_unread: Callable[..., bool | None],
        slow_written: Callable[..., None],
        slow_changed: Callable[..., None],
        slow_measure: Callable[..., tuple[Any, ...]],
        /,
    ) -> TensorObserver: ...
    def observe(self, seq: int, role: Role, path: str, tensor: Any, /) -> bool | None: ...
    def observe_unread(self, seq: int, role: Role, path: str, tensor: Any, /) -> bool | None: ...
    def apply(self, on: bool, roles: frozenset[str], statistics: bool, values: bool, ops: bool, /) -> None: ...
    def report_nonfinite(self, on: bool, /) -> None: ...
    def written(self, tensor: Any, /) -> None: ...
    def changed(self, tensor: Any, /) -> None: ...
    def forget(self, owner: Any, /) -> None: ...
    def value_number(self, owner: Any, version: int, /) -> int: ...
    def written_ahead(self, owner: Any, version: int, /) -> None: ...
    def clear(self) -> None: ...
    def renumber(self) -> None: ...
    def next_step(self) -> None: ...
    def take_row_count(self) -> int: ...

def set_callbacks(
    add_up: Callable[..., Any],
    run_uncompiled: Callable[..., Any],
    put_on_leaf: Callable[..., Any],
    flags: dict[str, Any] | None,
    callback: Callable[[], Any] | None,
    /,
) -> None: ...
def set_python_call(hook: type, function: Callable[..., Any], /) -> None: ...
def living() -> int: ...

Mode: type
"""The native base of the modes: torch calls the method that it provides, without running Python code."""
FunctionCalls: type
ModuleCalls: type
BeforeHook: type
AfterHook: type

def set_torch_types(op: type | None, overriding: Callable[[type], bool], /) -> None: ...
