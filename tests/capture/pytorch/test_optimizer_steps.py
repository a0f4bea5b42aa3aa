"""Recording optimizers: the inputs and results of each parameter's update, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import astray
from pairwise import grid
from recorded_rows import outline, rows
from small_models import MODELS, Residual, build, same_bits

ALL = ("gradient", "weight", "state", "update")

sgd_module = importlib.import_module("torch.optim.sgd")  # torch.optim has it no more

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05), foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, centered=True, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, history_size=2),
}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = tuple(map(len, hooks))
    yield
    assert tuple(map(len, hooks)) == before


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, after_step: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Some steps; returns everything that recording must not change by a bit."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 6, generator=data)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            losses.append(optimizer.step(closure).detach().clone())
        else:
            losses.append(closure().detach().clone())
            optimizer.step()
        after_step()
    return {
        "losses": losses,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "state": [
            {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in optimizer.state_dict()["state"].values()
        ],
        "random": torch.get_rng_state(),
    }


def recorded(path: Path, model: Any, **settings: Any) -> astray.Recorder:
    return astray.record(path, model, **{"optimizer": ALL, "keep": "tensors", **settings})


def values(run: astray.Run, **wanted: Any) -> np.ndarray:
    (row,) = rows(run, phase="update", **wanted)
    return run.values(0, row["row"])


def test_one_step_in_the_order_it_happened(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with recorded(tmp_path / "run", model) as rec:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rec.step()
    run = astray.open(tmp_path / "run")
    assert outline(run, phase="update") == [
        "weight update input grad",
        "weight update parameter weight",
        "bias update input grad",
        "bias update parameter weight",
        *(
            f"{name} update output {path}"
            for name in ("weight", "bias")
            for path in ("state.step", "state.exp_avg", "state.exp_avg_sq", "update", "weight")
        ),
    ]
    calls = run.ranks[0].calls
    found = [call for i in range(len(calls)) if (call := calls.row(i))["phase"] == "update"]
    outer = found[0]["seq"]
    assert [(call["kind"], call["site"], call["type"], call["call"], call["parent"]) for call in found] == [
        ("optimizer", "AdamW", "AdamW", 0, None),
        ("optimizer", "weight", "AdamW", 0, outer),
        ("optimizer", "bias", "AdamW", 0, outer),
    ]
    assert json.loads(found[1]["args"])["lr"] == 0.1
    assert json.loads(found[0]["args"])["param_groups"][0]["weight_decay"] == 0.01
    for call in found:
        assert run.ranks[0].stack(call["stack"])[0].code == "optimizer.step()"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_the_optimizer_and_no_bit_changes(name: str, tmp_path: Path) -> None:
    bare_model = build(Residual)
    bare = train(bare_model, OPTIMIZERS[name](bare_model.parameters()))
    model = build(Residual)
    optimizer = OPTIMIZERS[name](model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    seen: list[dict[str, Any]] = []

    def look() -> None:
        optimized = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append({names[id(p)]: (p.detach().clone(), p.grad.clone()) for p in optimized})

    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with recorded(tmp_path / "run", model) as rec:

        def after_step() -> None:
            look()
            rec.step()

        watched = train(model, optimizer, after_step=after_step)
    assert same_bits(bare, watched)
    run = astray.open(tmp_path / "run")
    assert run.ranks[0].end.missed == []
    for step, parameters in enumerate(seen):
        for site, (weight, gradient) in parameters.items():
            before = start[site] if step == 0 else seen[step - 1][site][0]
            where = {"step": step, "site": site}
            np.testing.assert_array_equal(values(run, **where, role="parameter", path="weight"), before.numpy())
            np.testing.assert_array_equal(values(run, **where, role="input", path="grad"), gradient.numpy())
            np.testing.assert_array_equal(values(run, **where, role="output", path="weight"), weight.numpy())
            update = values(run, **where, role="output", path="update")
            np.testing.assert_array_equal(update, (weight - before).numpy())
    last = len(seen) - 1
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found = values(run, step=last, site=names[id(parameter)], path=f"state.{key}", role="output")
                np.testing.assert_array_equal(found, value.numpy())
    assert rows(run, phase="update", role="state") == []  # as the step before has left it


@grid(
    kind=MODELS,
    level=["module", "function", "op"],
    ids={"kind": [kind.__name__ for kind in MODELS]},
    pairs=False,
)
def test_every_model_at_every_level_keeps_its_bits(kind: type[nn.Module], level: str, tmp_path: Path) -> None:
    model = build(kind)
    bare = train(model, torch.optim.AdamW(model.parameters()))
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    with recorded(tmp_path / "run", model, level=level, keep="stats") as rec:
        watched = train(model, optimizer, after_step=rec.step)
    assert same_bits(bare, watched)
    run = astray.open(tmp_path / "run")
    sites = {row["site"] for row in rows(run, kind="optimizer")}
    assert sites == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("wanted", ALL)
def test_only_what_was_asked_for(wanted: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recorded(tmp_path / "run", model, optimizer=wanted):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [line.removeprefix("weight update ") for line in outline(astray.open(tmp_path / "run"), phase="update")] == {
        "gradient": ["input grad"],
        "weight": ["parameter weight", "output weight"],
        "state": ["output state.momentum_buffer"],
        "update": ["parameter weight", "output update"],  # the weight says how exact an update can be
    }[wanted]


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model):
        train(nn.Sequential(nn.Linear(6, 2), model), torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    assert rows(astray.open(tmp_path / "run"), phase="update") == []


def test_several_optimizers_are_named_by_class_in_the_order_of_their_first_steps(tmp_path: Path) -> None:
    a, b, c = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first, second = torch.optim.SGD(b.parameters(), lr=0.1), torch.optim.SGD(a.parameters(), lr=0.1)
    third = torch.optim.Adam(c.parameters())
    with recorded(tmp_path / "run", {"a": a, "b": b, "c": c}, steps="1:", optimizer="weight") as rec:
        for _ in range(2):
            (a(torch.ones(1, 2)) + b(torch.ones(1, 2)) + c(torch.ones(1, 2))).sum().backward()
            for optimizer in (second, third, first) if rec.recording else (second, first, third):
                optimizer.step()
            rec.step()
    run = astray.open(tmp_path / "run")
    calls = run.ranks[0].calls
    sites = [call["site"] for i in range(len(calls)) if (call := calls.row(i))["phase"] == "update"]
    assert sites == ["SGD", "a.weight", "Adam", "c.weight", "SGD#2", "b.weight"]
    assert {row["step"] for row in rows(run, phase="update")} == {1}


def test_a_second_step_in_one_step_is_a_second_call_and_micro_steps_do_not_matter(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path / "run", model, optimizer="weight"):
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    found = rows(astray.open(tmp_path / "run"), phase="update", role="output")
    assert [(row["micro"], row["call"]) for row in found] == [(0, 0), (0, 1)]


def test_tied_weights_have_one_name_and_unknown_parameters_their_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    other = nn.Parameter(torch.ones(2))
    groups = [{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(1)), other], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with recorded(tmp_path / "run", model, optimizer="update"):
        (model(torch.tensor([1])).sum() + other.sum()).backward()
        optimizer.step()
    run = astray.open(tmp_path / "run")
    sites = [row["site"] for row in rows(run, phase="update", role="output")]
    assert sites == ["0.weight", "SGD/param_groups.1.0", "SGD/param_groups.1.1"]
    np.testing.assert_array_equal(values(run, site="SGD/param_groups.1.1", role="output"), [-0.5, -0.5])


def test_parameters_without_gradients_and_frozen_ones(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with recorded(tmp_path / "run", model):
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    run = astray.open(tmp_path / "run")
    assert outline(run, phase="update", site="1.weight") == [
        "1.weight update parameter weight",
        "1.weight update output update",
        "1.weight update output weight",
    ]
    assert not values(run, site="1.weight", path="update").any()
    assert rows(run, phase="update", site="2.weight") == []
    assert model[1].weight not in optimizer.state  # looking has made no entry


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with recorded(tmp_path / "run", model):
        model(torch.tensor([3, 1, 3])).sum().backward()
        optimizer.step()
        assert not model.weight.grad.is_coalesced()  # as it was
    run = astray.open(tmp_path / "run")
    np.testing.assert_array_equal(values(run, path="grad.indices"), [[1, 3]])
    np.testing.assert_array_equal(values(run, path="grad.values"), [[1, 1], [2, 2]])
    changed = values(run, path="update").any(1)
    np.testing.assert_array_equal(changed, [False, True, False, True, False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_updates_are_exact_differences(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = model.weight.detach().clone()
    with recorded(tmp_path / "run", model):
        model(torch.ones(1, 3, dtype=dtype)).abs().sum().backward()
        optimizer.step()
    wide = {torch.bfloat16: torch.float32}.get(dtype, dtype)
    expected = model.weight.detach().to(wide) - before.to(wide)
    found = values(astray.open(tmp_path / "run"), path="update")
    np.testing.assert_array_equal(found, expected.numpy())
    assert found.dtype == expected.numpy().dtype


class ByHand(torch.optim.Optimizer):
    """As people write them: through `.data`, with plain numbers and nested tensors as state, and state shared by all
    parameters.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.state["common"] = {"calls": self.state.get("common", {}).get("calls", 0) + 1}
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            factors = state.setdefault("factors", {"rows": [torch.zeros(2), None], "scale": 1.5})
            factors["rows"][0].data.add_(parameter.grad.sum(1))
            parameter.data.add_(parameter.grad.data, alpha=-0.1)


