"""A guard on a CUDA device: the step is told one step later, the very call at once, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray

pytestmark = pytest.mark.gpu


class Model(nn.Module):
    def __init__(self, wrong_at: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.calls, self.wrong_at = 0, wrong_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.calls += 1
        if self.calls - 1 == self.wrong_at:
            h = torch.log(h.abs() * 0)
        return self.b(h)


def train(path: Path, steps: int = 8, wrong_at: int = 3, **settings: Any) -> tuple[Model, int]:
    torch.manual_seed(0)
    model = Model(wrong_at).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with astray.guard(model, path=path, **settings):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(3, 64, device="cuda")).sum().backward()
                optimizer.step()
    except astray.Tripped as tripped:
        alarm = tripped.trip.alarm
        assert alarm is not None
        assert (alarm.step, alarm.offenders[0].statistics.inf) == (3, 192)
        return model, model.calls - 1
    return model, -1


@pytest.mark.parametrize(
    ("settings", "raised"),
    [({}, 4), ({"level": "function"}, 4), ({"level": ["module", "function"], "exact": True}, 3)],
    ids=str,
)
def test_the_origin_is_told(settings: dict[str, Any], raised: int, tmp_path: Path) -> None:
    _, step = train(tmp_path / "found", **settings)
    assert step == raised
    (run,) = (tmp_path / "found").iterdir()
    assert astray.open(run).alarms()[0].origin.phase == "forward"


def test_no_bit_changes(tmp_path: Path) -> None:
    bare, _ = train(tmp_path / "a", wrong_at=-1, match="nothing like this")
    guarded, _ = train(tmp_path / "b", wrong_at=-1)
    for one, other in zip(bare.parameters(), guarded.parameters(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert not (tmp_path / "b").exists()
