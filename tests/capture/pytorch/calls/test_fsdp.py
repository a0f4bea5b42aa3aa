"""Parameters that FSDP gathers into the same memory repeatedly. One process, which gathers only from itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import astray
from astray.capture.pytorch.calls import wrappers
from recorded_rows import hooks_of, rows


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    for module in (*model, model):
        fully_shard(module)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["module", "module,function", "op"])
def test_other_weights_at_the_same_address_are_measured_again(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fsdp_param, "free_storage", lambda tensor: None)  # so that the address stays
    model, optimizer = build()
    expected = []
    with astray.record(tmp_path / "run", model, level=level, keep="tensors"):
        for _ in range(3):
            expected.append(model[0].weight.full_tensor().detach().clone())
            update(model, optimizer)
    run = astray.open(tmp_path / "run")
    if "module" in level:
        found = rows(run, site="0", phase="forward", role="parameter", path="weight")
    else:
        found = rows(run, site="0/aten.t", phase="forward", role="input")
    assert len(found) == 3
    for row, weight in zip(found, expected, strict=True):
        assert run.values(0, row["row"]).tolist() == weight.tolist()


def test_shards_changed_by_hand_are_seen_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fsdp_param, "free_storage", lambda tensor: None)
    model, _ = build()
    with astray.record(tmp_path / "run", model, keep="tensors"), torch.no_grad():
        model(torch.ones(1, 6))
        model.reshard()
        model[0].weight.fill_(2.0)
        model(torch.ones(1, 6))
    run = astray.open(tmp_path / "run")
    first, second = (run.values(0, row["row"]) for row in rows(run, site="0", role="parameter", path="weight"))
    assert (first != 2).all()
    assert (second == 2).all()


def test_a_model_sharded_while_it_is_recorded_is_recorded_as_one_sharded_before(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    outlines = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        if not late:
            fully_shard(model, mp_policy=policy)
        with astray.record(tmp_path / str(late), model):
            if late:
                fully_shard(model, mp_policy=policy)
            model(torch.ones(2, 6)).sum().backward()
        run = astray.open(tmp_path / str(late))
        assert run.ranks[0].end.missed == []
        names = ("site", "type", "phase", "role", "path", "dtype", "placement", "fingerprint")
        outlines.append([tuple(row[name] for name in names) for row in rows(run)])
    assert outlines[0] == outlines[1]
    assert ("<root>", "Linear", "forward", "output", "out", "float64") in [row[:6] for row in outlines[0]]


def test_weights_that_stay_the_same_are_recorded_once_a_step(tmp_path: Path) -> None:
    model, optimizer = build()
    with astray.record(tmp_path / "run", model) as recorder:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            recorder.step()
    run = astray.open(tmp_path / "run")
    assert [(row["step"], row["micro"]) for row in rows(run, site="1", role="parameter", path="bias")] == [
        (0, 0),
        (1, 0),
    ]


def test_a_gradient_is_recorded_once_on_its_shard(tmp_path: Path) -> None:
    model, optimizer = build()
    with astray.record(tmp_path / "run", model):
        update(model, optimizer)
    found = rows(astray.open(tmp_path / "run"), role="gradient")
    assert [row["site"] for row in found] == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert all('"Shard(0)"' in row["placement"] for row in found)


def test_nothing_remains_on_shards_or_on_what_was_gathered(tmp_path: Path) -> None:
    model, optimizer = build()
    update(model, optimizer)
    before = hooks_of(model)
    with astray.record(tmp_path / "run", model):
        update(model, optimizer)
        model.unshard()
    assert hooks_of(model) == before  # those of the whole parameters, which are in place now
    model.reshard()
    assert hooks_of(model) == before


def test_a_torch_that_keeps_its_parameters_elsewhere_costs_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(module: nn.Module) -> Iterator[wrappers.GatheredParameter]:
        raise AttributeError("no attribute 'fsdp_params'")

    monkeypatch.setattr(wrappers, "_gathered", elsewhere)
    model, optimizer = build()
    with astray.record(tmp_path / "run", model):
        update(model, optimizer)
    run = astray.open(tmp_path / "run")
    assert len(rows(run, phase="forward", role="output")) == 3
    assert [(missed.what, missed.why) for missed in run.ranks[0].end.missed] == [
        ("which parameters FSDP has gathered", "this torch keeps them elsewhere (no attribute 'fsdp_params')")
    ]