def test_writes_through_data_and_nested_states_are_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = ByHand(model.parameters())
    start = model.weight.detach().clone()
    with recorded(tmp_path / "run", model) as rec:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            model.weight.data.mul_(2)
            optimizer.step()
            rec.step()
    run = astray.open(tmp_path / "run")
    np.testing.assert_array_equal(values(run, step=0, role="parameter"), 2 * start.numpy())
    np.testing.assert_array_equal(values(run, step=0, path="weight", role="output"), (2 * start - 0.1).numpy())
    np.testing.assert_array_equal(values(run, step=1, path="state.factors.rows.0", role="output"), [6, 6])
    assert values(run, step=1, path="state.step", role="output") == 2
    assert values(run, step=1, path="state.factors.scale", role="output") == 1.5
    assert values(run, step=1, site="ByHand", path="state.common.calls") == 2


def test_a_state_that_was_loaded_is_recorded_before_the_step_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def one() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    one()
    with recorded(tmp_path / "run", model, optimizer="state") as rec:
        one()
        rec.step()
        one()
        rec.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        one()
    found = rows(astray.open(tmp_path / "run"), phase="update", role="state")
    assert [(row["step"], row["path"]) for row in found] == [(0, "state.momentum_buffer"), (2, "state.momentum_buffer")]


