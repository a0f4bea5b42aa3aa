"""Leaf modules of torch.nn, made again from what is recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.replay.modules import NotALeafError, rebuild_module
from astray.replay.replay import Replay

IMAGE, WORDS, VECTOR = torch.randn(2, 4, 8, 8), torch.randint(0, 10, (2, 6)), torch.randn(2, 6, 16)
GIVEN: list[tuple[nn.Module, torch.Tensor]] = [
    (nn.Linear(16, 8), VECTOR), (nn.Linear(16, 8, bias=False), VECTOR), (nn.Embedding(10, 16, padding_idx=1), WORDS),
    (nn.Conv2d(4, 8, 3, padding=1, groups=2), IMAGE), (nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1), IMAGE),
    (nn.BatchNorm2d(4), IMAGE), (nn.BatchNorm2d(4).eval(), IMAGE), (nn.GroupNorm(2, 4), IMAGE),
    (nn.LayerNorm(16), VECTOR), (nn.RMSNorm(16), VECTOR), (nn.GELU(approximate="tanh"), VECTOR), (nn.GLU(), VECTOR),
    (nn.ReLU(inplace=False), VECTOR), (nn.PReLU(), VECTOR), (nn.Softmax(dim=-1), VECTOR), (nn.MaxPool2d(2), IMAGE),
    (nn.AdaptiveAvgPool2d((2, 2)), IMAGE), (nn.LSTM(16, 8, batch_first=True, bidirectional=True), VECTOR),
    (nn.GRU(16, 8, num_layers=2), VECTOR), (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
]  # fmt: skip


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """All of them, recorded as modules alone."""
    path = tmp_path_factory.mktemp("runs") / "modules"
    model = nn.ModuleList(module for module, _ in GIVEN)
    with astray.record(path, model, level="module", keep="stats,tensors") as recorder:
        for module, given in GIVEN:
            given = given.clone().requires_grad_(given.is_floating_point())
            out = module(given)
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        recorder.step()
    return astray.open(path).replay()


def test_every_one_is_executed_with_its_backward_and_none_stands_out(modules: Replay) -> None:
    assert not modules.left_out
    assert not modules.stands_out
    assert len(modules.calls) == len(GIVEN)
    assert all(any(tensor.phase == "backward" for tensor in call.tensors) for call in modules.calls if call.site != "2")


@pytest.mark.parametrize("at", [0, 3, 5, 8])
def test_parameters_of_another_shape_are_no_module_of_torch(at: int) -> None:
    module, _ = GIVEN[at]
    own = {name: each.detach().reshape(-1)[:1] for name, each in (*module.named_parameters(), *module.named_buffers())}
    with pytest.raises(NotALeafError, match="another shape"):
        rebuild_module(type(module).__name__, vars(module), own)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Attention", {}, "not a leaf"), ("Module", {}, "not a leaf"),
        ("Linear", {}, "without the setting in_features"),
        ("Linear", {"in_features": -1, "out_features": 4}, "cannot be made"),
        ("Linear", {"in_features": "4", "out_features": [4]}, "cannot be made"),
        ("LSTM", {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}, "1000000000 layers"),
        ("Linear", {"in_features": 10**30, "out_features": 2}, "cannot be made"),
        ("Linear", {"in_features": 4, "out_features": 4}, "weight was not recorded"),
    ],
)  # fmt: skip
def test_what_is_no_module_of_torch_is_refused(kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotALeafError, match=reason):
        rebuild_module(kind, settings, {})


def test_a_module_with_more_parameters_than_those_of_torch_is_another() -> None:
    own = {"weight": torch.ones(4), "bias": torch.ones(4), "gate": torch.ones(4)}
    with pytest.raises(NotALeafError, match="more parameters"):
        rebuild_module("LayerNorm", {"normalized_shape": [4], "eps": 1e-5, "elementwise_affine": True}, own)


class Doubled(nn.Linear):
    """It has another name than torch's, so it is left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_modules_of_the_program_are_left_out_with_the_reason(tmp_path: Path) -> None:
    model = nn.Sequential(Doubled(4, 4), nn.ReLU())
    with astray.record(tmp_path / "r", model, level="module", keep="stats,tensors"):
        model(torch.ones(2, 4))
    replay = astray.open(tmp_path / "r").replay()
    assert [call.site for call in replay.calls] == ["1"]
    assert replay.left_out == {"a module that is not a leaf of torch.nn": {"Doubled": 1, "Sequential": 1}}
