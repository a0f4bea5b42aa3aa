"""The labels of losses, where only modules are recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import astray
from recorded_rows import rows


def train(path: Path, loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor, level: str = "module") -> astray.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).bfloat16()
    with astray.record(path, model, level=level) as recorder:
        for _ in range(2):
            loss(model(torch.randn(6, 8).bfloat16()).float(), labels).backward()
            recorder.step()
    return astray.open(path)


LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


@pytest.mark.parametrize(
    "loss", [lambda x, y: F.cross_entropy(x, y), nn.CrossEntropyLoss(), lambda x, y: F.nll_loss(x.log_softmax(1), y)]
)
def test_labels_in_another_order_are_named(tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In bfloat16 no statistic of a gradient shows them."""
    reference = train(tmp_path / "a", lambda x, y: loss(x * (1 + 2**-8), y), LABELS)
    candidate = train(tmp_path / "b", loss, LABELS.roll(1))
    first = astray.compare(reference, candidate).first
    assert first is not None
    assert (first.step, first.phase, first.path, first.cause) == (0, "forward", "target", "input")
    assert "look at the data, its order, the seed and the preprocessing." in first.evidence[0]
    assert "test_loss_labels.py" in first.stack[0].file


def test_labels_are_recorded_once_and_probabilities_are_not(tmp_path: Path) -> None:
    run = train(tmp_path / "a", nn.CrossEntropyLoss(), LABELS)
    assert [row["path"] for row in rows(run) if row["site"] == "/cross_entropy"] == ["target"] * 2
    run = train(tmp_path / "b", nn.CrossEntropyLoss(), torch.full((6, 4), 0.25))
    assert not [row for row in rows(run) if row["site"] == "/cross_entropy"]
    functions = train(tmp_path / "c", nn.CrossEntropyLoss(), LABELS, level="function")
    assert {row["path"] for row in rows(functions) if row["site"] == "/cross_entropy"} >= {"0", "1"}


def test_a_loss_inside_of_a_module_is_its_own(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x), labels)

    model = Model()
    with astray.record(tmp_path / "a", model):
        model(torch.randn(6, 8), LABELS).backward()
    assert {row["site"] for row in rows(astray.open(tmp_path / "a"))} == {
        "<root>",
        "linear",
        "linear.weight",
        "linear.bias",
    }


def smoothed(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels, label_smoothing=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::DeprecationWarning:torch.jit")
def test_losses_can_be_scripted_and_compiled(tmp_path: Path) -> None:
    """A scripted program must be the same while it is recorded."""
    x, model = torch.randn(6, 4), nn.Linear(2, 2)
    with astray.record(tmp_path / "a", model):
        model(torch.ones(1, 2))
        scripted = torch.jit.script(smoothed)
        compiled = torch.compile(smoothed, fullgraph=True, backend="eager")
        assert scripted(x, LABELS).item() == compiled(x, LABELS).item() == smoothed(x, LABELS).item()
    assert scripted(x, LABELS).item() == smoothed(x, LABELS).item()


def test_losses_are_torchs_own_before_and_after(tmp_path: Path) -> None:
    before = vars(F).copy()
    with astray.record(tmp_path / "a", nn.Linear(2, 2)), pytest.raises(TypeError, match="missing"):
        F.cross_entropy(torch.ones(2, 2))
    assert vars(F) == before
