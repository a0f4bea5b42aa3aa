"""What happens in one micro step is not blamed on another: validation passes, gradient accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import astray
from astray.nonfinite import Alarm


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def gradients(path: Path, level: str, *first: torch.Tensor, trained: bool = False) -> list[Alarm]:
    """The alarms about the gradient of a pass whose weight gradient overflows, after other passes in the same step."""
    torch.manual_seed(0)
    model = Net()
    with astray.record(path, model, level=level.split(",")) as recorder:
        for x in first:
            with torch.set_grad_enabled(trained):
                out = model(x)
            if trained:
                (out[:1] * 1e-3).sum().backward()
                model.fc.weight.grad = None
        (model(torch.full((2, 4), 1e30)) * 1e30).sum().backward()
        recorder.step()
    found = astray.open(path).alarms()
    return [alarm for alarm in found if any(one.what == "gradient" for one in alarm.surfaced)]


BAD = torch.tensor([[1.0, 2.0, 3.0, 4.0], [float("nan"), 0.0, 1.0, 2.0]])


@pytest.mark.parametrize("level", ["module", "function", "module,function", "op"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_gradient_that_overflows_has_nothing_to_do_with_an_earlier_pass(
    tmp_path: Path, level: str, trained: bool
) -> None:
    (alone,) = gradients(tmp_path / "alone", level)
    found = gradients(tmp_path / "after", level, BAD, trained=trained)
    last = found[-1]
    assert last.micro == 1
    assert (last.origin.site, last.origin.phase, last.kind.word) == (
        alone.origin.site,
        alone.origin.phase,
        alone.kind.word,
    )
