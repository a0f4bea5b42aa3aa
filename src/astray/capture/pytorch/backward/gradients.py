"""Records the gradients of a forward call when the backward pass reaches it.

What arrives at the call's outputs is seen by a hook on each output tensor. What the call sends to an input is its own
contribution, not the sum over everybody who used that input: it is read from the autograd nodes that were born inside
the call and lead to the input. Nothing is wrapped and no node is added, so the graph, the order of its sums and
therefore every bit of the result stay as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.compiler import is_compiling

from astray.capture.engine import Engine, OpenCall
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.shards import add_up

Edge = tuple[Node, int]

_ENOUGH = 4096  # calls that are remembered before the dead are looked for

_LEAF = 2**64 - 1
"""The number of the nodes that accumulate into leaves, whenever they were made. Nothing lies behind them."""


class InputEdges:
    """Where the inputs of a call hang in the autograd graph, taken before the call can change them in place."""

    __slots__ = ("born", "paths", "tensors")

    def __init__(self, inputs: Iterable[tuple[str, torch.Tensor]], edge: Callable[[torch.Tensor], Edge | None]) -> None:
        self.paths: dict[Edge, str] = {}
        self.tensors: list[torch.Tensor] = []  # one for each of them
        self.born: int = torch._C._autograd._get_sequence_nr()
        for path, tensor in inputs:
            if tensor.requires_grad:
                found = edge(tensor)
                if (
                    found is not None and found not in self.paths
                ):  # one tensor given twice has one edge, recorded under the first path
                    self.paths[found] = path
                    self.tensors.append(tensor)

    def path(self, output: torch.Tensor) -> str | None:
        """The path of the input that an output is, if it is one."""
        edge = _edge(output)
        return None if edge is None else self.paths.get(edge)

    def consumers(self, outputs: Iterable[Node | None]) -> list[tuple[Node, int, str]]:
        """The nodes born inside the call that send a gradient to an input: (node, which of its edges, path)."""
        found: list[tuple[Node, int, str]] = []
        visited: set[Node] = set()
        ahead = [node for node in outputs if node is not None and self._is_inside(node)]
        paths, born = self.paths, self.born
        while ahead:
            node = ahead.pop()
            if node in visited:
                continue
            visited.add(node)
            for index, edge in enumerate(node.next_functions):
                following = edge[0]
                if following is None:
                    continue
                path = paths.get(edge)  # type: ignore[arg-type]  # whose node is not None
                if path is not None:
                    found.append((node, index, path))
                elif born <= following._sequence_nr() < _LEAF:
                    ahead.append(following)
        return found

    def _is_inside(self, node: Node) -> bool:
        """Nodes are numbered as they are made, so an older one was there before the call."""
        return node._sequence_nr() >= self.born


class CallGradients:
    """The gradients of one forward call, collected as they come. Lives as long as the graph holds its hooks.

    It never holds a node of the graph itself: a node holds its hooks, they hold this, and nobody could free the circle.
    """

    __slots__ = ("__weakref__", "_arrived", "_call", "_engine", "_expected", "_handles", "_seq", "_sums")

    def __init__(self, engine: Engine, call: OpenCall) -> None:
        self._engine = engine
        self._call = call
        self._seq: int | None = None
        self._expected: dict[str, int] = {}  # how many nodes send to each input
        self._sums: dict[str, _Sum] = {}
        self._arrived: set[str] = set()
        self._handles: list[Any] = []

    def watch(self, edges: InputEdges, outputs: list[tuple[str, torch.Tensor]]) -> list[Any]:
        """Puts the hooks in place, at the end of the forward call; gives back those that sit on leaves.

        A graph takes its hooks along when it goes. A leaf (a module may return a parameter) would keep them.
        """
        hooked = [(path, tensor) for path, tensor in outputs if tensor.requires_grad]
        # An output that is an input: what arrives there cannot be told from what others send, so it counts as a whole.
        through = {path: edges.path(tensor) for path, tensor in hooked} if edges.paths else {}
        if edges.paths:
            for node, index, path in edges.consumers(tensor.grad_fn for _, tensor in hooked):
                if path not in through.values():
                    self._expected[path] = self._expected.get(path, 0) + 1
                    self._handles.append(node.register_hook(_SendingHook(self, path, index)))
        on_leaves = self._watch_for_completion(edges)
        for path, tensor in hooked:
            hook = _ArrivalHook(self, path, through.get(path))
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            (self._handles if tensor.grad_fn is not None else on_leaves).append(handle)
        return on_leaves

    def _watch_for_completion(self, edges: InputEdges) -> list[Any]:
        """Of several nodes that send to one input some may never run: the sum is whole when the input's turn comes."""
        on_leaves: list[Any] = []
        for (edge, path), tensor in zip(edges.paths.items(), edges.tensors, strict=True):
            if self._expected.get(path, 0) < 2:
                continue
            hook = _CompletionHook(self, path)
            if _edge(tensor) != edge:  # changed in place since; its former self can only be reached through the node
                self._handles.append(edge[0].register_prehook(hook))
                continue
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            _let_completion_come_first(tensor)
            (self._handles if tensor.grad_fn is not None else on_leaves).append(handle)
        return on_leaves

    def arrived(self, path: str, gradient: torch.Tensor, through: str | None) -> None:
        """The gradient of an output is complete. `through` is the input that this output is, for an identity."""
        if path in self._arrived:  # a second backward through the same graph
            self.finish()
        self._arrived.add(path)
        seq = self._started()
        self._engine.observe(seq, "input", path, gradient)
        if through is not None:
            self._engine.observe(seq, "output", through, gradient)

    def sent(self, path: str, gradient: torch.Tensor) -> None:
        """One of the call's nodes has computed what it sends to an input."""
        expected = self._expected[path]
        if expected == 1:
            self._engine.observe(self._started(), "output", path, gradient)
            return
        sum_ = self._sums.setdefault(path, _Sum())
        sum_.add(gradient)
        if sum_.terms == expected:
            self.complete(path)

    def complete(self, path: str) -> None:
        """Nothing more will be sent to this input: the backward pass has come to where it came from."""
        sum_ = self._sums.pop(path, None)
        if sum_ is not None and sum_.total is not None:
            self._engine.observe(self._started(), "output", path, sum_.total)
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
        self._arrived.clear()

    def remove(self) -> None:
        """Takes every hook off the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _started(self) -> int:
        if self._seq is None:
            self._seq = self._engine.backward(self._call)
        return self._seq

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Runs one observation; whatever goes wrong in it stays out of the backward pass."""
        if is_compiling() or self._engine.paused or not self._engine.belongs_here():
            return
        try:
            with DisableTorchFunction():  # what is done here is no part of the program
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
        if gradient is not None:  # an output that nobody used
            self.gradients.guarded(self.gradients.arrived, self.path, gradient, self.through)


