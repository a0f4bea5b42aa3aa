"""Records small programs for the tests of alarms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import astray
from nonfinite.accidents import Model, Program


def record(path: Path, program: Program | nn.Module, *levels: str, steps: int = 1, **settings: Any) -> astray.Run:
    """Trains for some steps, on the same data in every step, and gives the recording."""
    torch.manual_seed(0)
    model = program if isinstance(program, nn.Module) else Model(program)
    x = settings.pop("x", None)
    x = torch.randn(4, 4) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.record(path, model, level=list(levels), **settings) as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            recorder.step()
    return astray.open(path)


LEVELS = (("module",), ("function",), ("op",), ("module", "function"))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
