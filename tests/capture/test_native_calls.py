"""The native taps and their twins in Python make the same recording."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import BuiltinMethodType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture import calls
from astray.store import open_run

PROGRAM = """
import sys
import torch, astray
from torch import nn
from torch.utils.checkpoint import checkpoint

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    def forward(self, x, *, scale=1.0, more=()):
        x = self.norm(self.a(x)).relu_() * scale
        return {"x": x + sum(more), "pair": (x[:, :2], 3)}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5, more=[x, x])["x"]
        x = checkpoint(self.layers[0], x, use_reentrant=False)["x"]
        try:
            self.head(x[:, :3])
        except RuntimeError:
            pass
        out = torch.empty(x.shape[0], 1)
        torch.add(torch.zeros(x.shape[0], 1), 1, out=out)
        return self.head(x) + out

def train(path, level, more):
    torch.manual_seed(0)
    model, head = Model(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.record(path, model, level=level, **more) as recording:
        for step in range(3):
            if step == 2:
                model.head = head
            for _ in range(2):
                model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()

for name, level, more in eval(sys.argv[2]):
    train(sys.argv[1] + "/" + name, level, more)
"""

LEVELS = (["module"], ["function"], ["op"], ["module", "function"], ["module", "function", "op"])
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"scope": ("layers.0", "layers.1")},
    {"phases": ["backward"]},
    {"phases": ["forward"]},
    {"match": ["layers.1"], "steps": "1:3"},
)
RUNS = [(f"{i}-{j}", level, more) for i, level in enumerate(LEVELS) for j, more in enumerate(SETTINGS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program has left its recordings, made with either kind of taps."""
    folder = tmp_path_factory.mktemp("taps")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    for taps in ("native", "python"):
        given = [sys.executable, "-W", "ignore", str(program), str(folder / taps), repr(RUNS)]
        subprocess.run(given, check=True, env={**os.environ, "ASTRAY_TAPS": taps}, timeout=300)
    return folder


def rows(path: Path) -> tuple[list[Any], ...]:
    rank = open_run(path).ranks[0]
    calls = [rank.calls.row(i) for i in range(len(rank.calls))]
    tensors = [rank.tensors.row(i) for i in range(len(rank.tensors))]
    stacks = [rank.stack(call["stack"]) for call in calls if call["stack"] is not None]
    return calls, tensors, stacks


@pytest.mark.skipif(calls.native is None, reason="the native taps are not in use")
@pytest.mark.parametrize("name", [name for name, _, _ in RUNS])
def test_both_make_the_same_recording(folder: Path, name: str) -> None:
    here, there = rows(folder / "native" / name), rows(folder / "python" / name)
    assert here[0]
    assert repr(here) == repr(there)  # as text, for a NaN is not equal to itself
    assert missed(folder / "native" / name) == missed(folder / "python" / name)


@pytest.mark.parametrize("phases", [("forward", "backward"), ("forward",)])
def test_gradients_nobody_asked_for_are_followed_through_the_outermost_call_alone(
    phases: tuple[str, ...], tmp_path: Path
) -> None:
    model, found = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), []
    recorder = astray.record(tmp_path / "run", model, phases=phases)

    def look(*_: object) -> None:
        engine = recorder._engine
        found.append(engine.follows_gradients(engine.enclosing))

    for module in model.modules():
        module.register_forward_pre_hook(look)
    with recorder:
        model(torch.ones(1, 2))
    inside = "backward" in phases
    assert found == [True, inside, inside]


@pytest.mark.skipif(calls.native is None, reason="the native taps are not in use")
def test_torch_calls_a_mode_natively_and_who_looks_into_its_class_finds_python(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model, level=["function", "op"]):
        told = torch._C._get_function_stack_at(0), torch._C._get_dispatch_stack_at(0)
        for mode, name in zip(told, ("__torch_function__", "__torch_dispatch__"), strict=True):
            method = getattr(mode, name)
            assert isinstance(method, BuiltinMethodType)
            assert method.__self__ is mode
            assert isinstance(inspect.getattr_static(mode, name), FunctionType)
        one = torch.ones(2)
        with torch._C.DisableTorchFunction():
            assert told[0].__torch_function__(torch.neg, (), args=(one,), kwargs={}).tolist() == [-1, -1]
            assert told[0].__torch_function__(torch.neg, (), (one,)).tolist() == [-1, -1]
    found = [row["type"] for row in rows(tmp_path / "run")[0]]
    assert found.count("torch.neg") == 2


def missed(path: Path) -> Any:
    return json.loads((path / "rank0" / "end.json").read_text())["missed"]
