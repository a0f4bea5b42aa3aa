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
from torch.autograd.graph import Node, get_gradient_edge

from astray.capture.engine import Engine, OpenCall

Edge = tuple[Node, int]

_ENOUGH = 4096  # calls that are remembered before the dead are looked for

_LEAF = 2**64 - 1
"""The number of the nodes that accumulate into leaves, whenever they were made. Nothing lies behind them."""


class InputEdges:
    """Where the inputs of a call hang in the autograd graph, taken before the call can change them in place."""

    __slots__ = ("born", "paths")

    def __init__(self, inputs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.paths: dict[Edge, str] = {}
        self.born: int = torch._C._autograd._get_sequence_nr()
        for path, tensor in inputs:
            if tensor.requires_grad:
                # One tensor given as two arguments has one edge: its gradient is recorded under the first path.
                self.paths.setdefault(_edge(tensor), path)

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
    """The gradients of one forward call, collected as they come. Lives as long as the graph holds its hooks."""

    __slots__ = (
        "__weakref__", "_arrived", "_call", "_engine", "_expected", "_handles", "_seq", "_sums", "_waiting",
    )  # fmt: skip

    def __init__(self, engine: Engine, call: OpenCall) -> None:
        self._engine = engine
        self._call = call
        self._seq: int | None = None
        self._expected: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._handles: list[Any] = []

    def watch(self, edges: InputEdges, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Puts the hooks in place, at the end of the forward call."""
        for path, tensor in outputs:
            if tensor.requires_grad:
                through = edges.paths.get(_edge(tensor)) if edges.paths else None
                handle = tensor.register_hook(_ArrivalHook(self, path, through))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        if not edges.paths:
            return
        for node, index, path in edges.consumers(tensor.grad_fn for _, tensor in outputs):
            self._expected[path] = self._expected.get(path, 0) + 1
            self._handles.append(node.register_hook(_SendingHook(self, path, index)))
        self._waiting = dict(self._expected)

    def arrived(self, path: str, gradient: torch.Tensor, through: str | None) -> None:
        """The gradient of an output is complete. `through` is the input that this output is, for an identity."""
        if path in self._arrived:  # a second backward through the same graph
            self.finish()
        self._arrived.add(path)
        seq = self._started()
        self._engine.observe(seq, "input", path, gradient)
        if through is not None:
            self._engine.observe(seq, "output", through, gradient)

    def sent(self, path: str, gradient: torch.Tensor | None) -> None:
        """One of the call's nodes has computed what it sends to an input."""
        if gradient is not None:
            before = self._sums.get(path)
            with torch.no_grad():
                self._sums[path] = gradient if before is None else before + gradient
        self._waiting[path] -= 1
        if self._waiting[path] == 0 and path in self._sums:
            self._engine.observe(self._started(), "output", path, self._sums.pop(path))

    @property
    def is_partial(self) -> bool:
        return bool(self._sums)

    def finish(self) -> None:
        """Ends this pass: a sum that not every node added to is recorded as it is, and said to be partial."""
        for path, gradient in self._sums.items():
            self._engine.observe(self._started(), "output", path, gradient)
            self._engine.missed(
                f"part of the gradient that {self._call.site.name} sends to its input {path}",
                "the backward pass did not run through the whole call",
            )
        self._seq = None
        self._sums.clear()
        self._arrived.clear()
        self._waiting = dict(self._expected)

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
        if not self._engine.belongs_here():
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(f"a gradient of {self._call.site.name}", error)


class _ArrivalHook:
    """Sits on an output tensor."""

    __slots__ = ("gradients", "path", "through")

    def __init__(self, gradients: CallGradients, path: str, through: str | None) -> None:
        self.gradients = gradients
        self.path = path
        self.through = through

    def __call__(self, gradient: torch.Tensor) -> None:
        self.gradients.guarded(self.gradients.arrived, self.path, gradient, self.through)


class _SendingHook:
    """Sits on an autograd node and reads one of the gradients it computed."""

    __slots__ = ("gradients", "index", "path")

    def __init__(self, gradients: CallGradients, path: str, index: int) -> None:
        self.gradients = gradients
        self.path = path
        self.index = index

    def __call__(self, computed: tuple[torch.Tensor | None, ...], _: Any) -> None:
        self.gradients.guarded(self.gradients.sent, self.path, computed[self.index])


class LiveGradients:
    """Every call whose graph is still there, so that hooks can be taken off when the recording stops."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[CallGradients]] = []
        self._crowded = _ENOUGH
        self._changing = threading.Lock()

    def watch(self, engine: Engine, call: OpenCall, edges: InputEdges, outputs: list[tuple[str, torch.Tensor]]) -> None:
        gradients = CallGradients(engine, call)
        gradients.watch(edges, outputs)
        with self._changing:
            self._calls.append(weakref.ref(gradients))
        if len(self._calls) > self._crowded:  # a program that never ends a step
            self._living()
            self._crowded = max(_ENOUGH, 2 * len(self._calls))

    def finish(self) -> None:
        """Ends the step: a sum that is not complete is recorded as it is."""
        for gradients in self._living():
            if gradients.is_partial:
                gradients.guarded(gradients.finish)

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


def _edge(tensor: torch.Tensor) -> Edge:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
