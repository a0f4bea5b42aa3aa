"""Rows are judged a few steps at a time, and no verdict depends on how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import astray
from astray.comparison.comparison import compare
from astray.comparison.judge import thresholds
from block_models import Blocks

STEPS = 7


class Sometimes(Blocks):
    """Two blocks take turns, so that their weights were seen last two steps ago."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.h):
            if number > 1 or self.step % 2 == number:
                x = block(x)
        return self.head(x)


def trained(path: Path, level: str, fault: str | None) -> Any:
    torch.manual_seed(0)
    model = Sometimes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm = nn.BatchNorm1d(5)
    with astray.record(path, nn.ModuleList([model, norm]), level=level.split("+")) as recorder:
        for step in range(STEPS):
            model.step = step
            loss = norm(model(torch.randn(8, 16))).square().mean()
            loss.backward()
            if fault == "gradient" and step == 3:
                model.h[3].up.weight.grad.mul_(-1)
            if fault == "weight" and step == 5:
                with torch.no_grad():
                    model.h[0].down.weight.mul_(1.05)
            if fault == "noise":
                with torch.no_grad():
                    model.head.weight.mul_(1 + 1e-6)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return astray.open(path)


@pytest.mark.parametrize(
    ("level", "fault"), [("module", "gradient"), ("module+function", "weight"), ("module", "noise")]
)
def test_no_verdict_depends_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, fault: str) -> None:
    runs = trained(tmp_path / "a", level, None), trained(tmp_path / "b", level, fault)
    found = []
    for rows, steps in ((1 << 30, 1), (1, 1), (1, 2), (1, 3)):
        monkeypatch.setattr(thresholds, "ROWS_PER_WINDOW", rows)
        monkeypatch.setattr(thresholds, "STEPS_PER_WINDOW", steps)
        found.append(compare(*runs).to_pandas())
    whole, *others = found
    assert len(set(whole["verdict"])) > 1
    for cut in others:
        for name in whole.columns:
            equal = whole[name].eq(cut[name]) | (whole[name].isna() & cut[name].isna())
            assert equal.all(), whole[~equal][["step", "site", "role", "path", name]].assign(cut=cut[name]).to_string()


def test_steps_that_are_the_same_are_left_alone(tmp_path: Path) -> None:
    runs = trained(tmp_path / "a", "module", None), trained(tmp_path / "b", "module", "gradient")
    found = compare(*runs).to_pandas()
    early = found[found["step"] <= 3]
    assert set(early["verdict"]) == {"identical"}
    assert np.isnan(early["surprise"]).all()


def test_steps_far_from_zero(runs: Any) -> None:
    """What is kept for each step does not grow with its number."""
    sides = []
    for off in (1.0, 1 + 2.0**-22):
        builder = runs.Builder()
        seq = builder.call("net", step=10**9)
        builder.tensor(seq, "input", "0", np.ones(64, np.float32) * np.float32(off))
        seq = builder.call("net.weight", "Parameter", kind="parameter", phase="backward", step=10**9)
        builder.tensor(seq, "gradient", "grad", np.ones(64, np.float32) * np.float32(off))
        sides.append(builder.run)
    assert "unknown" not in compare(*sides).pairs["verdict"]
