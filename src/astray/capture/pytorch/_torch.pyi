# Built by native/build.py and loaded by its `load`; before that it cannot be imported by name.
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from astray.capture.selection import RecordingSelection, Scope
from astray.records import Kind, Phase, Role
from astray.store import BackgroundWriter

class Site:
    """Where in the program calls happen: a module, function or op; see native/sites.h."""

    name: str
    type: str
    root: str
    kind: Kind
    module: str
    decided_by: RecordingSelection | None
    wanted: bool
    inner_sites: dict[Any, Site]
    def __init__(self, name: str, type: str, root: str, kind: Kind = ..., module: str | None = None) -> None: ...

class OpenCall:
    """A call that has started: what the calls inside it and its backward need to know of it."""

    site: Site
    step: int
    micro: int
    phase: Phase
    recompute: bool
    parent: int | None
    anchor: int | None
    stack: int | None
    frame: FrameType | None
    seq: int
    number: int
    recorded: bool
    input_edges: Any
    runs_inner: bool | None

class StackWalk:
    def __init__(
        self,
        is_internal: Callable[[CodeType], bool],
        add: Callable[[FrameType | None, FrameType | None, int | None], int],
        /,
    ) -> None: ...
    def __call__(
        self, frame: FrameType | None, outer: FrameType | None = None, outer_id: int | None = None, /
    ) -> int | None: ...

class Calls:
    """The calls of one recording in progress; see native/calls.h. What depends on the settings is the engine's."""

    step: int
    latest_micro: int
    recording: bool
    listening: bool
    in_own_process: bool
    paused: bool
    reads_call_gradients: bool
    _writer: BackgroundWriter
    _micro: dict[str, int]
    _backward_micro: dict[str, int]
    _called_modules: set[str]
    _selection: RecordingSelection
    _scope: Scope | None
    _phases: frozenset[str]
    _forward_ended: bool
    _by_module: bool
    def __init__(self, writer: BackgroundWriter, walk: StackWalk, /) -> None: ...
    def enter(
        self,
        site: Site,
        frame: FrameType | None,
        *,
        phase: Phase = ...,
        recompute: bool = False,
        micro: int | None = None,
        row: bool = True,
    ) -> OpenCall: ...
    def begin(self, call: OpenCall, args: str | None, /) -> None: ...
    def leave(self, call: OpenCall, /) -> None: ...
    def innermost(self, site: Site, /) -> OpenCall | None: ...
    def follows_gradients(self, call: OpenCall, /) -> bool: ...
    def backward(self, forward: OpenCall, /) -> int: ...
    def event(
        self, site: Site, phase: Phase, parent: int | None = None, *, stack: int | None = None, args: str | None = None
    ) -> int: ...
    @property
    def enclosing(self) -> OpenCall | None: ...
    def _next_seq(self) -> int: ...
    def _open_calls(self) -> list[OpenCall]: ...
    def _set_observer(self, observer: Any, /) -> None: ...

class NodeOrigins:
    """Finds the module call that made an autograd node."""

    wanted: bool
    def clear(self) -> None: ...

class WatchedModule:
    """How one module is watched, whether or not its hooks are in place. `before` and `after` are None by default."""

    before: Callable[..., None] | None
    after: Callable[..., None] | None
    children: Any
    called: bool
    def __init__(
        self, before: Callable[..., None] | None, after: Callable[..., None] | None, children: Any, /
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
