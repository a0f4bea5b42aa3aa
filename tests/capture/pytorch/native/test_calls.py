"""What the native hooks record of one program that does a little of everything: known rows, at every level and setting.

The rows are in tests/golden/calls/: a step of modules and functions as text, of every setting a digest of such text.
They were the same for the taps in Python that there were beside these once. `ASTRAY_UPDATE_GOLDEN=1` writes them anew.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import BuiltinMethodType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.capture.pytorch.native.build import load
from astray.capture.pytorch.native.core import Site
from astray.store import open_run
from astray.store.run_format.rows import call_rows

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


GOLDEN = Path(__file__).parents[3] / "golden" / "calls"
SHOWN = "3-0"  # modules and functions, no setting
OF_CALLS = ("seq", "step", "micro", "kind", "site", "type", "call", "phase", "parent", "args", "recompute")
OF_TENSORS = ("role", "path", "dtype", "shape", "stride", "requires_grad", "value", "note")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the recordings of the program."""
    folder = tmp_path_factory.mktemp("taps")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, "-W", "ignore", str(program), str(folder), repr(RUNS)], check=True, timeout=300)
    return folder


def text_of(path: Path) -> str:
    """Calls, their stacks and tensors, in order, and what was missed: all that does not depend on the processor."""
    rank = open_run(path).ranks[0]
    tensors: dict[int, list[str]] = {}
    for i in range(len(rank.tensors)):
        row = rank.tensors.row(i)
        tensors.setdefault(row["seq"], []).append(" ".join(str(row[name]) for name in OF_TENSORS))
    lines = []
    for i in range(len(rank.calls)):
        call = rank.calls.row(i)
        stack = (
            []
            if call["stack"] is None
            else [(one.line, one.function.rpartition(".")[2]) for one in rank.stack(call["stack"])]
        )
        lines.append(" ".join(str(call[name]) for name in OF_CALLS) + f" {stack}")
        lines += [f"    {tensor}" for tensor in tensors.pop(call["seq"], [])]
    assert not tensors
    return "\n".join([*lines, json.dumps(missed(path)), ""])


def first_step(text: str) -> str:
    """The part of a text that is about step 0."""
    return text.partition(next(line for line in text.splitlines() if re.match(r"\d+ 1 ", line)))[0]


@pytest.mark.parametrize("name", [name for name, _, _ in RUNS])
def test_the_recording_is_as_known(folder: Path, name: str) -> None:
    text = text_of(folder / name)
    digest = hashlib.sha256(text.encode()).hexdigest()
    known = GOLDEN / "digests.json"
    if os.environ.get("ASTRAY_UPDATE_GOLDEN"):
        digests = json.loads(known.read_text()) if known.exists() else {}
        known.write_text(json.dumps(dict(sorted({**digests, name: digest}.items())), indent=1) + "\n")
        if name == SHOWN:
            (GOLDEN / "step.txt").write_text(first_step(text))
    if name == SHOWN:
        assert first_step(text).splitlines() == (GOLDEN / "step.txt").read_text().splitlines()
    assert digest == json.loads(known.read_text())[name], f"{folder / name} was recorded differently before"


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
    assert list(open_run(tmp_path / "run").ranks[0].calls["type"]).count("torch.neg") == 2


def missed(path: Path) -> Any:
    return json.loads((path / "rank0" / "end.json").read_text())["missed"]


def test_rows_of_calls_go_to_the_lane_which_is_said_to_be_crowded_once_it_holds_a_batch() -> None:
    rows, ready = call_rows(), []
    writer = SimpleNamespace(row_buffers=(rows, None, 2), batch_ready=lambda rows: ready.append(len(rows)))
    engine = load().Calls(writer, load().StackWalk(lambda _: True, lambda *_: 7))
    engine.recording, engine._phases = True, {"forward", "backward"}
    call = engine.enter(Site("here", "Hé\udce9re", "", "custom"), None)
    engine.begin(call, '{"args":[]}')
    assert (len(rows), ready) == (1, [])
    assert engine.backward(call) == 1
    assert (len(rows), ready) == (2, [2])
    engine.leave(call)
    texts = {3: "custom", 4: "here", 5: "Hé\\udce9re"}
    assert {column: rows.cells(column) for column in texts} == {column: [text] * 2 for column, text in texts.items()}
    assert (rows.cells(7), rows.cells(10)) == (["forward", "backward"], ['{"args":[]}', None])
    numbers = {column: np.frombuffer(rows.encode(column, 0, 2, 99)[1][1], np.int64).tolist() for column in (0, 8, 9)}
    assert numbers == {0: [0, 1], 8: [0, 0], 9: [7, 7]}
    assert rows.encode(8, 0, 2, 99)[0] == 1  # the first has no call around it
