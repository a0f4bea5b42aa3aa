"""A program written for NNstat runs with the import changed and nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from astray.compat import nnstat


def test_names_and_defaults_are_the_same() -> None:
    assert set(nnstat.__all__) >= {
        "StateDict", "from_state_dict", "from_weight", "from_grad", "from_optimizer_state", "from_together",
        "from_activation", "from_activation_grad", "load", "trust_ratio", "core", "functional",
    }  # fmt: skip
    assert nnstat.core.from_weight is nnstat.from_weight
    assert nnstat.core.StateDict is nnstat.StateDict
    assert nnstat.functional.trust_ratio is nnstat.trust_ratio
    positional = {
        "from_state_dict": ["raw_state_dict", "pattern"],
        "from_weight": ["model", "pattern"],
        "from_grad": ["model", "pattern"],
        "from_optimizer_state": ["model", "optimizer", "optimizer_key", "pattern"],
        "from_together": ["model", "optimizer", "optimizer_keys", "pattern"],
        "from_activation": ["model", "pattern"],
        "from_activation_grad": ["model", "pattern"],
        "trust_ratio": ["update", "weight", "pattern"],
        "load": ["path", "name"],
    }
    for name, expected in positional.items():
        parameters = inspect.signature(getattr(nnstat, name)).parameters.values()
        found = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert found == expected
        assert all(each.default in (None, False) for each in parameters if each.kind is each.KEYWORD_ONLY)
    described = inspect.signature(nnstat.StateDict.describe).parameters
    assert list(described)[1:6] == ["lw", "pattern", "include_keys", "exclude_keys", "display"]


def test_a_program_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = nnstat.from_weight(model)
    activations = nnstat.from_activation(model)
    gradients = nnstat.from_activation_grad(model)
    before = state.clone()
    model(torch.ones(2, 4)).sum().backward()
    grad = nnstat.from_grad(model, clone=True)
    optimizer.step()
    buffer = nnstat.from_optimizer_state(model, optimizer, optimizer_key="momentum_buffer")
    assert torch.allclose(state - before, -0.1 * grad, atol=1e-7)
    assert buffer == grad
    assert list(activations) == list(gradients) == ["0", "1", "2", ""]

    state.clone().save(tmp_path / "state.pth")
    loaded = nnstat.load(tmp_path / "state.pth")
    assert state.is_compatible(loaded)
    assert not loaded.lazy
    assert (state.at(0) == loaded.at(0)).all()
    assert state - state == nnstat.zeros_like(state)
    assert state**0 == nnstat.ones_like(state)
    assert torch.tensor(1.0) + state == state + 1
    assert state.flatten().numel() == state.numel()
    assert state.norm1() == pytest.approx(state.flatten().norm(1).item())
    assert state.apply_reduction(lambda tensor: tensor.abs().max()) == state.abs_max()
    state.describe(lw=True, pattern=r"\d.bias", exclude_keys=["norm1"])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_it_is_imported_only_when_asked_for() -> None:
    code = "import sys, astray; print({'astray.state', 'astray.compat', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
