"""How fast a plain read of device memory is: the bound that kernels and recordings are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_sections.work import Work

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def _read(source, target, count, rounds: tl.constexpr, block: tl.constexpr):
        """Adds up 32-bit words: every program the same number of blocks, one after the other."""
        program = tl.program_id(0).to(tl.int64)
        offsets = program * rounds * block + tl.arange(0, block)
        total = tl.zeros((block,), tl.int32)
        for _ in range(rounds):
            total += tl.load(source + offsets, mask=offsets < count, other=0)
            offsets += block
        tl.store(target + program, tl.sum(total))


SHAPES = [(2048, 1, 4), (4096, 1, 8), (4096, 4, 8), (8192, 4, 8), (8192, 8, 16)]
"""Words at once, how often, and by how many warps."""


def read_bandwidth(work: Work) -> float | None:
    """The best of a plain read of 512 MB, in bytes a second; None without a GPU."""
    if not work.has_gpu:
        return None
    data = torch.ones(1 << 27, dtype=torch.int32, device=work.device)
    return best_read(data)


def best_read(data: torch.Tensor) -> float:
    """The best plain read of this memory, in bytes a second."""
    words = data.view(torch.int32)
    return data.nbytes / min(device_seconds(job) for job in _readers(words))


def _readers(words: torch.Tensor) -> list[Callable[[], Any]]:
    if triton is None:
        return [words.sum]
    target = torch.empty(1 << 20, dtype=torch.int32, device=words.device)

    def reader(block: int, rounds: int, warps: int) -> Callable[[], Any]:
        programs = -(-words.numel() // (block * rounds))
        return lambda: _read[(programs,)](words, target, words.numel(), rounds, block, num_warps=warps)

    return [reader(*shape) for shape in SHAPES]


def device_seconds(job: Callable[[], Any], launches: int = 20, repeats: int = 5, between: Any = lambda: None) -> float:
    """What one launch takes on the device when it follows the one before at once: the best of the repeats.

    `between` is called before each of them.
    """
    job()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        between()
        start.record()
        for _ in range(launches):
            job()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / launches / 1e3)
    return best
