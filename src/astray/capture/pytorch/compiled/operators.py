"""The operators that `taps` leaves in compiled graphs: what torch does with them, from tracing to running.

They compute nothing and have a side effect. torch keeps operators with effects, and keeps their order, but does not
allow them in the bodies of higher-order operators (branches, checkpointed or vectorised parts): there they are left
out, and the recording says so. Gradients are found as in `native/`, but by Python hooks that run once, while a backward
pass is traced: what they compute becomes a part of the compiled code.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C._autograd import _get_sequence_nr
from torch._library.effects import EffectType
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd.graph import Node

from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.torch_code import torch_folder

NO_CALL = -1
"""The number of a call that is not recorded."""

SEPARATOR = ";"
"""Between the paths of the tensors, which an operator takes as one text."""

_OPERATORS = torch_folder("_higher_order_ops")
_EFFECTS = str(Path(_OPERATORS, "effects.py"))
_SHARED = str(Path(_OPERATORS, "utils.py"))  # what all of them go through
_ALLOWED_AROUND = ("", _EFFECTS)  # where an operator of ours may stand

NamedCall = list[tuple[str, torch.Tensor]]


class RecordingHooks(Protocol):
    """What the operators call in a recording."""

    def enter(self, name: str, inputs: NamedCall) -> None:
        """A call of that site starts."""

    def leave(self, name: str, outputs: NamedCall) -> int:
        """It ends. Returns the number by which its gradients refer to it."""

    def gradient(self, number: int, role: Any, path: str, gradient: torch.Tensor) -> None:
        """A gradient arrives at that call, or leaves it."""

    def note_hidden(self, name: str) -> None:
        """A call of that site will not be seen."""

    def guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """Calls one of these, and keeps its exceptions out of the compiled code."""


recordings: weakref.WeakValueDictionary[int, RecordingHooks] = weakref.WeakValueDictionary()
"""Running recordings, by the number in the graph. Compiled code may outlive them; then it does nothing."""


# -- while autograd is traced, and where there is no graph to trace ----------------------------------------------


class _Traced(threading.local):
    """The calls that are being traced, on each thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, TracedEdges]] = []


_traced = _Traced()


@never_compiled
def _trace_enter(inputs: list[torch.Tensor], site: str, paths: str, number: int) -> None:
    around = _operator_around()
    if around not in _ALLOWED_AROUND:
        _note_hidden(site, number)
        return
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.astray.enter(inputs, site, paths, number)
    if not around:
        _traced.calls.append((site, number, TracedEdges(_named(paths, inputs))))


@never_compiled
def _trace_leave(outputs: list[torch.Tensor], site: str, paths: str, number: int) -> torch.Tensor:
    around = _operator_around()
    if around not in _ALLOWED_AROUND:
        return _no_call()
    with torch._C._AutoDispatchBelowAutograd():
        call: torch.Tensor = torch.ops.astray.leave(outputs, site, paths, number)
    if around:
        return call
    edges = None
    while _traced.calls and edges is None:  # others were left behind where the graph broke
        name, of, entered = _traced.calls.pop()
        edges = entered if (name, of) == (site, number) else None
    if torch.is_grad_enabled():
        hooked = [(path, tensor) for path, tensor in _named(paths, outputs) if tensor.requires_grad]
        TracedGradients(call, number).watch(edges or TracedEdges([]), hooked)
    return call


