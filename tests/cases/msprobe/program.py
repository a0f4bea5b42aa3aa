"""A model and two training steps, the second of two micro steps: what msprobe's dumps in this folder are of.

It has what names and structures differ in: a module in a module, a container, functions in modules and in the outermost
one, operators, a keyword argument, a tuple and a dict as results, integers, and a loss that is a module outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(x @ x.transpose(-1, -2) * scale, -1)
        return self.proj(scores @ x), scores


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.mix = Mix()
        self.tail = nn.Sequential(nn.Linear(3, 2), nn.GELU())

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.embed(ids))
        y, _ = self.mix(x, scale=torch.tensor(0.5))
        return {"logits": self.tail(F.relu(x + y))}


def make() -> tuple[Net, torch.Tensor, torch.Tensor]:
    """The model, and what goes in."""
    torch.manual_seed(0)
    return Net(), torch.tensor([[1, 4, 0, 2], [3, 3, 1, 0]]), torch.tensor([1, 0])


def train(
    net: Net, ids: torch.Tensor, labels: torch.Tensor, begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Two steps. `begin` and `end` are called around forward and backward of each."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for micro_steps in (1, 2):
        begin()
        for _ in range(micro_steps):
            logits = net(ids)["logits"]
            criterion(logits.mean(1), labels).backward()
        end()
        optimizer.step()
        optimizer.zero_grad()
