# What the headers of native/ look like from Python, in the compiled module of every adapter. There is no module of this
# name: native/build.py builds and loads those of the adapters.
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from astray.capture.selection import RecordingSelection, Scope
from astray.records import Kind, Phase
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

class Structures:
    """The structures of calls, cached; see native/structure.h. `Flattener` uses it."""

    def __init__(
        self,
        tensors: frozenset[type],
        values: frozenset[type],
        is_tensor: Callable[[Any], bool],
        flatten_arguments: Callable[..., Any],
        flatten_result: Callable[..., Any],
        /,
    ) -> None: ...
    def arguments(self, args: tuple[Any, ...], kwargs: Any, /) -> tuple[list[tuple[str, Any]], str]: ...
    def result(self, value: Any, /) -> list[tuple[str, Any]]: ...

class Finalizer:
    """Calls a function when it is destroyed."""

    def __new__(cls, callback: Callable[[], object], /) -> Finalizer: ...
