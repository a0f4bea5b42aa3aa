"""`astray map`, and the options of `astray compare` for models that differ, as a person meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import astray
from astray.cli import main


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.h:
            x = x + layer(x)
        return x


class Theirs(nn.Module):
    """The same network, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    for name, kind in (("ours", Ours), ("theirs", Theirs)):
        torch.manual_seed(0)
        model = kind()
        with astray.record(tmp_path / name, model, level=["module", "function"]) as rec:
            for _ in range(2):
                model(torch.arange(5)).square().sum().backward()
                rec.step()
    return str(tmp_path / "ours"), str(tmp_path / "theirs")


def test_a_draft_makes_two_models_comparable(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *runs]) == 1
    assert "draft what belongs together" in " ".join(capsys.readouterr().out.split())
    assert main(["map", *runs]) == 0
    drafted = capsys.readouterr().out
    assert "'tokens': 'embed'" in drafted
    assert r"'layers\.(\d+)': 'h.\1'" in drafted
    file = str(tmp_path / "map.yaml")
    assert main(["map", *runs, "-o", file]) == 0
    assert capsys.readouterr().err == f"written   {file}\n"
    assert Path(file).read_text() == drafted
    assert main(["compare", *runs, "--map", file]) == 0


def test_by_order_and_only_some(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--by", "order"]) == 0
    assert main(["compare", *runs, "--by", "order", "--sites", "/square", "--ranks", "0", "--steps", "1"]) == 0
    assert "1 step" in capsys.readouterr().out
    assert main(["compare", *runs, "--ranks", "zero"]) == 2
    assert "--ranks is 'zero'" in capsys.readouterr().err
    assert main(["compare", *runs, "--map", "nowhere.yaml"]) == 2
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err
