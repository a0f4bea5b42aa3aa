"""`astray.experiment.swap` from a CUDA device to the CPU and back, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.experiment import swap
from recorded_rows import rows
from small_models import MODELS, build

pytestmark = pytest.mark.gpu


def sampled(logits: torch.Tensor) -> torch.Tensor:
    """A callable outside of every module."""
    return F.softmax(logits, -1)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_runs_wholly_on_the_cpu(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 6)
    with astray.experiment.without_dropout():
        reference = build(kind)
        expected = reference(x)
        expected.sum().backward()
        model = build(kind).cuda()
        before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        with swap(model, "<root>", to="cpu"):
            found = model(x.cuda())
            found.sum().backward()
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), expected)
    assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == before
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None
        assert own.grad.device.type == "cuda"
        assert torch.equal(own.grad.cpu(), other.grad)


@pytest.mark.parametrize("to", ["cpu", "cpu,float64", "cuda:0,float64"])
@pytest.mark.parametrize("what", ["1/aten.addmm", "1/linear", "1"])
def test_a_part_of_a_model_forward_and_backward(what: str, to: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5)).cuda()
    x = torch.randn(4, 300, device="cuda", requires_grad=True)
    plain = model(x).detach()
    with swap(model, what, to=to):
        found = model(x)
        found.square().sum().backward()
    assert (found.device.type, found.dtype) == ("cuda", torch.float32)
    torch.testing.assert_close(found.detach(), plain, rtol=1e-4, atol=1e-5)
    h = model[0](x).detach().double()
    weight, bias = model[1].weight.detach().double(), model[1].bias.detach().double()
    exact = torch.nn.functional.linear(h, weight, bias)
    assert (found.double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    torch.testing.assert_close(model[1].weight.grad.double(), (2 * exact).T @ h, rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    assert x.grad.device.type == "cuda"


@pytest.mark.parametrize("what", ["/softmax", sampled, "torch.nn.functional.softmax"])
def test_outside_of_modules(what: Any) -> None:
    x = torch.randn(4, 300, device="cuda")
    with swap(None, what, to="cpu"):
        found = sampled(x)
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), F.softmax(x.cpu(), -1))


def test_autocast_goes_along() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).cuda()
    x = torch.randn(4, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), swap(layer, "<root>", to="cpu"):
        found = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found.cpu(), layer.cpu()(x.cpu()))


def test_a_recording_around_it(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).cuda()
    with (
        astray.record(tmp_path / "run", model, level=["module", "function", "op"]),
        swap(model, "0/linear", to="cpu"),
    ):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
    recorded = rows(astray.open(tmp_path / "run"))
    assert {row["device"] for row in recorded if row["kind"] == "module"} == {"cuda:0"}
    assert not (tmp_path / "run" / "rank0" / "failure.txt").exists()
