"""A guarded program computes the same bits as a bare one, and nothing of the guard is left."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from guarding.training import hooks_of, train, tripped

ASKED: list[dict[str, Any]] = [
    {},
    {"level": "function"},
    {"level": ["module", "function", "op"]},
    {"level": ["module", "function"], "exact": True},
    {"spike": 10.0, "when": lambda rows: None, "keep": "tensors"},
]


class Noisy(nn.Module):
    """Draws random numbers, and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((4, 4), float("-inf")).triu(1)
        attention = torch.softmax(x @ x.T @ torch.ones(len(x), 4) @ torch.eye(4) + mask[: len(x)], -1)
        result: Tensor = self.body(x + attention)
        return result


def trained(**asked: Any) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = Noisy()
    torch.manual_seed(1)
    if not asked:
        return train(model, 8), model.state_dict(), torch.rand(3)
    with astray.guard(model, **asked):
        losses = train(model, 8)
    assert hooks_of(model) == 0
    return losses, model.state_dict(), torch.rand(3)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(asked) or "nothing")
def test_losses_weights_and_random_numbers_are_the_same(asked: dict[str, Any], tmp_path: Path) -> None:
    threads = threading.active_count()
    losses, weights, drawn = trained()
    theirs, their_weights, their_drawn = trained(path=tmp_path / "guard", **asked)
    assert theirs == losses
    assert torch.equal(drawn, their_drawn)
    assert list(weights) == list(their_weights)
    for name, weight in weights.items():
        assert torch.equal(weight, their_weights[name]), name
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
    assert not torch._C._len_torch_function_stack()
    assert not torch._C._len_torch_dispatch_stack()


def test_a_program_that_is_stopped_has_the_bits_of_that_moment(tmp_path: Path) -> None:
    """All before the optimizer of the step that trips is done, and so is its update."""

    class Bad(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log()

    bare, watched = Bad(), Bad()
    torch.manual_seed(1)
    train(bare, 1)
    torch.manual_seed(1)
    with tripped(), astray.guard(watched, path=tmp_path / "guard"):
        train(watched, 5)
    for name, weight in bare.state_dict().items():
        assert torch.equal(weight.isnan(), watched.state_dict()[name].isnan()), name
