"""Models small enough to reason about, each with something that is hard to record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """The input of `norm` is used twice: by `norm`, and by the sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class InPlace(nn.Module):
    """Changes its activations in place, and a slice of them too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[:, 0] += 1.0
        return self.second(self.act(y))


class Shared(nn.Module):
    """One layer called three times, and its weight used once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.layer(x))
        return F.linear(self.again(x), self.layer.weight)


class Noisy(nn.Module):
    """Randomness and running statistics: both change if recording runs anything of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x[:, None])))).flatten(1))


class Attending(nn.Module):
    """A module given the same tensor three times, by position and by keyword, that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None].expand(-1, 3, -1)
        y, weights = self.attn(h, h, value=h)
        return y.mean(1) + weights.sum()


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclass
class Bag:
    logits: torch.Tensor
    extras: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns tuples, dicts, dataclasses and named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.give = Giver()
        self.take = Taker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.give(x), scale=2.0, mask=None)


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Bag:
        y = self.layer(x)
        return Bag(y, {"pair": Pair(y * 2, None), "count": 3, "parts": [y[:1], y[1:]]})


class Taker(nn.Module):
    def forward(self, bag: Bag, *, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        parts = torch.cat(bag.extras["parts"])
        return bag.logits * scale + bag.extras["pair"].left + parts


MODELS = [Residual, InPlace, Shared, Noisy, Attending, Nested]


def train(model: nn.Module, steps: int = 5, seed: int = 0, after_step: Any = None) -> dict[str, Any]:
    """Trains for a few steps; returns everything that recording must not change by a bit."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, gradients = [], []
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append(loss.detach().clone())
        if after_step is not None:
            after_step()
    return {"losses": losses, "gradients": gradients, "state": {n: t.clone() for n, t in model.state_dict().items()}}


def build(kind: type[nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def same_bits(one: Any, other: Any) -> bool:
    """True when two nested results are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)
