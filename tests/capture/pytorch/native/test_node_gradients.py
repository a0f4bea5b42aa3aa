"""Calls that make one autograd node, whose gradients are all seen by one hook on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from recorded_rows import outline, rows


def test_what_arrives_is_what_a_hook_of_the_program_made_of_it(tmp_path: Path) -> None:
    model, x = nn.Identity(), torch.ones(3, requires_grad=True)
    with astray.record(tmp_path / "run", model, level="function"):
        y = torch.sigmoid(model(x))
        y.register_hook(lambda gradient: gradient * 5)
        y.sum().backward()
    (arrived,) = rows(astray.open(tmp_path / "run"), site="/sigmoid", phase="backward", role="input")
    (sent,) = rows(astray.open(tmp_path / "run"), site="/sigmoid", phase="backward", role="output")
    assert arrived["mean"] == 5.0
    assert sent["mean"] == pytest.approx(float(x.grad.mean()), rel=1e-7)  # type: ignore[union-attr]


def test_a_second_backward_is_a_second_call(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with astray.record(tmp_path / "run", nn.Identity(), level="function"):
        y = torch.sigmoid(x).sum()
        y.backward(retain_graph=True)
        y.backward()
    assert (
        outline(astray.open(tmp_path / "run"), site="/sigmoid", phase="backward")
        == [
            "/sigmoid backward input out",
            "/sigmoid backward output 0",
        ]
        * 2
    )


@pytest.mark.parametrize("square", [lambda x: x * x, lambda x: torch.mul(x, other=x)], ids=["twice", "by name"])
def test_an_input_given_twice_gets_the_sum(tmp_path: Path, square: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.full((3,), 4.0, requires_grad=True)
    with astray.record(tmp_path / "run", nn.Identity(), level="function"):
        square(x).sum().backward()
    (sent,) = rows(astray.open(tmp_path / "run"), site="/mul", phase="backward", role="output")
    assert (sent["path"], sent["mean"]) == ("0", 8.0)


def test_only_the_outputs_that_were_used_get_a_gradient(tmp_path: Path) -> None:
    x = torch.ones(6, requires_grad=True)
    with astray.record(tmp_path / "run", nn.Identity(), level="function"):
        _, middle, _ = torch.split(x, 2)
        F.relu(middle).sum().backward()
    assert outline(astray.open(tmp_path / "run"), site="/split", phase="backward") == [
        "/split backward input out.1",
        "/split backward output 0",
    ]


def test_no_hook_is_left_on_a_graph_that_outlives_the_recording(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with astray.record(tmp_path / "run", nn.Identity(), level="function"):
        y = torch.sigmoid(x)
        z = F.linear(y.view(1, 3), torch.ones(2, 3, requires_grad=True))
    z.sum().backward()
    assert outline(astray.open(tmp_path / "run"), phase="backward") == []
    assert x.grad is not None
