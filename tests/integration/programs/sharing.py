"""Modules and weights that are used more than once, and modules that come, go or change while the program runs."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from integration.programs.program import STEPS, Setup, Steps, program


class Tied(nn.Module):
    """The head's weight is the embedding's, one layer stands in two places, and a weight is used by itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.embedding(ids)))
        x = F.linear(self.second(x), self.first.weight.t())
        return self.head(x)


@program
def shared_modules_and_tied_weights() -> Steps:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        ids = torch.randint(20, (3, 4))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class Looping(nn.Module):
    """One block is called as often as the data say, and calls itself inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.halt = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
            if bool(self.halt(x).mean() > 1.0):
                break
        return x if depth == 2 else self(x, depth + 1)


@program
def modules_in_loops() -> Steps:
    model = Looping()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = (model(torch.randn(3, 6)) + model.halt(torch.randn(3, 6))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def a_copy_that_follows() -> Steps:
    """A moving average of the model, made by copying it while it is being recorded; and part of it frozen by turns."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    shadow = copy.deepcopy(model)
    for step in range(STEPS):
        model[0].requires_grad_(step % 2 == 0)
        x = torch.randn(3, 6)
        loss = F.mse_loss(model(x), shadow(x).detach() + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, followed in zip(shadow.parameters(), model.parameters(), strict=True):
                own.lerp_(followed, 0.1)
        yield loss.detach(), [own.clone() for own in shadow.state_dict().values()]


@program
def normalized_weights() -> Steps:
    """Weights that are computed anew from others at each call, by parametrizations with state."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(spectral, nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randn(3, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
