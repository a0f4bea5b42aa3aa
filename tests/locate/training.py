"""A small program that can be recorded again and again in this process, with faults planted in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.capture.children import LastStep, end_after
from astray.locate.programs import RecordingRequest

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


class Training:
    """Trains `Net` for a few steps. `plant` is given the net, its optimizer and the step before each step."""

    def __init__(self, plant: Callable[[Net, torch.optim.Optimizer, int], None] | None = None, seed: int | None = 0):
        self._plant = plant
        self._seed = seed
        self.recordings: list[str] = []

    def __str__(self) -> str:
        return "train.py"

    def record(self, path: Path, request: RecordingRequest) -> None:
        self.recordings.append(path.name)
        if self._seed is None:
            torch.seed()
        else:
            torch.manual_seed(self._seed)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with suppress(LastStep), ExitStack() as around:
            for swap in request.swaps:
                what, _, to = swap.partition("=")
                around.enter_context(astray.experiment.swap(net, what, to=to))
            recorder = around.enter_context(astray.record(path, net, overwrite=True, **request.settings()))
            if request.until is not None:
                recorder.on_step_end = partial(end_after, request.until)
            for step in range(STEPS):
                if self._plant is not None:
                    self._plant(net, optimizer, step)
                ids = torch.randint(20, (4, 9))
                loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.step()


def silu_in_one_layer(net: Net, _: Any, step: int) -> None:
    if step == 2:
        net.h[1].act = F.silu


def silu_in_all_layers(net: Net, _: Any, step: int) -> None:
    for block in net.h:
        block.act = F.silu


def scaled_weight(net: Net, _: Any, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            net.h[1].down.weight.mul_(1.01)


def two_faults(net: Net, _: Any, step: int) -> None:
    if step == 1:
        net.h[0].act = F.silu
        net.h[2].norm.eps = 0.5


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


def wrong_backward(net: Net, _: Any, step: int) -> None:
    if step == 1:
        net.h[1].act = _Halved.apply


def wrong_update(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def wrong_tile(x: torch.Tensor) -> torch.Tensor:
    """What a bad kernel does: one tile of a result is two percent too large."""
    result = F.gelu(x)
    with torch.no_grad():
        result[0, :4, :8] *= 1.02
    return result
