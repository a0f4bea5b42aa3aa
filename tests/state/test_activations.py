"""Activations and their gradients: everything that passes is seen, once it is removed no hook remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import astray
from recorded_rows import hooks_of


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "not a tensor"


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Many(nn.Module):
    """Gives tensors in every kind of container, and calls a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2)
        self.split = Splitting()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> Output:
        y, _ = self.lstm(x)
        parts = self.split(y)
        return Output(self.relu(parts["pair"].low), (self.relu(-parts["pair"].high),))


class Splitting(nn.Module):
    def forward(self, y: torch.Tensor) -> dict[str, Any]:
        return {"pair": Pair(y[..., :1], y[..., 1:]), "list": [y.sum()]}


NAMES = [
    "lstm.0", "lstm.1.0", "lstm.1.1", "split.pair.low", "split.pair.high", "split.list.0", "relu", "relu#1",
    "<root>.logits", "<root>.hidden.0",
]  # fmt: skip


def test_everything_that_modules_give_is_seen() -> None:
    model = Many()
    before = hooks_of(model)
    with astray.state.from_activation(model) as acts:
        assert len(acts) == 0
        output = model(torch.ones(4, 1, 3))
        assert list(acts) == NAMES
        model(torch.ones(5, 1, 3))  # begins anew
        assert list(acts) == NAMES
    assert hooks_of(model) == before
    assert acts["<root>.logits"].shape == (5, 1, 1)
    assert not acts["relu"].requires_grad
    model(torch.zeros(4, 1, 3))
    assert acts["<root>.logits"].shape == (5, 1, 1)
    assert acts.name == "Many_activations"
    assert output.logits.requires_grad
    assert len(acts.norm2(lw=True)) == len(NAMES)


def test_some_modules_only() -> None:
    model = Many()
    acts = astray.state.from_activation(model, pattern="relu")
    model(torch.ones(4, 1, 3))
    assert list(acts) == ["relu", "relu#1"]
    acts.remove()
    assert hooks_of(model) == 0


def test_a_module_called_by_itself_is_seen_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with astray.state.from_activation(model) as acts:
        model[0](torch.ones(1, 2))
        model[0](torch.ones(3, 2))
    assert list(acts) == ["0"]
    assert acts["0"].shape == (3, 2)


def test_gradients_come_in_the_order_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    with astray.state.from_activation_grad(model) as grads, astray.state.from_activation(model) as acts:
        loss = model(torch.ones(4, 2)).square().sum()
        loss.backward()
    assert list(grads) == ["0", "1", "2", "<root>"]
    assert grads["2"].tolist() == (2 * acts["2"]).tolist()
    assert torch.allclose(grads["1"], grads["2"] @ model[2].weight)
    assert torch.allclose(grads["0"], grads["1"] * (1 - acts["1"] ** 2))
    assert acts.is_compatible(grads)


def test_gradients_after_removal_are_not_taken() -> None:
    model = nn.Linear(2, 1)
    grads = astray.state.from_activation_grad(model)
    loss = model(torch.ones(1, 2)).sum()
    grads.remove()
    loss.backward()
    assert len(grads) == 0


def test_what_checkpointing_runs_again_is_nothing_new() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    with astray.state.from_activation(model) as acts:
        loss = model(torch.ones(1, 2, requires_grad=True)).sum()
        seen = {name: value.data_ptr() for name, value in acts.items()}
        loss.backward()
    assert {name: value.data_ptr() for name, value in acts.items()} == seen
    assert list(acts) == ["inner.0", "inner.1", "inner", "<root>"]


def test_copies_are_not_changed_by_what_follows_in_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].bias.zero_()
    with astray.state.from_activation(model) as shared, astray.state.from_activation(model, clone=True) as copied:
        model(torch.ones(1, 2))
    assert shared["0"].tolist() == [[0.0, 0.0]]
    assert copied["0"].tolist() == [[-2.0, -2.0]]


def test_a_forward_that_fails_leaves_it_usable() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with astray.state.from_activation(model) as acts:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 2))
        assert list(acts) == ["0"]
        model[0](torch.ones(5, 2))
        assert list(acts) == ["0"]
