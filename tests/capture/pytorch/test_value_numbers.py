"""Which value a row is: the same number for the same memory in the same version, natively and by the oracle."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import astray
import tensor_oracle
from recorded_rows import rows

WAYS = ["native", "oracle"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "oracle":
        tensor_oracle.use(monkeypatch)
    return str(request.param)


class Model(nn.Module):
    """Runs a function of itself and its input."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._run(self, x)


def record(path: Path, model: nn.Module, steps: int = 1, level: str = "function", **settings: Any) -> Any:
    torch.manual_seed(0)
    data = torch.randn(4, 4)
    with astray.record(path, model, level=level, **settings) as rec:
        for _ in range(steps):
            out = model(data)
            if isinstance(out, torch.Tensor) and out.requires_grad:
                out.sum().backward()
            rec.step()
    return astray.open(path)


def values(run: Any, **wanted: Any) -> list[int | None]:
    return [row["value"] for row in rows(run, **wanted)]


def value(run: Any, site: str, role: str, path: str, **wanted: Any) -> int | None:
    (found,) = values(run, site=site, role=role, path=path, **{"phase": "forward"} | wanted)
    return found


def test_an_output_and_the_input_that_it_becomes_are_one_value(tmp_path: Path) -> None:
    run = record(tmp_path / "run", nn.Sequential(nn.Linear(4, 4), nn.ReLU()), level="module,function")
    assert value(run, "0", "output", "out") == value(run, "1", "input", "0") == value(run, "1/relu", "input", "0")
    assert value(run, "0", "parameter", "weight") == value(run, "0/linear", "input", "1")
    assert value(run, "0", "output", "out") != value(run, "1", "output", "out")
    back = {"phase": "backward"}
    assert value(run, "1", "output", "0", **back) == value(run, "0", "input", "out", **back)
    assert value(run, "0/linear", "output", "1", **back) == value(run, "0.weight", "gradient", "grad", **back)


def test_numbers_are_handed_out_in_order_of_first_sight(tmp_path: Path) -> None:
    found = values(record(tmp_path / "run", nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, "module,function"))
    assert None not in found
    firsts = list(dict.fromkeys(found))
    assert firsts == list(range(len(firsts)))


def test_a_view_has_the_number_of_what_it_is_a_view_of(tmp_path: Path) -> None:
    model = Model(lambda _, x: torch.relu(x.t()) + x.view(-1)[:4] + x[1:2].detach())
    run = record(tmp_path / "run", model)
    given = value(run, "<root>/relu", "input", "0")
    adds = values(run, type="torch.Tensor.add", role="input", path="1") or values(run, type="add", path="1")
    assert set(adds) == {given}


def test_a_write_makes_another_value(tmp_path: Path) -> None:
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        y.add_(1)
        z = torch.sigmoid(y)
        y.data.mul_(2)  # past the version counter of y
        return torch.tanh(y) + z

    run = record(tmp_path / "run", Model(forward))
    made, added = value(run, "<root>/relu", "output", "out"), value(run, "<root>/add_", "output", "out")
    assert value(run, "<root>/add_", "input", "0") == made
    assert value(run, "<root>/sigmoid", "input", "0") == added != made
    assert value(run, "<root>/tanh", "input", "0") == value(run, "<root>/mul_", "output", "out") not in (made, added)


def test_a_write_that_was_not_recorded_makes_another_value(tmp_path: Path) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.one(x).detach()
        y += 1
        return model.other(y)

    run = record(tmp_path / "run", Model(forward, one=nn.Linear(4, 4), other=nn.ReLU()), level="module")
    assert value(run, "one", "output", "out") != value(run, "other", "input", "0")


