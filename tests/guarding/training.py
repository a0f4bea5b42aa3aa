"""Small trainings under a guard, in which a step goes wrong when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import astray
from nonfinite.accidents import Model, Program


class Net(nn.Module):
    """Two layers; in its n-th forward of the numbers in `bad` it takes the logarithm of zeros between them."""

    def __init__(self, bad: Iterable[int] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.bad = frozenset(bad)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.forwards in self.bad:
            h = torch.log(h * 0)  # origin
        self.forwards += 1
        return self.second(h)


@contextmanager
def tripped(match: str | None = None) -> Iterator[pytest.ExceptionInfo[astray.Tripped]]:
    """A program that a guard has to end."""
    with pytest.raises(astray.Tripped, match=match) as caught:
        yield caught


def batch(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


def train(
    model: nn.Module,
    steps: int = 6,
    *,
    between: Callable[[int, astray.Guard | None], object] = lambda step, guard: None,
    guard: astray.Guard | None = None,
    x: Callable[[int], Tensor] = batch,
) -> list[float]:
    """Trains; `between` is called before the optimizer of each step. Gives the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x(step))
        loss.backward()
        between(step, guard)
        optimizer.step()
        losses.append(loss.item())
    return losses


def guarded(model: nn.Module, path: Any, steps: int = 6, *, between: Any = None, x: Any = batch, **asked: Any) -> Any:
    """The guard of a training that was not stopped."""
    with astray.guard(model, path=path, **asked) as guard:
        train(model, steps, guard=guard, x=x, **({"between": between} if between is not None else {}))
    return guard


def steps_in(run: astray.Run, rank: int = 0) -> list[int]:
    return run.ranks[rank].summary.steps


def hooks_of(model: nn.Module) -> int:
    """How many hooks of any kind there are on the modules and parameters of a model."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    on_modules = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    tensors = [*model.parameters(), *model.buffers()]
    return on_modules + sum(
        len(one._backward_hooks or ()) + len(getattr(one, "_post_accumulate_grad_hooks", None) or ()) for one in tensors
    )


def guard_program(path: Path, program: Program | nn.Module, *levels: str, steps: int = 1, **asked: Any) -> astray.Guard:
    """The training of `nonfinite.recording.record`, under a guard."""
    torch.manual_seed(0)
    model = program if isinstance(program, nn.Module) else Model(program)
    x = asked.pop("x", None)
    x = torch.randn(4, 4) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.guard(model, path=path, on="warn", level=list(levels), **asked) as guard:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return guard


class Halved(nn.Module):
    """Gradients pass through float16 on their way to the weights. In its n-th forward something may go wrong."""

    def __init__(self, bad: int = -1, how: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.bad, self.how, self.forwards = bad, how, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.forwards == self.bad:
            h = torch.log(h * 0) if self.how == "forward" else torch.sqrt(h * 0)
        self.forwards += 1
        return (h.half() * 1).float()


def train_scaled(model: nn.Module, scale: float, steps: int = 5, **scaler: Any) -> list[float]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler_ = GradScaler("cpu", init_scale=scale, **scaler)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).sum()
        scaler_.scale(loss).backward()
        scaler_.step(optimizer)
        scaler_.update()
        losses.append(loss.item())
    return losses
