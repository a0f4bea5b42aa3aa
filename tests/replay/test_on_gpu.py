"""Runs of a CUDA device, replayed on the CPU: nothing stands out of what the device's own kernels give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.replay.replay import Replay
from replay import faults, programs, transformer_models

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_A_DEVICE = "random numbers of a device's own generator, which this processor does not have"


def recorded(
    folder: Path, make: Callable[[], nn.Module], loss: Callable[[nn.Module], Any], dtype: torch.dtype
) -> Replay:
    torch.manual_seed(0)
    model = make().to(dtype).cuda()
    with astray.record(folder, model, level="function", keep="stats,tensors") as recorder, torch.device("cuda"):
        loss(model).backward()
        recorder.step()
    return astray.open(folder).replay()


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("name", {**programs.FIRST_HALF, **programs.SECOND_HALF})
def test_nothing_stands_out_of_a_healthy_program(name: str, tmp_path: Path) -> None:
    make, loss, dtype = {**programs.FIRST_HALF, **programs.SECOND_HALF}[name]
    if "autocast" in name:
        loss = under_autocast
    replay = recorded(tmp_path / "r", make, loss, dtype)
    assert not replay.stands_out
    assert {*replay.left_out} <= {ON_A_DEVICE}


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return programs.language_loss(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", transformer_models.MODELS)
def test_nothing_stands_out_of_models_that_were_not_seen(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    replay = recorded(tmp_path / "r", *transformer_models.MODELS[name], dtype)
    assert not replay.stands_out


def test_products_in_tf32_are_explained_where_the_program_allows_them(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        replay = recorded(tmp_path / "r", programs.GPT, programs.language_loss, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not replay.stands_out


def test_what_a_device_draws_is_kept_and_told(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return F.dropout(model(torch.ones(4, 8)), 0.5).sum()

    torch.cuda.manual_seed(1)
    replay = recorded(tmp_path / "r", lambda: nn.Linear(8, 8), loss, torch.float32)
    assert replay.left_out == {ON_A_DEVICE: {"torch.nn.functional.dropout": 1}}
    torch.cuda.manual_seed(1)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    with astray.record(tmp_path / "s", nn.Identity(), level="function", keep="stats,tensors"):
        found = torch.rand(3, device="cuda")
    assert torch.equal(found, expected)


def test_a_wrong_tile_comes_first(tmp_path: Path) -> None:
    fault = faults.Fault("addmm.default", 2, faults.wrong_tile, "h.0.expand/linear")
    with faults.Planted(fault) as planted:
        replay = recorded(tmp_path / "r", programs.GPT, programs.language_loss, torch.bfloat16)
    assert planted.done
    assert replay.calls[0].site == fault.site
    assert replay.calls[0].stands_out
