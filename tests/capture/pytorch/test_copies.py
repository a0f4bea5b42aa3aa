"""Models and optimizers that are copied or saved while they are recorded: the copies have nothing of ours."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray

WITHOUT_ASTRAY = """
import io, pickle, sys
sys.modules["astray"] = None
import torch
for file in sys.argv[1:]:
    content = open(file, "rb").read()
    assert b"astray" not in content, file
    found = torch.load(io.BytesIO(content), weights_only=False) if file.endswith(".torch") else pickle.loads(content)
    for module in found["model"].modules():
        for name in vars(module):
            assert not name.endswith(("_hooks", "_with_kwargs", "_always_called")) or not getattr(module, name), name
    found["model"](torch.ones(2, 3)).sum().backward()
    found["optimizer"].step()
"""

WAYS: dict[str, Callable[[Path, nn.Module, Any], Any]] = {
    "record": lambda path, model, _: astray.record(path, model, optimizer="weight"),
    "record of ops": lambda path, model, _: astray.record(path, model, level=("module", "function", "op")),
    "guard": lambda path, model, _: astray.guard(model, on="warn", path=path),
    "monitor": lambda path, model, optimizer: astray.state.Monitor(model, optimizer, every=1, path=path),
}


def users_hook(*_: Any) -> None:
    """A hook of the program's."""


class WithSlots(nn.Linear):
    __slots__ = ("more",)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), WithSlots(3, 3))
    return model, torch.optim.AdamW(model.parameters())


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_what_is_saved_loads_where_astray_is_not(tmp_path: Path) -> None:
    files: list[Path] = []
    for way, start in WAYS.items():
        model, optimizer = built()
        model[2] = nn.Linear(3, 3)  # of a class that another interpreter has
        with start(tmp_path / way, model, optimizer):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            model(torch.ones(2, 3)).sum().backward()
            both = {"model": model, "optimizer": optimizer}
            files += [tmp_path / f"{way}.torch", tmp_path / f"{way}.pickle"]
            torch.save(both, files[-2])
            files[-1].write_bytes(pickle.dumps(both))
    command = [sys.executable, "-c", WITHOUT_ASTRAY, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_copies_have_the_hooks_of_the_program_alone(tmp_path: Path, way: str) -> None:
    model, optimizer = built()
    model[0].register_forward_hook(users_hook)
    model[2].register_forward_pre_hook(users_hook)
    with WAYS[way](tmp_path / "run", model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        before = number_of_hooks(model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies.append(torch.load(saved, weights_only=False))
        for one in copies:
            assert number_of_hooks(one) == 2
            assert list(one[0]._forward_hooks.values()) == [users_hook]
            assert list(one[2]._forward_pre_hooks.values()) == [users_hook]
            assert not one[0]._forward_hooks_with_kwargs
            assert not one[0]._forward_hooks_always_called
            assert not any(parameter._backward_hooks for parameter in one.parameters())
        shallow = copy.copy(model)
        assert shallow._forward_hooks is model._forward_hooks
        assert number_of_hooks(model) == before
    assert "__reduce_ex__" not in vars(nn.Module)
    assert number_of_hooks(model) == 2


def test_a_class_with_its_own_state_is_asked_for_it(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "told": True}

    model = Stateful(3, 3)
    with astray.record(tmp_path / "run", model), astray.record(tmp_path / "other", model):
        twin = copy.deepcopy(model)
    assert twin.told is True
    assert number_of_hooks(twin) == 0
    assert "__reduce_ex__" not in vars(nn.Module)
