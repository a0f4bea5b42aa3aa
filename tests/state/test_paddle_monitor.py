"""A training of Paddle that is followed: the numbers are those of the tensors, two trainings compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.errors import UsageError

pytestmark = pytest.mark.paddle
paddle = pytest.importorskip("paddle")


def network() -> Any:
    paddle.seed(0)
    return paddle.nn.Sequential(paddle.nn.Linear(6, 10), paddle.nn.Tanh(), paddle.nn.Linear(10, 2))


def train(model: Any, optimizer: Any, steps: int, seen: Any = None) -> None:
    paddle.seed(1)
    for step in range(steps):
        model(paddle.randn([8, 6])).square().mean().backward()
        if seen is not None:
            seen(step, "before")
        optimizer.step()
        if seen is not None:
            seen(step, "after")
        optimizer.clear_grad()


def norm(tensor: Any) -> float:
    return float(np.linalg.norm(tensor.astype("float64").numpy()))


def test_the_series_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = network()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    norms: dict[tuple[str, int], float] = {}
    held: dict[str, Any] = {}

    def seen(step: int, when: str) -> None:
        weight = model[2].weight.astype("float64")
        if when == "before":
            held["weight"] = weight.clone()
            norms["gradient", step] = norm(model[2].weight.grad)
        else:
            norms["weight", step] = norm(weight)
            norms["update", step] = norm(weight - held["weight"])
            norms["ratio", step] = norms["update", step] / norm(held["weight"])
            norms["moment1", step] = norm(optimizer._accumulators["moment1"][model[2].weight.name])

    with astray.state.Monitor(model, optimizer, every=3, path=tmp_path / "run") as monitor:
        train(model, optimizer, 8, seen)
    for what in ("gradient", "weight", "update", "moment1", "ratio"):
        found = monitor.series(what)
        assert found.steps == [0, 3, 6]
        assert set(found.values) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert found.values["2.weight"] == pytest.approx([norms[what, step] for step in (0, 3, 6)], rel=1e-5)
    assert monitor.run.complete


def test_two_trainings_compare(tmp_path: Path) -> None:
    for name, lr in (("a", 0.01), ("b", 0.01), ("c", 0.0101)):
        model = network()
        optimizer = paddle.optimizer.Momentum(lr, parameters=model.parameters())
        with astray.state.Monitor(model, optimizer, every=2, path=tmp_path / name):
            train(model, optimizer, 3)
    assert astray.compare(tmp_path / "a", tmp_path / "b").first is None
    first = astray.compare(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert (first.step, first.phase) == (0, "update")


def test_a_monitor_and_a_check_of_updates_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = network()
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    check = astray.state.check_updates(optimizer, model)
    with astray.state.Monitor(model, optimizer, every=1, path=tmp_path / "run") as monitor:
        train(model, optimizer, 2)
    train(model, optimizer, 1)
    check.close()
    train(model, optimizer, 1)
    assert [row.verdict for row in check.updates] == ["right"] * 12
    assert monitor.series().steps == [0, 1]


def test_no_torch_is_needed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
import warnings
warnings.filterwarnings("ignore")
import paddle, astray
model = paddle.nn.Linear(3, 2)
optimizer = paddle.optimizer.SGD(0.1, model.parameters())
with astray.state.Monitor(model, optimizer, every=1, path={str(tmp_path / "run")!r}) as monitor:
    model(paddle.ones([1, 3])).sum().backward()
    optimizer.step()
assert monitor.series().values["bias"][0] > 0.1
try:
    astray.state.from_weight
except astray.errors.StateError as error:
    assert "computes with torch, which is not installed" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = network()
    other = paddle.optimizer.SGD(0.1, parameters=paddle.nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match="This SGD trains none of the parameters of the model"):
        astray.state.Monitor(model, other, path=tmp_path / "run")
    with pytest.raises(UsageError, match="A Linear was given, which does not train this model"):
        astray.state.Monitor(model, paddle.nn.Linear(2, 2), path=tmp_path / "run")
    assert not (tmp_path / "run").exists()
