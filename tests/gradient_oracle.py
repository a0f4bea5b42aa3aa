"""The gradients of calls, read by plain Python hooks: what the C++ of `astray.capture.pytorch.native` is compared with.

Written before it, and kept simple: every hook is a Python object that torch was asked to call by its public methods.
`use` has a recording made by it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch._C import DisableTorchFunction
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node
from torch.compiler import is_compiling

from astray.capture.engine import Engine
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.native.core import OpenCall
from astray.capture.pytorch.shards import add_up

Edge = tuple[Node, int]
Tensors = list[tuple[str, torch.Tensor]]
Routes = tuple[tuple[int, str], ...]
"""Which of a node's gradients belong to which paths."""

_LEAF = 2**64 - 1
"""The number of the nodes that accumulate into leaves, whenever they were made. Nothing lies behind them."""


class InputEdges:
    """The positions of a call's inputs in the autograd graph, read before the call can change them in place.

    A tensor given twice is recorded under its first path. A leaf has no node before it is used: it stands for itself.
    """

    __slots__ = ("born", "inputs", "leaves", "paths")

    def __init__(self, inputs: Tensors) -> None:
        self.inputs = inputs
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

    def sends(self, node: Node, beyond: list[Node]) -> list[tuple[int, str]]:
        """Which edges of a node born inside the call lead to which inputs. Others born inside are added to `beyond`."""
        found = []
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
                    beyond.append(following)
                    continue
                path = self.leaves.get(id(following.variable)) if self.leaves else None  # type: ignore[attr-defined]
            if path is not None:
                found.append((index, path))
        return found

    def consumers(self, outputs: Iterable[Node | None]) -> list[tuple[Node, list[tuple[int, str]]]]:
        """The nodes born inside the call that send a gradient to an input, with which of their edges do."""
        found: list[tuple[Node, list[tuple[int, str]]]] = []
        visited: set[Node] = set()
        ahead = [node for node in outputs if node is not None and node._sequence_nr() >= self.born]
        while ahead:
            node = ahead.pop()
            if node not in visited:
                visited.add(node)
                sends = self.sends(node, ahead)
                if sends:
                    found.append((node, sends))
        return found


class NodeGradients:
    """The gradients of a forward call that made one autograd node; the hook on it. Lives as long as the node.

    Its node runs once in a backward pass, with everything that arrives, and has then computed everything that it sends.
    What arrives is seen as the node got it, after hooks of the user on the output have changed it. Where the backward
    pass ends at the output (`torch.autograd.grad` with respect to it), the call has no backward and there is no row.
    """

    __slots__ = ("_arrives", "_call", "_engine", "_sends")

    def __init__(self, engine: Engine, call: OpenCall, arrives: Routes, sends: Routes) -> None:
        self._engine = engine
        self._call = call
        self._arrives = arrives
        self._sends = sends

    @classmethod
    def watch(cls, engine: Engine, call: OpenCall, edges: InputEdges, hooked: Tensors) -> Any:
        """Adds the hook, at the end of the forward call; None when one hook does not see all gradients."""
        node = hooked[0][1].grad_fn
        if node is None or node._sequence_nr() != edges.born or not leaves_gradients_alone(node):
            return None
        arrives = []
        for path, tensor in hooked:
            if tensor.grad_fn is not node:
                return None
            arrives.append((tensor.output_nr, path))
        sends = edges.sends(node, [])
        if len(sends) > 1 and len({path for _, path in sends}) != len(sends):  # x * x: there is a sum to wait for
            return None
        return node.register_hook(cls(engine, call, tuple(arrives), tuple(sends)))

    @never_compiled
    def __call__(self, computed: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        engine = self._engine
        if is_compiling() or engine.paused or not engine.in_own_process:
            return
        seq = None
        try:
            with DisableTorchFunction():  # what is done here is not part of the program
                observe = engine.tensors.observe
                for index, path in self._arrives:
                    gradient = arrived[index]
                    if gradient is not None:  # an output that was not used
                        seq = engine.backward(self._call) if seq is None else seq
                        observe(seq, "input", path, gradient)
                for index, path in self._sends:
                    gradient = computed[index]
                    if gradient is not None:
                        seq = engine.backward(self._call) if seq is None else seq
                        observe(seq, "output", path, gradient)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"a gradient of {self._call.site.name}", error)


OWN: set[type] = set()


def leaves_gradients_alone(node: Node) -> bool:
    """Whether it is one of torch's own derivatives, which write to fresh memory alone.

    A custom `backward` may change arriving gradients in place, before a hook after it sees them.
    """
    kind = type(node)
    if kind in OWN:
        return True
    if kind.__module__ == "builtins" and kind.__name__[-1].isdigit():  # AddBackward0
        OWN.add(kind)
        return True
    return False


