"""Activation checkpointing in both forms: what a call computed is thrown away and computed again in the backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from integration.programs.language_models import small_gpt2, trained
from integration.programs.program import STEPS, Setup, Steps, program


class Block(nn.Module):
    """Has dropout, whose randomness the recomputation must meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def _trained(model: nn.Module) -> Steps:
    """Two micro steps each, so that the work done again has to find its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [model(torch.randn(3, 6)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        yield [loss.detach() for loss in losses]


@program
def checkpointing() -> Steps:
    yield from _trained(Checkpointed(reentrant=False))


@program
def reentrant_checkpointing() -> Steps:
    yield from _trained(Checkpointed(reentrant=True))


@program
def checkpointed_segments() -> Steps:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    yield from _trained(Segments())


@program
def nested_checkpointing() -> Steps:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(reentrant=False)
            self.head = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=False))

    yield from _trained(Nested())


@program
def gpt2_with_gradient_checkpointing() -> Steps:
    model = small_gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield from trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
