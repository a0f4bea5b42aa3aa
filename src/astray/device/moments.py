"""Moments of many tensors on a GPU in one launch, without waiting for the result.

The rows stay on the device. `astray.state` fetches those of a whole state with one wait, and merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MomentRows = npt.NDArray[np.float64]

MOST_ROWS = 256
"""Rows that a tensor is measured in at most: enough for every processor of a large GPU when it is alone."""

STRETCH = 1 << 16
"""Elements that a program reads at least, unless the tensor is smaller."""

TILE = 512
"""Elements that a program reads at a time."""

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Those whose fourth powers float64 can hold, so that nothing has to be scaled."""


def can_measure(tensor: torch.Tensor) -> bool:
    """Whether `measure` takes this tensor."""
    return (
        tensor.dtype in DTYPES
        and tensor.is_cuda
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and torch.version.cuda is not None
        and _kernel() is not None
    )


def measure(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Measure tensors of one dtype on one device: the rows, and how many of them are each tensor's, in order.

    The kernel runs in the current stream, so the memory may be written to or freed afterwards.
    """
    table, counts = stretches([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])
    device = tensors[0].device
    on_host = torch.from_numpy(table).pin_memory()
    on_device = on_host.to(device, non_blocking=True)
    rows = torch.empty((len(table), 16), dtype=torch.float64, device=device)
    launch(on_device, rows, DTYPES[tensors[0].dtype])
    return rows, counts


def launch(table: torch.Tensor, rows: torch.Tensor, dtype: str) -> None:
    """Run the kernel for a table of stretches."""
    import triton.language as tl

    kernel = _kernel()
    assert kernel is not None
    if table.is_cuda:
        with torch.cuda.device(table.device):
            kernel[(len(table),)](table, rows, getattr(tl, dtype), TILE, num_warps=4)
    else:  # interpreted
        kernel[(len(table),)](table, rows, getattr(tl, dtype), TILE)


def stretches(memory: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The table of the kernel for tensors of these addresses and sizes, and how many rows each has.

    >>> stretches([(4096, 100_000), (8192, 7)])[0].tolist()
    [[4096, 0, 65536], [4096, 65536, 100000], [8192, 0, 7]]
    """
    parts, counts = [], []
    for address, size in memory:
        length = max(STRETCH, -(-size // (MOST_ROWS * TILE)) * TILE)
        starts = np.arange(0, size, length, dtype=np.int64)
        parts.append(np.stack([np.full_like(starts, address), starts, np.minimum(starts + length, size)], axis=1))
        counts.append(len(starts))
    return np.concatenate(parts), counts


def merged(rows: MomentRows, counts: Sequence[int]) -> MomentRows:
    """The rows of each tensor as one: what `stats.moments.merge` gives, of all tensors at once."""
    starts = np.cumsum([0, *counts[:-1]])
    add = np.add.reduceat
    result = np.empty((len(counts), rows.shape[1]))
    result[:, :6] = add(rows[:, :6], starts)
    result[:, [6, 8]] = np.fmin.reduceat(rows[:, [6, 8]], starts)
    result[:, [7, 9]] = np.fmax.reduceat(rows[:, [7, 9]], starts)
    result[:, 10:12] = add(rows[:, 10:12], starts)
    finite, means = rows[:, 1], np.where(rows[:, 1] > 0, rows[:, 12], 0.0)
    with np.errstate(invalid="ignore"):
        mean = add(finite * means, starts) / result[:, 1]
    alike = result[:, 6] == result[:, 7]
    result[:, 12] = np.where(alike, result[:, 6], mean)
    d = np.where(finite > 0, means - np.repeat(mean, counts), 0.0)  # from the mean of all to that of a row
    m2, m3, m4 = rows[:, 13], rows[:, 14], rows[:, 15]
    result[:, 13] = add(m2 + finite * d**2, starts)
    result[:, 14] = add(m3 + 3 * d * m2 + finite * d**3, starts)
    result[:, 15] = add(m4 + 4 * d * m3 + 6 * d**2 * m2 + finite * d**4, starts)
    result[:, 13:][alike] = 0.0
    return result


@cache
def _kernel() -> Any:
    """The kernel; None where there is no Triton."""
    try:
        from astray.device.triton_moments import measure_moments
    except ImportError:
        return None
    return measure_moments