class CallGradients:
    """The gradients of one forward call, collected as they come. Lives as long as the graph holds its hooks.

    It never holds a node of the graph: a node holds its hooks, they hold this object, and the cycle would never be
    freed.
    """

    __slots__ = ("__weakref__", "_arrived", "_call", "_engine", "_expected", "_seq", "_sums")

    def __init__(self, engine: Engine, call: OpenCall) -> None:
        self._engine = engine
        self._call = call
        self._seq: int | None = None
        self._expected: dict[str, int] = {}  # how many nodes send to each input
        self._sums: dict[str, _Sum] = {}
        self._arrived: tuple[str, ...] = ()

    def watch(self, edges: InputEdges, hooked: Tensors) -> Handles:
        """Puts the hooks in place, at the end of the forward call; gives back how to take them off.

        A graph takes its hooks along when it goes. A leaf (a module may return a parameter) would keep them.
        """
        through: dict[str, str] = {}
        handles = Handles([], [])
        if edges.paths or edges.leaves:
            # An output that is an input: its gradient cannot be split into what arrives and what others send, so it is
            # recorded as one.
            through = {path: same for path, tensor in hooked if (same := edges.path(tensor)) is not None}
            for node, sends in edges.consumers([tensor.grad_fn for _, tensor in hooked]):
                own = tuple([(index, path) for index, path in sends if path not in through.values()])
                for _, path in own:
                    self._expected[path] = self._expected.get(path, 0) + 1
                if own:
                    handles.in_graph.append(node.register_hook(_SendingHook(self, own)))
            if self.may_sum:
                self._watch_for_completion(edges, handles)
        for path, tensor in hooked:
            hook = _ArrivalHook(self, path, through.get(path))
            handles.add(tensor, tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        return handles

    @property
    def may_sum(self) -> bool:
        """Whether there is an input that several nodes send to."""
        return any(count > 1 for count in self._expected.values())

    def _watch_for_completion(self, edges: InputEdges, handles: Handles) -> None:
        """Of several nodes that send to one input some may never run: the sum is complete when the backward pass
        reaches the input.
        """
        tensors = dict(edges.inputs)
        places = {path: edge for edge, path in edges.paths.items()}
        for path, count in self._expected.items():
            if count < 2:
                continue
            hook, tensor = _CompletionHook(self, path), tensors[path]
            if edges.path(tensor) != path:  # changed in place since; its former self can only be reached by the node
                handles.in_graph.append(places[path][0].register_prehook(hook))
                continue
            handles.add(tensor, tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            _let_completion_come_first(tensor)

    def arrived(self, path: str, gradient: torch.Tensor, through: str | None) -> None:
        """The gradient of an output is complete. `through` is the input that this output is, for an identity."""
        if path in self._arrived:  # a second backward through the same graph
            self.finish()
        self._arrived += (path,)
        seq = self._started()
        self._engine.tensors.observe(seq, "input", path, gradient)
        if through is not None:
            self._engine.tensors.observe(seq, "output", through, gradient)

    def sent(self, path: str, gradient: torch.Tensor) -> None:
        """One of the call's nodes has computed what it sends to an input."""
        expected = self._expected[path]
        if expected == 1:
            self._engine.tensors.observe(self._started(), "output", path, gradient)
            return
        sum_ = self._sums.setdefault(path, _Sum())
        sum_.add(gradient)
        if sum_.terms == expected:
            self.complete(path)

    def complete(self, path: str) -> None:
        """Nothing more will be sent to this input: the backward pass has come to where it came from."""
        sum_ = self._sums.pop(path, None)
        if sum_ is not None and sum_.total is not None:
            self._engine.tensors.observe(self._started(), "output", path, sum_.total)
        elif sum_ is not None:
            why = "its parts are distributed in different ways, and to add them takes communication"
            self._engine.missed(f"a gradient that {self._call.site.name} sends", why)

    @property
    def is_summing(self) -> bool:
        return bool(self._sums)

    def finish(self) -> None:
        """Ends this pass through the graph."""
        for path in list(self._sums):
            self.complete(path)
        self._seq = None
        self._arrived = ()

    def _started(self) -> int:
        if self._seq is None:
            self._seq = self._engine.backward(self._call)
        return self._seq

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Runs one observation; whatever goes wrong in it stays out of the backward pass."""
        if is_compiling() or self._engine.paused or not self._engine.in_own_process:
            return
        try:
            with DisableTorchFunction():  # what is done here is not part of the program
                action(*args)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"a gradient of {self._call.site.name}", error)


class _Sum:
    """What several nodes send to one input, added up."""

    __slots__ = ("terms", "total")

    def __init__(self) -> None:
        self.terms = 0
        self.total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.terms += 1
        if self.terms == 1:
            self.total = gradient
        elif self.total is not None:
            self.total = add_up(self.total, gradient)


class _ArrivalHook:
    """Sits on an output tensor."""

    __slots__ = ("gradients", "path", "through")

    def __init__(self, gradients: CallGradients, path: str, through: str | None) -> None:
        self.gradients = gradients
        self.path = path
        self.through = through

    @never_compiled
    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # an output that was not used
            self.gradients.guarded(self.gradients.arrived, self.path, gradient, self.through)


class _SendingHook:
    """Sits on an autograd node and reads those of the gradients it computed that go to an input."""

    __slots__ = ("gradients", "sends")

    def __init__(self, gradients: CallGradients, sends: Routes) -> None:
        self.gradients = gradients
        self.sends = sends

    @never_compiled
    def __call__(self, computed: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for index, path in self.sends:
            gradient = computed[index]
            if gradient is not None:
                self.gradients.guarded(self.gradients.sent, path, gradient)


class _CompletionHook:
    """Sits on an input tensor, or on the node it came from, and is called when all gradients for it are there."""

    __slots__ = ("gradients", "path")

    def __init__(self, gradients: CallGradients, path: str) -> None:
        self.gradients = gradients
        self.path = path

    @never_compiled
    def __call__(self, _: Any) -> None:
        self.gradients.guarded(self.gradients.complete, self.path)


class Handles(NamedTuple):
    """What torch gave us to take the hooks of one call off again."""

    in_graph: list[Any]
    on_leaves: list[Any]

    def add(self, tensor: torch.Tensor, handle: Any) -> None:
        (self.on_leaves if tensor.grad_fn is None else self.in_graph).append(handle)


class LiveGradients:
    """Every call whose graph is still there, so that hooks can be taken off when the recording stops."""

    def __init__(self) -> None:
        # A weak reference to the dict that a hook is in, its key there, the next reference, the next key, …
        # That is all we need of a handle, and a thousand objects a step fewer for the garbage collector to go through.
        self._in_graphs: list[Any] = []
        self._on_leaves: list[Any] = []
        self._summing: list[weakref.ref[CallGradients]] = []
        self._changing = threading.Lock()

    def watch(self, engine: Engine, call: OpenCall, edges: InputEdges, outputs: Tensors) -> None:
        """Watches the gradients of a call that has returned `outputs`. `edges` were read before it."""
        hooked = [one for one in outputs if one[1].requires_grad]
        if not hooked:
            return
        handle = NodeGradients.watch(engine, call, edges, hooked) if _get_sequence_nr() == edges.born + 1 else None
        if handle is not None:
            with self._changing:
                self._in_graphs += (handle.hooks_dict_ref, handle.id)
        else:
            self._watch_several(CallGradients(engine, call), edges, hooked)

    def _watch_several(self, gradients: CallGradients, edges: InputEdges, hooked: Tensors) -> None:
        handles = gradients.watch(edges, hooked)
        with self._changing:
            for handle in handles.in_graph:
                self._in_graphs += (handle.hooks_dict_ref, handle.id)
            self._on_leaves += handles.on_leaves
            if gradients.may_sum:
                self._summing.append(weakref.ref(gradients))

    def finish(self) -> None:
        """Ends the step: incomplete sums are recorded as they are, and the hooks on leaves are removed."""
        self._forget_dead()
        for reference in self._summing:
            gradients = reference()
            if gradients is not None and gradients.is_summing:
                gradients.guarded(gradients.finish)
        with self._changing:
            on_leaves, self._on_leaves = self._on_leaves, []
        for handle in on_leaves:
            handle.remove()

    def _forget_dead(self) -> None:
        """Keeps what belongs to a graph that is still there."""
        with self._changing:
            pairs = zip(self._in_graphs[::2], self._in_graphs[1::2], strict=True)
            self._in_graphs = [item for pair in pairs if pair[0]() is not None for item in pair]
            self._summing = [reference for reference in self._summing if reference() is not None]

    def remove(self) -> None:
        """Takes every hook off the graphs."""
        with self._changing:
            in_graphs, self._in_graphs = self._in_graphs, []
        for reference, key in zip(in_graphs[::2], in_graphs[1::2], strict=True):
            hooks = reference()
            if hooks is not None:
                hooks.pop(key, None)


def _let_completion_come_first(tensor: torch.Tensor) -> None:
    """Orders the hooks of a tensor: what a call has sent here comes before what arrives here.

    torch calls them in the order they were put into their dict, which taking out and putting back changes.
    """
    hooks = tensor._backward_hooks
    if hooks is not None:
        for key in [key for key, hook in hooks.items() if isinstance(hook, _ArrivalHook)]:
            hooks[key] = hooks.pop(key)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that start from now on read gradients by this."""
    for module in ("calls.call_capture", "calls.modules", "adapter"):
        monkeypatch.setattr(f"astray.capture.pytorch.{module}.InputEdges", InputEdges)
    monkeypatch.setattr("astray.capture.pytorch.adapter.LiveGradients", LiveGradients)
