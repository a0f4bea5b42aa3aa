"""Nets of equal blocks, so that every tensor has siblings; trained and recorded, with a fault or without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import astray

WIDTH, CLASSES, BATCH = 16, 5, 8

Plant = Callable[[Any], None]
"""Puts a fault into a model, before anything is recorded."""


class Block(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), act()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Blocks(nn.Module):
    """`depth` equal blocks and a head."""

    def __init__(self, depth: int = 6, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(act) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


def scaled(layer: nn.Module, factor: float) -> None:
    """Make the results of a layer too large, or too small."""
    right = layer.forward
    layer.forward = lambda *inputs: right(*inputs) * factor


def train(
    path: Path,
    plant: Plant | None = None,
    *,
    model: Callable[[], nn.Module] = Blocks,
    steps: int = 1,
    recorded: str | None = None,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    stepping: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 1e-2,
    before_update: Plant | None = None,
    **options: Any,
) -> Path:
    """Record some steps. Two recordings are bit-identical, except for the given changes.

    recorded: which steps, if not all. noise: what the data is off by, relatively, as if another kernel had made it.
    dtype: of the data. scale: of the loss.
    """
    torch.manual_seed(0)
    net = model()
    data, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    batches = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=data)
        x = (x * (1 + noise * torch.randn(x.shape, generator=other))).to(dtype)
        batches.append((x, torch.randint(0, CLASSES, (BATCH,), generator=data)))
    optimizer = stepping(net.parameters(), lr=lr)
    if plant is not None:
        plant(net)
    if recorded is not None:
        options["steps"] = recorded
    with astray.record(path, net, **options) as recorder:
        for x, wanted in batches:
            (functional.cross_entropy(net(x), wanted) * scale).backward()
            if before_update is not None:
                before_update(net)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return path
