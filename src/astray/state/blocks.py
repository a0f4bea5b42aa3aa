"""A tensor in blocks of bounded size: what needs other numbers than the tensor holds makes them a block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 19
"""Elements taken at once: 4 MB as float64, enough to keep a device busy and nothing beside a model."""


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, as flat blocks; only what is not contiguous is copied, a block at a time."""
    size = tensor.numel()
    if size <= BLOCK:
        if size:
            yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), BLOCK)
    else:
        rows = BLOCK * tensor.shape[0] // size
        for part in torch.split(tensor, max(rows, 1)):
            yield from blocks(part if rows else part[0])
