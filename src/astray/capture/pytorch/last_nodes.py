"""The gradients of the last autograd node that a function made, as msprobe has them: `node.0.2.1` is the first of two
that it sends on, of one that it got.

Where a function is one node these are the gradients of its arguments; else they are of something inside of it. What the
function sends to its own arguments is recorded beside them, as ever. Only recordings for msprobe's files ask for this.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.compiler import is_compiling

from astray.capture.engine import Engine, OpenCall
from astray.capture.pytorch.compiled.code import never_compiled
from astray.capture.pytorch.gradients import InputEdges, LiveGradients

Tensors = list[tuple[str, torch.Tensor]]

_ENOUGH = 4096  # hooks that are remembered before the dead are looked for


class LastNodes:
    """Stands before the gradients of functions: sees the last node of each call, and then what they see."""

    def __init__(self, live: LiveGradients) -> None:
        self._live = live
        self._hooks: list[tuple[Any, int]] = []  # a weak reference to the dict that a hook is in, and its key there
        self._crowded = _ENOUGH
        self._changing = threading.Lock()

    def watch(self, engine: Engine, call: OpenCall, edges: InputEdges, outputs: Tensors) -> None:
        """Sees the gradients of a call that has returned `outputs`; none of what has made a leaf, or has set items."""
        if all(tensor.grad_fn is None for _, tensor in outputs) or call.site.type.endswith(".__setitem__"):
            return
        node = outputs[0][1].grad_fn
        if node is not None and outputs[0][1].requires_grad:
            arrives = {tensor.output_nr: path for path, tensor in reversed(outputs) if tensor.grad_fn is node}
            handle = node.register_hook(_LastNode(engine, call, arrives))
            with self._changing:
                self._hooks.append((handle.hooks_dict_ref, handle.id))
            if len(self._hooks) > self._crowded:  # a program that never ends a step
                self.finish()
                self._crowded = max(_ENOUGH, 2 * len(self._hooks))
        self._live.watch(engine, call, edges, outputs)  # behind it: its rows come after those of the node

    def finish(self) -> None:
        """Keeps only what belongs to a graph that is still there."""
        with self._changing:
            self._hooks = [one for one in self._hooks if one[0]() is not None]

    def remove(self) -> None:
        """Takes every hook off the graphs."""
        with self._changing:
            hooks, self._hooks = self._hooks, []
        for reference, key in hooks:
            placed = reference()
            if placed is not None:
                placed.pop(key, None)


class _LastNode:
    """The hook on the node."""

    __slots__ = ("_arrives", "_call", "_engine")

    def __init__(self, engine: Engine, call: OpenCall, arrives: dict[int, str]) -> None:
        self._engine, self._call, self._arrives = engine, call, arrives

    @never_compiled
    def __call__(self, computed: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        engine = self._engine
        if is_compiling() or engine.paused or not engine.is_here:
            return
        try:
            with DisableTorchFunction():  # what is done here is no part of the program
                seq = engine.backward(self._call)
                observe = engine.tensors.observe
                for index, gradient in enumerate(arrived):
                    if gradient is not None:  # else an output that nobody used
                        observe(seq, "input", self._arrives.get(index, f"out.{index}"), gradient)
                for index, gradient in enumerate(computed):
                    if gradient is not None:
                        observe(seq, "output", f"node.{index}.{len(computed)}.{len(arrived)}", gradient)
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            engine.failed(f"a gradient of {self._call.site.name}", error)
