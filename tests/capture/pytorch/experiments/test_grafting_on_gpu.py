"""`graft` on a CUDA device: values go there, the program keeps its bits, and a backward runs on threads of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture.graft_words import graft_notes
from astray.capture.pytorch.experiments import applied_graft

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act = nn.SiLU() if wrong else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def train(path: Path, *, wrong: bool = False, device: str = "cuda", **settings: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(False), Block(wrong), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with astray.record(path, model, **{"keep": "tensors", "level": "module,function", **settings}) as recorder:
        for _ in range(2):
            data = torch.randn(4, 16, 32).to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(data).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            recorder.step()
            losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())], astray.open(path)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_its_own_values_change_no_bit(tmp_path: Path, is_replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = train(tmp_path / "a")
    if is_replaced:
        monkeypatch.setattr(applied_graft, "have_same_bits", lambda first, second: first is second)
    again, run = train(tmp_path / "b", graft=[str(tmp_path / "a"), f"{tmp_path / 'a'}:.*@outputs"])
    assert all(torch.equal(one, other) for one, other in zip(right, again, strict=True))
    assert run.ranks[0].end.missed == []
    assert [note.unreached for note in graft_notes(run.ranks[0].setup)] == [0, 0]


def test_a_fault_goes(tmp_path: Path) -> None:
    right, _ = train(tmp_path / "a")
    wrong, _ = train(tmp_path / "b", wrong=True)
    mended, run = train(tmp_path / "c", wrong=True, graft=f"{tmp_path / 'a'}:1.act@outputs,gradients")
    assert not torch.equal(right[0], wrong[0])
    assert all(torch.equal(one, other) for one, other in zip(right, mended, strict=True))
    assert graft_notes(run.ranks[0].setup)[0][2:] == (4, 4, 0)


def test_the_values_of_a_cpu_go_to_the_device(tmp_path: Path) -> None:
    train(tmp_path / "a", device="cpu")
    _, run = train(tmp_path / "b", graft=str(tmp_path / "a"))
    [note] = graft_notes(run.ranks[0].setup)
    assert note.tensors > 60
    assert 0 < note.differed < note.tensors
    assert astray.compare(tmp_path / "a", tmp_path / "b").first is None  # each call by itself, on either device
