"""Puts an operator into a traced graph wherever a gradient of a call passes.

What is read where is told in `backward.gradients`. Here it is done in Python, by hooks that run once, while a backward
pass is traced: what they compute becomes a part of the compiled code. They go with the graph that was traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

from astray.capture.pytorch.compiled.code import never_compiled

Edge = tuple[Node, int]
Tensors = list[tuple[str, torch.Tensor]]
Routes = list[tuple[int, str]]
"""Which of a node's gradients belong to which paths."""

_LEAF = 2**64 - 1
"""The number of the nodes that accumulate into leaves, whenever they were made. Nothing lies behind them."""


class TracedEdges:
    """Where the inputs of a call hang in the autograd graph, taken before the call can change them in place.

    A tensor given twice is recorded under its first path. A leaf has no node before it is used: it stands for itself.
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
        """The nodes born inside the call that send a gradient to an input, with which of their edges do."""
        found: list[tuple[Node, Routes]] = []
        visited: set[Node] = set()
        ahead = [node for node in outputs if node is not None and node._sequence_nr() >= self.born]
        while ahead:
            node = ahead.pop()
            if node not in visited:
                visited.add(node)
                sends = self._sends(node, ahead)
                if sends:
                    found.append((node, sends))
        return found

    def _sends(self, node: Node, beyond: list[Node]) -> Routes:
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


class TracedGradients:
    """The gradients of one call, as they are traced.

    It never holds a node of the graph itself: a node holds its hooks, they hold this, and nobody could free the circle.
    """

    def __init__(self, call: torch.Tensor, number: int) -> None:
        self._call = call
        self._number = number
        self._expected: dict[str, int] = {}  # how many nodes send to each input
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._arrived: set[str] = set()

    def watch(self, edges: TracedEdges, outputs: Tensors) -> None:
        """Puts the hooks in place, at the end of the forward call."""
        # An output that is an input: what arrives cannot be told from what others send, so it counts as a whole.
        through = {path: same for path, tensor in outputs if (same := edges.path(tensor)) is not None}
        if edges.paths or edges.leaves:
            for node, sends in edges.consumers([tensor.grad_fn for _, tensor in outputs]):
                own = [(index, path) for index, path in sends if path not in through.values()]
                for _, path in own:
                    self._expected[path] = self._expected.get(path, 0) + 1
                if own:
                    node.register_hook(partial(self._sent, own))
            self._watch_for_completion(edges)
        for path, tensor in outputs:
            tensor.register_hook(partial(self._arrive, path, through.get(path)))  # type: ignore[no-untyped-call]

    def _watch_for_completion(self, edges: TracedEdges) -> None:
        """Of several nodes that send to one input some may never run: the sum is whole when the input's turn comes."""
        places = {path: edge for edge, path in edges.paths.items()}
        for path, count in self._expected.items():
            if count < 2:
                continue
            tensor, hook = edges.inputs[path], partial(self._complete, path)
            if edges.path(tensor) != path:  # changed in place since; its former self can only be reached by the node
                places[path][0].register_prehook(hook)
            else:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @never_compiled
    def _arrive(self, path: str, through: str | None, gradient: torch.Tensor | None) -> None:
        """The gradient of an output is complete. `through` is the input that this output is, for an identity."""
        if gradient is None:  # an output that nobody used
            return
        if path in self._arrived:  # a second backward through the same graph
            for waiting in list(self._sums):
                self._complete(waiting)
            self._arrived.clear()
        self._arrived.add(path)
        self._emit("input", path, gradient)
        if through is not None:
            self._emit("output", through, gradient)

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
        """Nothing more will be sent to this input: the backward pass has come to where it came from."""
        terms = self._sums.pop(path, [])
        if terms:
            total = terms[0]
            for term in terms[1:]:
                total = total + term  # in the graph, as anything else
            self._emit("output", path, total)

    def _emit(self, role: str, path: str, gradient: torch.Tensor) -> None:
        torch.ops.astray.gradient(gradient.detach(), self._call, role, path, self._number)
