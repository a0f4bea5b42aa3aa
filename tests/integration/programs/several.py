"""More than one model, and more than one thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

from integration.programs.program import STEPS, Setup, Steps, program


@program
def adversaries() -> Steps:
    """A generator and a discriminator with an optimizer each; the discriminator is called three times a step."""
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    makes = torch.optim.Adam(generator.parameters(), lr=1e-2)
    judges = torch.optim.RMSprop(discriminator.parameters(), lr=1e-2)
    yield Setup({"generator": generator, "discriminator": discriminator}, makes, judges)
    for _ in range(STEPS):
        real, made = torch.randn(5, 4), generator(torch.randn(5, 3))
        judges.zero_grad()
        right = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        right.backward()
        judges.step()
        makes.zero_grad()
        fooled = F.softplus(-discriminator(made)).mean()
        fooled.backward()
        makes.step()
        yield right.detach(), fooled.detach()


def _networks() -> tuple[dict[str, nn.Module], list[torch.optim.Optimizer]]:
    models = {name: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)) for name in ("left", "right")}
    return models, [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models.values()]


@program
def two_threads() -> Steps:
    """Two models, each trained in a thread of its own, that wait for each other in the middle of every step."""
    models, optimizers = _networks()
    yield Setup(dict(models), *optimizers)
    for _ in range(STEPS):
        data = torch.randn(2, 2, 3, 6)
        losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}
        together = threading.Barrier(2, timeout=60)

        def train(
            name: str, optimizer: torch.optim.Optimizer, batches: torch.Tensor,
            losses: dict[str, list[torch.Tensor]] = losses, together: threading.Barrier = together,
        ) -> None:  # fmt: skip
            optimizer.zero_grad()
            for batch in batches:
                together.wait()
                loss = models[name](batch).square().mean()
                loss.backward()
                losses[name].append(loss.detach())
            optimizer.step()

        threads = [
            threading.Thread(target=train, args=(name, optimizer, batches))
            for name, optimizer, batches in zip(models, optimizers, data, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield losses


@program
def forward_in_another_thread() -> Steps:
    """Forwards in a thread, one after the other; backwards here."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ThreadPoolExecutor(1) as pool:
        yield Setup(model, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = list(pool.map(model, torch.randn(2, 3, 6)))
            losses = [y.square().mean() for y in outputs]
            torch.stack(losses).sum().backward()
            optimizer.step()
            yield [loss.detach() for loss in losses]


@program(racy=True)
def forwards_in_a_pool_of_threads() -> Steps:
    """One model called by two threads at the same time, in an order that is not defined."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    with ThreadPoolExecutor(2) as pool:
        yield Setup(model)
        for _ in range(STEPS):
            yield [y.detach() for y in pool.map(model, torch.randn(6, 3, 6))]
