"""The processes of a distributed program. They are started once, because that takes seconds, and serve all runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Ranks:
    """Processes that have joined one group, each of which calls the same function with its own rank."""

    def __init__(self, count: int, meet: Path) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit the threads of torch, half of them
        self._processes = [
            ProcessPoolExecutor(1, spawn, _join, (rank, count, f"file://{meet}")) for rank in range(count)
        ]

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function(rank, *arguments)` in every process, and wait for all."""
        calls = [process.submit(function, rank, *arguments) for rank, process in enumerate(self._processes)]
        for call in calls:
            call.result()

    def close(self) -> None:
        self.call(_leave)
        for process in self._processes:
            process.shutdown()


def _join(rank: int, count: int, meet: str) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)


def _leave(_rank: int) -> None:
    dist.destroy_process_group()