def test_ops_are_seen_before_their_versions_are(tmp_path: Path) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        y.add_(1).mul_(2)
        return torch.tanh(y) @ model.fc.weight.t()

    run = record(tmp_path / "run", Model(forward, fc=nn.Linear(4, 4)), level="op")
    ops = {name: f"<root>/aten.{name}" for name in ("relu", "add_", "mul_", "tanh", "t", "mm")}
    made, added = value(run, ops["relu"], "output", "out"), value(run, ops["add_"], "output", "out")
    assert value(run, ops["add_"], "input", "0") == made != added
    assert value(run, ops["mul_"], "input", "0") == added
    assert value(run, ops["tanh"], "input", "0") == value(run, ops["mul_"], "output", "out") not in (made, added)
    assert (
        value(run, ops["t"], "input", "0")
        == value(run, ops["t"], "output", "out")
        == value(run, ops["mm"], "input", "1")
    )


def test_memory_that_is_used_again_is_another_value(tmp_path: Path) -> None:
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for _again in range(30):
            y = torch.sigmoid(x)
            total = total + y.sum()
            del y
            gc.collect(0)
        return total

    run = record(tmp_path / "run", Model(forward))
    made = values(run, site="<root>/sigmoid", role="output")
    assert len(set(made)) == 30


def test_tied_weights_are_one_value(tmp_path: Path) -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    run = record(tmp_path / "run", nn.Sequential(one, other), level="module")
    assert value(run, "0", "parameter", "weight") == value(run, "1", "parameter", "weight")
    assert value(run, "0", "parameter", "bias") != value(run, "1", "parameter", "bias")


def test_what_keeps_no_version_has_no_number(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.inference_mode():
        run = record(tmp_path / "run", model, level="module")
    assert values(run, role="output") == [None] * 3
    assert None not in values(run, role="parameter")


def test_a_step_begins_with_new_values(tmp_path: Path) -> None:
    run = record(tmp_path / "run", nn.Linear(4, 4), steps=2, level="module")
    first, second = (set(values(run, step=step)) for step in (0, 1))
    assert not first & second


def test_limits_and_slices_leave_it_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    whole = values(record(tmp_path / "whole", model, level="module"))
    assert values(record(tmp_path / "slice", model, level="module", slice="0")) == whole
    assert values(record(tmp_path / "kept", model, level="module", keep="tensors")) == whole
    assert values(record(tmp_path / "few", model, level="module", max_tensors=3)) == whole[:3]


def test_measurements_that_expire_leave_the_values_as_they_are(tmp_path: Path) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.one(x)
        expire()
        return model.other(y)

    model = Model(forward, one=nn.Linear(4, 4), other=nn.ReLU())
    with astray.record(tmp_path / "run", model, level="module") as rec:
        expire = rec._engine.tensors._clear
        model(torch.randn(4, 4))
    run = astray.open(tmp_path / "run")
    assert value(run, "one", "output", "out") == value(run, "other", "input", "0")


class Programs:
    """Cases that the native observer and the oracle must number alike."""

    def checkpointed(self, path: Path) -> Any:
        block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        return record(path, Model(lambda m, x: checkpoint(m.block, m.block(x), use_reentrant=False), block=block),
                      level="module,function")  # fmt: skip

    def accumulated(self, path: Path) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(3)
        with astray.record(path, model, level="module,function", optimizer=["weight", "gradient"]) as rec:
            for _ in range(2):
                for _ in range(2):
                    model(torch.randn(3, 4)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                rec.step()
        return astray.open(path)

    def recurrent(self, path: Path) -> Any:
        return record(path, Model(lambda m, x: m.rnn(x[None])[0], rnn=nn.LSTM(4, 4)), level="op")


@pytest.mark.parametrize("program", ["checkpointed", "accumulated", "recurrent"])
def test_both_ways_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, program: str
) -> None:
    if way == "oracle":
        pytest.skip("both are asked in one go")
    found = []
    for each in WAYS:
        if each == "oracle":
            tensor_oracle.use(monkeypatch)
        torch.manual_seed(0)
        found.append(rows(getattr(Programs(), program)(tmp_path / each)))
    assert len(found[0]) > 30
    assert found[0] == found[1]
