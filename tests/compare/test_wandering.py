"""Weights that an optimizer moves by the rounding of their gradients, in real recordings; and faults beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray

STEPS = 3


class Convolution(nn.Module):
    """The batch norm takes the bias of the convolution away again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.bn(self.conv(x))).flatten(1))

    def data(self) -> Tensor:
        return torch.randn(4, 3, 8, 8)


class Attention(nn.Module):
    """A third of the bias, that of the keys, adds the same to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv, self.out = nn.Linear(12, 32), nn.Linear(32, 96), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.up(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 32**0.5).softmax(-1)
        return self.out((weights @ value).mean(1))

    def data(self) -> Tensor:
        return torch.randn(4, 10, 12)


Plant = Callable[[Any, int], None]


def train(path: Path, net: type[Any], plant: Plant | None = None, **options: Any) -> Path:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with astray.record(path, model, **options) as recorder:
        for step in range(STEPS):
            if plant is not None:
                plant(model, step)
            loss = nn.functional.cross_entropy(model(model.data()), torch.randint(0, 5, (4,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return path


SETTINGS = [
    {},
    pytest.param({"keep": "tensors"}, marks=pytest.mark.slow),
    pytest.param({"level": "function"}, marks=pytest.mark.slow),
    {"level": ["module", "function"], "keep": ["stats", "fingerprint", "tensors"], "optimizer": ["update", "weight"]},
]


@pytest.mark.parametrize("net", [Convolution, Attention])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_weight_that_rounding_moves_is_no_fault(net: type[Any], options: dict[str, Any], tmp_path: Path) -> None:
    reference = train(tmp_path / "a", net, **options)
    found = astray.compare(reference, train(tmp_path / "b", net, perturb=0, **options))
    assert found.first is None
    assert found.counts["diverged"] == 0
    reasons = " ".join({str(reason) for reason in found.pairs["reason"].tolist()})
    assert "an optimizer moved it by the rounding of its gradient, in either run another way" in reasons


def bias_of_the_start(model: Any, step: int) -> None:
    if step == 0:
        model.conv.bias.data *= 1.01


def bias_beyond_its_moves(model: Any, step: int) -> None:
    if step == 2:
        model.conv.bias.data *= 1.5


def other_weight(model: Any, step: int) -> None:
    if step == 2:
        model.out.weight.data *= 1.001


def epsilon(model: Any, step: int) -> None:
    if step == 2:
        model.bn.eps = 1e-3


def momentum(model: Any, step: int) -> None:
    if step == 1:
        model.bn.momentum = 0.2


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (bias_of_the_start, (0, "conv", "parameter")),
        (bias_beyond_its_moves, (2, "conv", "parameter")),
        (other_weight, (2, "out", "parameter")),
        (epsilon, (2, "bn", "computation")),
        (momentum, (2, "bn", "parameter")),
    ],
)
@pytest.mark.parametrize("keep", ["stats", pytest.param("tensors", marks=pytest.mark.slow)])
def test_a_fault_beside_it_is_named(plant: Plant, place: tuple[int, str, str], keep: str, tmp_path: Path) -> None:
    reference = train(tmp_path / "a", Convolution, keep=keep)
    first = astray.compare(reference, train(tmp_path / "b", Convolution, plant, perturb=0, keep=keep)).first
    assert first is not None
    assert (first.step, first.site, first.cause) == place


def test_a_fault_in_the_part_of_a_bias_that_counts_is_named(tmp_path: Path) -> None:
    def plant(model: Any, step: int) -> None:
        if step == 2:
            model.qkv.bias.data[64:] += 0.02

    reference = train(tmp_path / "a", Attention)
    first = astray.compare(reference, train(tmp_path / "b", Attention, plant, perturb=0)).first
    assert (first.step, first.site, first.cause) == (2, "qkv", "parameter")