class _SendingHook:
    """Sits on an autograd node and reads one of the gradients it computed."""

    __slots__ = ("gradients", "index", "path")

    def __init__(self, gradients: CallGradients, path: str, index: int) -> None:
        self.gradients = gradients
        self.path = path
        self.index = index

    @never_compiled
    def __call__(self, computed: tuple[torch.Tensor | None, ...], _: Any) -> None:
        gradient = computed[self.index]
        if gradient is not None:
            self.gradients.guarded(self.gradients.sent, self.path, gradient)


class _CompletionHook:
    """Sits on an input tensor, or on the node it came from, and is called when all gradients for it are there."""

    __slots__ = ("gradients", "path")

    def __init__(self, gradients: CallGradients, path: str) -> None:
        self.gradients = gradients
        self.path = path

    @never_compiled
    def __call__(self, _: Any) -> None:
        self.gradients.guarded(self.gradients.complete, self.path)


class LiveGradients:
    """Every call whose graph is still there, so that hooks can be taken off when the recording stops."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[CallGradients]] = []
        self._on_leaves: list[Any] = []
        self._of_parameters: dict[int, tuple[weakref.ref[torch.Tensor], Edge | None]] = {}
        self._crowded = _ENOUGH
        self._changing = threading.Lock()

    def edges(self, inputs: Iterable[tuple[str, torch.Tensor]]) -> InputEdges:
        """Where the inputs of a call hang in the graph, to be asked before the call."""
        return InputEdges(inputs, self._edge)

    def _edge(self, tensor: torch.Tensor) -> Edge | None:
        """That of a parameter is remembered for a step: torch makes a view each time it is asked for it."""
        if type(tensor) is not torch.nn.Parameter:
            return _edge(tensor)
        known = self._of_parameters.get(id(tensor))
        if known is None or known[0]() is not tensor or tensor.grad_fn is not None:
            known = self._of_parameters[id(tensor)] = (weakref.ref(tensor), _edge(tensor))
        return known[1]

    def watch(self, engine: Engine, call: OpenCall, edges: InputEdges, outputs: list[tuple[str, torch.Tensor]]) -> None:
        gradients = CallGradients(engine, call)
        on_leaves = gradients.watch(edges, outputs)
        with self._changing:
            self._calls.append(weakref.ref(gradients))
            self._on_leaves += on_leaves
        if len(self._calls) > self._crowded:  # a program that never ends a step
            self._living()
            self._crowded = max(_ENOUGH, 2 * len(self._calls))

    def finish(self) -> None:
        """Ends the step: a sum that waits for more is recorded as it is, and nothing stays on a leaf."""
        for gradients in self._living():
            if gradients.is_summing:
                gradients.guarded(gradients.finish)
        self._of_parameters.clear()
        with self._changing:
            on_leaves, self._on_leaves = self._on_leaves, []
        for handle in on_leaves:
            handle.remove()

    def _living(self) -> list[CallGradients]:
        """Those whose graph is still there; the others are forgotten."""
        with self._changing:
            living = [(reference, gradients) for reference in self._calls if (gradients := reference()) is not None]
            self._calls = [reference for reference, _ in living]
        return [gradients for _, gradients in living]

    def remove(self) -> None:
        for gradients in self._living():
            gradients.remove()
        self._calls = []


def _let_completion_come_first(tensor: torch.Tensor) -> None:
    """Orders the hooks of a tensor: what a call has sent here comes before what arrives here.

    torch calls them in the order they were put into their dict, which taking out and putting back changes.
    """
    hooks = tensor._backward_hooks
    if hooks is not None:
        for key in [key for key, hook in hooks.items() if isinstance(hook, _ArrivalHook)]:
            hooks[key] = hooks.pop(key)


def _edge(tensor: torch.Tensor) -> Edge | None:
    """None inside a functorch transform, where a leaf has no node of its own."""
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    with torch._C._DisableTorchDispatch():  # torch makes a view to find it, which is no part of the program
        try:
            edge = get_gradient_edge(tensor)
        except AttributeError:
            return None
    return edge.node, edge.output_nr