def _functionalise(mode: Any, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs before torch gives an operator its effect; drops it inside the body of a higher-order operator."""
    if _operator_around() in _ALLOWED_AROUND:
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    if operator.name() == "astray::enter":
        _note_hidden(args[1], args[3])
    return _no_call() if operator.name() == "astray::leave" else None


def _operator_around() -> str:
    """The file of the higher-order operator that is being traced; empty for an ordinary graph.

    `effects` only runs traced code again. All others have bodies (branches, checkpointed parts) in which operators with
    effects are not allowed. Nor are they in a CUDA graph, which would run them once and never again.
    """
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.triton.cudagraphs and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "a CUDA graph"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OPERATORS) and file != _SHARED:
            return file
        frame = frame.f_back
    return ""


def _note_hidden(site: str, number: int) -> None:
    recording = recordings.get(number)
    if recording is not None:
        recording.guarded(recording.note_hidden, site)


# -- while it runs -----------------------------------------------------------------------------------------------


@never_compiled
def _run_enter(inputs: list[torch.Tensor], site: str, paths: str, number: int) -> None:
    recording = recordings.get(number)
    if recording is not None:
        recording.guarded(recording.enter, site, _named(paths, inputs))


@never_compiled
def _run_leave(outputs: list[torch.Tensor], site: str, paths: str, number: int) -> torch.Tensor:
    recording = recordings.get(number)
    call = None if recording is None else recording.guarded(recording.leave, site, _named(paths, outputs))
    return torch.tensor(NO_CALL if call is None else call)


@never_compiled
def _run_gradient(gradient: torch.Tensor, call: torch.Tensor, role: str, path: str, number: int) -> None:
    recording = recordings.get(number)
    if recording is not None:
        recording.guarded(lambda: recording.gradient(int(call), role, path, gradient))


def _named(paths: str, tensors: list[torch.Tensor]) -> NamedCall:
    names = paths.split(SEPARATOR) if tensors else []
    if len(names) != len(tensors):  # a name has the separator in it
        names = [str(index) for index in range(len(tensors))]
    return list(zip(names, tensors, strict=True))


# -- made known to torch ------------------------------------------------------------------------------------------


_defined: list[Any] = []


def define() -> None:
    """Registers the operators with torch, once per process. Without a running recording they do nothing."""
    if _defined:
        return
    library: Any = torch.library.Library("astray", "DEF")  # type: ignore[no-untyped-call]
    _defined.append(library)
    library.define("enter(Tensor[] inputs, str site, str paths, int number) -> ()")
    library.define("leave(Tensor[] outputs, str site, str paths, int number) -> Tensor")
    library.define("gradient(Tensor gradient, Tensor call, str role, str path, int number) -> ()")
    library.impl("enter", _trace_enter, "Autograd")
    library.impl("leave", _trace_leave, "Autograd")
    for name, run, fake in (
        ("astray::enter", _run_enter, _fake_nothing),
        ("astray::leave", _run_leave, _fake_call),
        ("astray::gradient", _run_gradient, _fake_nothing),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, _functionalise, lib=library)
        torch.library._register_effectful_op(name, EffectType.ORDERED, lib=library)
        operator = getattr(torch.ops.astray, name.removeprefix("astray::"))
        for target in (operator, operator.default):  # torch 2.11 drops what returns nothing in spite of its effect
            torch.fx.has_side_effect(target)
    torch.library.register_vmap("astray::enter", _batched_enter, lib=library)
    torch.library.register_vmap("astray::leave", _batched_leave, lib=library)


def _fake_nothing(*_: Any) -> None:
    return None


def _fake_call(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _batched_enter(_info: Any, _dims: Any, _inputs: Any, site: str, _paths: str, number: int) -> tuple[None, None]:
    _note_hidden(site, number)
    return None, None


def _batched_leave(
    _info: Any, _dims: Any, _outputs: Any, _site: str, _paths: str, _number: int
) -> tuple[torch.Tensor, None]:
    return _no_call(), None


def _no_call() -> torch.Tensor:
    return torch.full((), NO_CALL, dtype=torch.int64)  # `torch.tensor` would leave a constant in what is traced


# -- gradients, while a backward pass is traced --------------------------------------------------------------------


Edge = tuple[Node, int]
Tensors = list[tuple[str, torch.Tensor]]
Routes = list[tuple[int, str]]
"""Which of a node's gradients belong to which paths."""

_LEAF = 2**64 - 1
"""The sequence number of nodes that accumulate into leaves, which have no edges."""


class TracedEdges:
    """The positions of a call's inputs in the autograd graph, read before the call can change them in place.

    A tensor given twice is recorded under its first path. A leaf has no node before it is used, so it is identified by
    itself.
    """

    __slots__ = ("born", "inputs", "leaves", "paths")

    def __init__(self, inputs: Tensors) -> None:
        self.inputs = dict(inputs)
        self.paths: dict[Edge, str] = {}
        self.leaves: dict[int, str] = {}
        self.born: int = _get_sequence_nr()
        for path, tensor in inputs:
            if tensor.requires_grad:
                node = tensor.grad_fn
                if node is None:
                    self.leaves.setdefault(id(tensor), path)
                else:
                    self.paths.setdefault((node, tensor.output_nr), path)

    def path(self, tensor: torch.Tensor) -> str | None:
        """The path of the input that a tensor is, if it is one."""
        node = tensor.grad_fn
        return self.leaves.get(id(tensor)) if node is None else self.paths.get((node, tensor.output_nr))

    def consumers(self, outputs: Iterable[Node | None]) -> list[tuple[Node, Routes]]:
        """The nodes made inside the call that send a gradient to an input, and by which of their edges."""
        consumers: list[tuple[Node, Routes]] = []
        visited: set[Node] = set()
        queue = [node for node in outputs if node is not None and node._sequence_nr() >= self.born]
        while queue:
            node = queue.pop()
            if node not in visited:
                visited.add(node)
                sends = self._sends(node, queue)
                if sends:
                    consumers.append((node, sends))
        return consumers

    def _sends(self, node: Node, queue: list[Node]) -> Routes:
        """The edges of a node of the call that lead to inputs. Other nodes of the call are added to `queue`."""
        sends = []
        for index, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            path = self.paths.get(edge)  # type: ignore[arg-type]  # whose node is not None
            if path is None:
                number = following._sequence_nr()
                if number < self.born:  # nodes are numbered as they are made: it was there before the call
                    continue
                if number != _LEAF:
                    queue.append(following)
                    continue
                path = self.leaves.get(id(following.variable)) if self.leaves else None  # type: ignore[attr-defined]
            if path is not None:
                sends.append((index, path))
        return sends


class TracedGradients:
    """Puts the operator `gradient` into a traced graph wherever a gradient of one call passes.

    It never refers to a node of the graph: a node holds its hooks, they hold this object, and the cycle would never be
    freed.
    """

    def __init__(self, call: torch.Tensor, number: int) -> None:
        self._call = call
        self._number = number
        self._expected: dict[str, int] = {}  # how many nodes send to each input
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._arrived: set[str] = set()

    def watch(self, edges: TracedEdges, outputs: Tensors) -> None:
        """Puts the hooks in place, at the end of the forward call."""
        # An output that is an input: its gradient cannot be split into what arrives and what others send, so it is
        # recorded as one.
        passthrough = {path: same for path, tensor in outputs if (same := edges.path(tensor)) is not None}
        if edges.paths or edges.leaves:
            for node, sends in edges.consumers([tensor.grad_fn for _, tensor in outputs]):
                own = [(index, path) for index, path in sends if path not in passthrough.values()]
                for _, path in own:
                    self._expected[path] = self._expected.get(path, 0) + 1
                if own:
                    node.register_hook(partial(self._sent, own))
            self._watch_for_completion(edges)
        for path, tensor in outputs:
            tensor.register_hook(partial(self._arrive, path, passthrough.get(path)))  # type: ignore[no-untyped-call]

    def _watch_for_completion(self, edges: TracedEdges) -> None:
        """Of several nodes that send to one input some may never run: the sum is complete when the backward pass
        reaches the input.
        """
        edges_by_path = {path: edge for edge, path in edges.paths.items()}
        for path, count in self._expected.items():
            if count < 2:
                continue
            tensor, hook = edges.inputs[path], partial(self._complete, path)
            if edges.path(tensor) != path:  # changed in place since; its former self can only be reached by the node
                edges_by_path[path][0].register_prehook(hook)
            else:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @never_compiled
    def _arrive(self, path: str, passthrough: str | None, gradient: torch.Tensor | None) -> None:
        """The gradient of an output is complete. `through` is the input that this output is, for an identity."""
        if gradient is None:  # an output that was not used
            return
        if path in self._arrived:  # a second backward through the same graph
            for waiting in list(self._sums):
                self._complete(waiting)
            self._arrived.clear()
        self._arrived.add(path)
        self._emit("input", path, gradient)
        if passthrough is not None:
            self._emit("output", passthrough, gradient)

    @never_compiled
    def _sent(self, sends: Routes, computed: tuple[torch.Tensor | None, ...], _: Any) -> None:
        """One of the call's nodes has computed what it sends to its inputs."""
        for index, path in sends:
            gradient = computed[index]
            if gradient is None:
                continue
            terms = self._sums.setdefault(path, [])
            terms.append(gradient)
            if len(terms) == self._expected[path]:
                self._complete(path)

    @never_compiled
    def _complete(self, path: str, _: Any = None) -> None:
        """Nothing more will be sent to this input: the backward pass has come to the node that made it."""
        terms = self._sums.pop(path, [])
        if terms:
            total = terms[0]
            for term in terms[1:]:
                total = total + term  # in the graph, as anything else
            self._emit("output", path, total)

    def _emit(self, role: str, path: str, gradient: torch.Tensor) -> None:
        torch.ops.astray.gradient(gradient.detach(), self._call, role, path, self._number)
