"""CUDA graphs: what is replayed is not seen call by call, and writes to memory that no version counter watches.

Nothing of ours is put into a graph while the program captures it; the rows of that time say so. A replay is one step
for the device, so only what goes into it and comes out of it can be recorded, by the modules around it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from astray.capture.engine import Engine


class GraphReplays:
    """Is told of every replay of a CUDA graph, until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._original: Any = None

    def start(self) -> None:
        original = self._original = torch.cuda.CUDAGraph.replay
        engine = self._engine

        @functools.wraps(original)
        def replay(graph: torch.cuda.CUDAGraph) -> None:
            original(graph)
            if engine.listening and engine.belongs_here():
                engine.tensors.forget()  # its outputs hold other numbers now, at the same address and version
                engine.missed("calls inside a CUDA graph", "a replay of it runs as a whole")

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        if self._original is not None:
            torch.cuda.CUDAGraph.replay = self._original  # type: ignore[method-assign]
            self._original = None