def test_the_gradient_is_the_one_that_hooks_of_the_optimizers_own_have_left(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = optimizer.register_step_pre_hook(lambda o, a, k: [p.grad.mul_(0.5) for p in model.parameters()] and None)
    with recorded(tmp_path / "run", model) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            rec.step()
    run = astray.open(tmp_path / "run")
    for step in (0, 1):
        np.testing.assert_array_equal(values(run, step=step, path="grad"), np.full((2, 2), 0.5, np.float32))
    assert list(optimizer._optimizer_step_pre_hooks) == [clip.id]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_and_skipped_steps_are_not_there(fused: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recorded(tmp_path / "run", model) as rec:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), torch.inf if step == 1 else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            rec.step()
    run = astray.open(tmp_path / "run")
    for step in (0, 2):
        np.testing.assert_array_equal(values(run, step=step, path="grad"), np.ones((2, 2), np.float32))
    if fused:  # which is called all the same, and does nothing
        assert not values(run, step=1, path="update").any()
    else:
        assert rows(run, step=1, phase="update") == []


def test_schedulers_wrappers_and_subclasses_that_call_their_parent(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Wrapper:
        """As accelerate does it: an optimizer that wraps another."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.step = self.optimizer.step

    model = nn.Linear(2, 2, bias=False)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # from here on the parent's step has hooks as well
    inner = Mine(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    wrapper = Wrapper(inner)
    with recorded(tmp_path / "run", model, optimizer="update") as rec:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            wrapper.step()
            scheduler.step()
            rec.step()
    run = astray.open(tmp_path / "run")
    found = rows(run, phase="update", role="output")
    assert [(row["step"], row["site"], row["type"], row["call"]) for row in found] == [
        (0, "weight", "Mine", 0),
        (1, "weight", "Mine", 0),
    ]
    assert [json.loads(row["args"])["lr"] for row in found] == [0.1, 0.05]


def test_a_learning_rate_that_is_a_tensor_is_an_input(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    with recorded(tmp_path / "run", model):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert values(astray.open(tmp_path / "run"), site="AdamW", path="param_groups.0.lr", role="input") == 0.25


def test_the_forwards_of_a_closure_are_calls_of_their_own_inside_the_step(tmp_path: Path) -> None:
    model = build(Residual)
    optimizer = OPTIMIZERS["LBFGS"](model.parameters())
    with recorded(tmp_path / "run", model) as rec:
        train(model, optimizer, steps=1, after_step=rec.step)
    run = astray.open(tmp_path / "run")
    forwards = rows(run, phase="forward", site="<root>", role="output")
    step = run.ranks[0].calls.row(0)
    assert (step["site"], step["kind"]) == ("LBFGS", "optimizer")
    assert [(row["micro"], row["parent"]) for row in forwards] == [(n, step["seq"]) for n in range(len(forwards))]
    assert len(forwards) > 1
    gradient = values(run, site="inner.weight", role="input", path="grad")
    last = rows(run, phase="backward", site="inner.weight", role="gradient", path="grad")[-1]
    np.testing.assert_array_equal(gradient, run.values(0, last["row"]))
    order = [row["row"] for row in rows(run, phase="update", site="inner.weight")]
    assert order[0] < forwards[0]["row"] < last["row"] < order[1]  # the weight, then the closure, then the gradient


def test_a_step_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ZeroDivisionError

    model = nn.Linear(2, 2, bias=False)
    bad, good = Failing(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    hook = bad.register_step_pre_hook(lambda *_: None)
    with recorded(tmp_path / "run", model):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            bad.step()
        gc.collect()
        copies = len(living_copies())
        good.step()
        gc.collect()
        assert copies == 1
        assert living_copies() == []
        with pytest.raises(ZeroDivisionError):
            bad.step()
    assert list(bad._optimizer_step_pre_hooks) == [hook.id]
    gc.collect()
    assert living_copies() == []
    run = astray.open(tmp_path / "run")
    assert [row["type"] for row in rows(run, phase="update", path="update")] == ["SGD"]


class Halving(torch.optim.Optimizer):
    """An optimizer that is not torch's: the modes see its calls, which are not recorded."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Halving])
@pytest.mark.parametrize("level", ["function", "op"])
def test_what_an_optimizer_calls_in_its_step_is_recorded_when_asked_for(tmp_path: Path, kind: Any, level: str) -> None:
    def updates(name: str, **asked: Any) -> set[str]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters())
        with astray.record(tmp_path / name, model, level=level, **asked):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return {row["kind"] for row in rows(astray.open(tmp_path / name), phase="update")}

    assert updates("default") == set()
    assert updates("weights", optimizer="weight") == {"optimizer"}
    assert updates("calls", optimizer="calls") == {level}
    assert updates("both", optimizer=["weight", "calls"]) == {"optimizer", level}


@pytest.mark.parametrize("kind", [torch.optim.SGD, Halving])
def test_what_a_closure_calls_is_the_programs(tmp_path: Path, kind: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters())

    def closure() -> torch.Tensor:
        loss = nn.functional.mse_loss(model(torch.ones(1, 2)), torch.zeros(1, 2))
        loss.backward()
        return loss

    with astray.record(tmp_path / "run", model, level="function"):
        optimizer.step(closure)
    found = {row["site"] for row in rows(astray.open(tmp_path / "run"), role="output")}
    assert {f"{kind.__name__}/mse_loss", "linear"} & {site.rpartition("(")[0] or site for site in found}
    assert any(site.endswith("/mse_loss") for site in found)


def modes_on() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("level", [("function",), ("op",), ("function", "op")])
@pytest.mark.parametrize(
    "asked", [{"phases": ["forward", "backward"]}, {}, {"optimizer": "weight"}, {"optimizer": "calls"}]
)
def test_no_mode_is_told_of_a_step_of_torchs_own_that_nobody_asked_for(
    level: tuple[str, ...], asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fails = sgd_module.sgd, [False]
    modes, on = [], (int("function" in level), int("op" in level))

    def spy(*args: Any, **kwargs: Any) -> None:
        modes.append(modes_on())
        if fails[0]:
            raise ZeroDivisionError
        step(*args, **kwargs)

    monkeypatch.setattr(sgd_module, "sgd", spy)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.record(tmp_path / "run", model, level=level, **asked) as recording:
        for fails[0] in (False, True, False):
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(ZeroDivisionError) if fails[0] else nullcontext():
                optimizer.step()
            gc.collect()
            assert modes_on() == on
            recording.step()
    assert modes == [on if asked == {"optimizer": "calls"} else (0, 0)] * 3
    assert modes_on() == (0, 0)
    kind = "torch.nn.functional.linear" if "function" in level else "aten.addmm.default"
    assert len(rows(astray.open(tmp_path / "run"), type=kind, phase="forward", path="out")) == 3


def test_modes_of_others_keep_their_places_around_a_step_that_nobody_asked_for(tmp_path: Path) -> None:
    class Others(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Others.seen += 1
            return func(*args, **(kwargs or {}))

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    below, above = Others(), Others()
    with below, astray.record(tmp_path / "run", model, level="op", phases=["forward"]), above:
        model(torch.ones(1, 2)).sum().backward()
        before, Others.seen = [torch._C._get_dispatch_stack_at(i) for i in range(3)], 0
        optimizer.step()
        assert Others.seen
        assert [torch._C._get_dispatch_stack_at(i) for i in range(3)] == before
    assert modes_on() == (0, 0)


def test_a_mode_that_an_exception_keeps_away_comes_back_with_the_next_step_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fails, kept = sgd_module.sgd, [False], []

    def fail(*args: Any, **kwargs: Any) -> None:
        if fails[0]:
            raise ZeroDivisionError
        step(*args, **kwargs)

    monkeypatch.setattr(sgd_module, "sgd", fail)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with astray.record(tmp_path / "run", model, level="function", phases=["forward", "backward"]):
        model(torch.ones(1, 2)).sum().backward()
        for fails[0] in (True, True, False, True):
            with pytest.raises(ZeroDivisionError) if fails[0] else nullcontext() as error:
                optimizer.step()
            kept.append(error)
            assert modes_on() == (0 if fails[0] else 1, 0)
    kept.clear()
    del error
    assert modes_on() == (0, 0)
    missed = astray.open(tmp_path / "run").ranks[0].end.missed
    assert [(one.what, one.count) for one in missed] == [
        ("functions and ops that were called after a step of an optimizer", 3)
    ]


def test_what_hooks_and_closures_do_in_a_step_is_still_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = optimizer.register_step_post_hook(lambda *_: model(torch.ones(1, 2)))
    with astray.record(tmp_path / "run", model, level="function", phases=["forward", "backward"]):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hook.remove()
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    assert len(rows(astray.open(tmp_path / "run"), type="torch.nn.functional.linear", phase="forward", path="out")) == 3


def living_copies() -> list[Any]:
    return [thing for thing in gc.get_objects() if type(thing).__name__ == "ParameterUpdate"]


def test_optimizers_of_other_models_are_left_alone_and_named(tmp_path: Path) -> None:
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with recorded(tmp_path / "run", mine):
        (mine(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    run = astray.open(tmp_path / "run")
    assert rows(run, phase="update") == []
    (missed,) = run.ranks[0].end.missed
    assert (missed.what, missed.why) == ("a step of SGD", "none of its parameters belongs to a recorded model")


def test_an_optimizer_is_not_kept_alive(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with recorded(tmp_path / "run", model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None


def test_a_failure_of_ours_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    with recorded(tmp_path / "run", model):
        monkeypatch.setattr("astray.capture.pytorch.parameter_update.difference", lambda *_: 1 / 0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, start - 0.1)
    (missed,) = astray.open(tmp_path / "run").ranks[0].end.missed
    assert (missed.what, missed.why) == ("a step of SGD", "ZeroDivisionError: division by zero")
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
def test_a_compiled_step_runs_as_it_would(tmp_path: Path) -> None:
    def run(watched: bool) -> torch.Tensor:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        with recorded(tmp_path / "run", model) if watched else nullcontext():
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                step()
        return model.weight.detach()

    assert torch.equal(run(False), run(True))
    missed = astray.open(tmp_path / "run").ranks[0].end.missed
    assert any("torch.compile" in one.why for one in missed)


@pytest.mark.slow
def test_optimizers_of_a_discovered_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "masters = [p.detach().clone().requires_grad_() for p in model.parameters()]\n"
        "a, b = torch.optim.SGD(model.parameters(), lr=.1), torch.optim.AdamW(masters)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    for p, m in zip(model.parameters(), masters): m.grad = p.grad.clone()\n"
        "    b.step(); a.step()\n"
    )
    command = ["astray", "run", "-o", str(tmp_path / "run"), "--optimizer", "weight", str(script)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    found = rows(astray.open(tmp_path / "run"), phase="update", role="output")
    assert [(row["step"], row["site"]) for row in found] == [
        (0, "AdamW/param_groups.0.0"), (0, "AdamW/param_groups.0.1"), (1, "weight"), (1, "bias"),
        (1, "AdamW/param_groups.0.0"), (1, "AdamW/param_groups.0.1"), (2, "weight"), (2, "bias"),
    ]  # fmt: skip


RANKS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp, astray
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
        torch.manual_seed(0)
        layer = nn.Linear(2, 4, bias=False)
        model = wrap(layer)
        model = layer if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wanted = ("gradient", "state", "update", "weight")
        with astray.record(f"{folder}/{name}", model, optimizer=wanted, keep="tensors"):
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_gradients_are_those_summed_over_ranks_and_shards_are_recorded_as_such(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    subprocess.run([sys.executable, tmp_path / "script.py", tmp_path], check=True, capture_output=True)
    whole, parts = astray.open(tmp_path / "ddp"), astray.open(tmp_path / "fsdp")
    for rank in (0, 1):
        shards = {(row["role"], row["path"]): row for row in updates(parts, rank)}
        for row in updates(whole, rank):
            assert row["site"] == "weight"
            if row["path"] == "state.step":
                continue
            value, shard = whole.values(rank, row["row"]), shards[row["role"], row["path"]]
            if row["path"] == "grad":  # the mean of 1 and 2, not the rank's own
                np.testing.assert_array_equal(value, np.full((4, 2), 1.5, np.float32))
            np.testing.assert_array_equal(parts.values(rank, shard["row"]), value[2 * rank : 2 * rank + 2])
            assert json.loads(shard["placement"])["offset"] == [2 * rank, 0]


def updates(run: astray.Run, rank: int) -> list[dict[str, Any]]:
    part = run.ranks[rank]
    found = [
        {**part.calls.row(call), **part.tensors.row(index), "row": index}
        for index, call in enumerate(part.call_rows.tolist())
    ]
    return [row for row in found if row["phase"] == "update"]
