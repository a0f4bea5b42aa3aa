"""A training that is followed: the numbers are those of the tensors, two trainings compare, nothing is changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.errors import UsageError


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, seen: Any = None) -> None:
    torch.manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if seen is not None:
            seen(step, "before")
        optimizer.step()
        if seen is not None:
            seen(step, "after")


def test_the_series_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms: dict[tuple[str, int], float] = {}
    held: dict[str, torch.Tensor] = {}

    def seen(step: int, when: str) -> None:
        weight = model[2].weight.detach().double()
        if when == "before":
            held["weight"] = weight.clone()
            norms["gradient", step] = model[2].weight.grad.double().norm().item()
        else:
            norms["weight", step] = weight.norm().item()
            norms["update", step] = (weight - held["weight"]).norm().item()
            norms["ratio", step] = norms["update", step] / held["weight"].norm().item()
            norms["exp_avg", step] = optimizer.state[model[2].weight]["exp_avg"].double().norm().item()

    with astray.state.Monitor(model, optimizer, every=3, path=tmp_path / "run") as monitor:
        train(model, optimizer, 8, seen)
    for what in ("gradient", "weight", "update", "exp_avg", "ratio"):
        found = monitor.series(what)
        assert found.steps == [0, 3, 6]
        assert list(found.values) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert found.values["2.weight"] == pytest.approx([norms[what, step] for step in (0, 3, 6)], rel=1e-5)
    assert monitor.series("weight", "max").values["0.bias"][-1] == pytest.approx(model[0].bias.max().item(), rel=0.1)
    text = str(monitor.series("ratio"))
    assert text.startswith("norm of the update over that of the weight, by step")
    assert all(name in text for name in ("0.weight", "2.bias", "6"))


def test_it_can_be_read_while_it_runs(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = astray.state.Monitor(model, every=2, path=tmp_path / "run")
    train(model, optimizer, 3)
    assert monitor.series().steps == [0, 2]
    train(model, optimizer, 2)
    assert monitor.series().steps == [0, 2, 4]
    monitor.close()
    train(model, optimizer, 2)
    assert monitor.run.steps == [0, 2, 4]
    assert monitor.run.complete
    assert repr(monitor).startswith("<Monitor: ")


def test_two_trainings_compare(tmp_path: Path) -> None:
    for name, lr in (("a", 0.01), ("b", 0.01), ("c", 0.0101)):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        with astray.state.Monitor(model, every=2, path=tmp_path / name):
            train(model, optimizer, 3)
    assert astray.compare(tmp_path / "a", tmp_path / "b").first is None
    first = astray.compare(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert (first.step, first.phase) == (0, "update")


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with astray.state.Monitor(
        model, every=2, path=tmp_path / "run", tensorboard=tmp_path / "board", statistics=["l2", "max"]
    ) as monitor:
        train(model, optimizer, 5)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert len(tags) == 4 * (5 * 2 + 1)  # weight, gradient, update, two states; and the ratio
    for tag, what in (
        ("update l2/0.weight", "update"),
        ("exp_avg_sq l2/0.weight", "exp_avg_sq"),
        ("ratio/0.weight", "ratio"),
    ):
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        series = monitor.series(what)
        assert written == [
            (step, pytest.approx(value, rel=1e-6))
            for step, value in zip(series.steps, series.values["0.weight"], strict=True)
        ]


def test_anything_that_takes_scalars_will_do(tmp_path: Path) -> None:
    class Taker:
        def __init__(self) -> None:
            self.taken: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.taken.append((tag, scalar_value, global_step))

    model, taker = network(), Taker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.state.Monitor(
        model, what=["update", "weight"], match="bias", path=tmp_path / "run", tensorboard=taker, statistics=["l2"]
    ):
        train(model, optimizer, 1)
    assert sorted(tag for tag, _, _ in taker.taken) == [
        f"{what}/{name}.bias" for what in ("ratio", "update l2", "weight l2") for name in (0, 2)
    ]
    assert all(math.isfinite(value) and step == 0 for _, value, step in taker.taken)


def test_monitoring_changes_no_bit(tmp_path: Path) -> None:
    def weights(monitored: bool) -> list[torch.Tensor]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        monitor = astray.state.Monitor(model, every=2, path=tmp_path / "run") if monitored else None
        train(model, optimizer, 5)
        if monitor is not None:
            monitor.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(weights(False), weights(True), strict=True))


def test_it_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    with astray.state.Monitor(model, path=tmp_path / "run"):
        train(model, torch.optim.AdamW(model.parameters()), 2)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = network()
    path = tmp_path / "run"
    with pytest.raises(UsageError, match="every=0: give the number of steps"):
        astray.state.Monitor(model, every=0, path=path)
    with pytest.raises(UsageError, match=r"what='wieght' is not known. Did you mean 'weight'\?"):
        astray.state.Monitor(model, what=["wieght"], path=path)
    with pytest.raises(UsageError, match="There is no statistic 'norm2'"):
        astray.state.Monitor(model, statistics=["norm2"], path=path)
    with pytest.raises(UsageError, match="This SGD trains none of the parameters of the model"):
        astray.state.Monitor(model, torch.optim.SGD(network().parameters(), lr=0.1), path=path)
    with pytest.raises(UsageError, match="A int takes no scalars"):
        astray.state.Monitor(model, tensorboard=3, path=path)  # type: ignore[arg-type]
    assert not path.exists()
    with astray.state.Monitor(model, path=path) as monitor:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(UsageError, match=r"Nothing was recorded of 'exp_avg'. There are"):
        monitor.series("exp_avg")
    with pytest.raises(astray.errors.RunExists):
        astray.state.Monitor(model, path=path)
