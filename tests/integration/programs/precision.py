"""Mixed precision and other dtypes: autocast, a gradient scaler that skips a step, complex numbers, doubles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from integration.programs.language_models import sentences, small_gpt2
from integration.programs.program import STEPS, Setup, Steps, program

SKIPPED = 2
"""The step whose gradients are infinite, in the program with a gradient scaler."""


@program
def autocast_bfloat16() -> Steps:
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        ids = sentences()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def autocast_float16_with_a_skipped_step() -> Steps:
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    yield Setup(model, optimizer)
    for step in range(STEPS):
        x = torch.randn(4, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), torch.ones(4, 3))
        optimizer.zero_grad()
        scaler.scale(loss * (1e38 if step == SKIPPED else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach(), scaler.get_scale()


@program
def pure_bfloat16() -> Steps:
    model = small_gpt2().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        ids = sentences()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class Spectral(nn.Module):
    """Weights in the frequency domain, as in operators learned on grids."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64) / 2)
        self.after = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.before(x)) * self.weight
        mirrored = torch.fft.irfft(spectrum.conj(), n=8)
        return self.after(mirrored + spectrum.imag.mean() - torch.view_as_real(spectrum).square().mean())


@program
def complex_numbers() -> Steps:
    model = Spectral()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randn(3, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def channels_last() -> Steps:
    """Images whose channels lie closest together in memory, though not in the shape."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@program
def double_precision_with_a_closure() -> Steps:
    """The optimizer calls the model itself, several times a step."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        x = torch.randn(5, 6, dtype=torch.float64)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        yield optimizer.step(closure).detach()
