"""Data from worker processes, forked and spawned, which call the model that is being recorded and must not record."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from integration.programs.program import STEPS, Setup, Steps, program

BATCH = 4


class Preprocessed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples that the frozen part of the model has seen already, in the worker.

    Frozen, because a spawned worker shares the model's memory and would see the weights move under it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.data = torch.randn(BATCH * STEPS, 6)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.data[index] + 0.1 * torch.randn(6), self.model[0](self.data[index])


def _loaded(context: str) -> Steps:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    loader = DataLoader(
        Preprocessed(model), BATCH, shuffle=True, num_workers=2, multiprocessing_context=context,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for x, wanted in loader:
        loss = F.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def forked_workers() -> Steps:
    yield from _loaded("fork")


@program(slow=True)
def spawned_workers() -> Steps:
    yield from _loaded("spawn")
