"""Updates that were made as the optimizer says, in every form torch has, and updates that were not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.errors import UsageError
from astray.state.updates import ExpectedUpdate, ParameterState, Update, Updates

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """As its paper has it."""

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((momentum * one + p.grad * (1 - one)).sign(), alpha=-group["lr"])
                momentum.mul_(two).add_(p.grad, alpha=1 - two)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with Nesterov's momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "SGD, dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "Adam with decay": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True, maximize=True),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Lion": lambda p: Lion(p, weight_decay=0.1),
}


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 3)).to(dtype)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> Iterator[int]:
    x = torch.randn(16, 24, dtype=next(model.parameters()).dtype)
    for each in range(count):
        optimizer.zero_grad()
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        yield each


def checked(make: Make, dtype: torch.dtype = torch.float32, count: int = 3) -> Updates:
    model = network(dtype)
    optimizer = make(model.parameters())
    with astray.state.check_updates(optimizer, model) as watch:
        for _ in steps(model, optimizer, count):
            pass
    return watch.updates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_right_optimizer_is_right(name: str, dtype: torch.dtype) -> None:
    updates = checked(OPTIMIZERS[name], dtype)
    assert [row.verdict for row in updates] == ["right"] * 18, str(updates)
    assert all(row.made > 0 or row.lost > 0 for row in updates)


@pytest.mark.parametrize("name", ["SGD", "SGD with Nesterov's momentum", "AdamW", "Lion"])
def test_a_parameter_without_all_of_its_update_is_found(name: str) -> None:
    """What a hook, a wrong mask or a second copy of the weights may do behind the optimizer."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())

    def spoilt(factor: float) -> list[Update]:
        held = model[3].weight.detach().clone()

        def spoil(*_: Any) -> None:
            weight = model[3].weight.detach()
            weight.copy_(held + (weight - held) * factor)

        handle = optimizer.register_step_post_hook(spoil)
        with astray.state.check_updates(optimizer, model) as watch:
            for _ in steps(model, optimizer, 1):
                pass
        handle.remove()
        return watch.updates.wrong

    assert [(row.name, row.verdict, row.why) for row in spoilt(0.0)] == [
        ("3.weight", "not updated", "no element has moved")
    ]
    (half,) = spoilt(0.5)
    assert (half.name, half.verdict) == ("3.weight", "wrong")
    assert half.factor == pytest.approx(0.5, rel=1e-4)
    (little,) = spoilt(1.01)
    assert little.name == "3.weight"
    assert little.factor == pytest.approx(1.01, rel=1e-4)


class NoBiasCorrection(torch.optim.AdamW):
    """Forgets that its moments began at zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                for key, beta, new in (("exp_avg", one, p.grad), ("exp_avg_sq", two, p.grad**2)):
                    state.setdefault(key, torch.zeros_like(p)).mul_(beta).add_(new, alpha=1 - beta)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-group["lr"])


def test_a_forgotten_bias_correction_is_a_factor() -> None:
    updates = checked(lambda p: NoBiasCorrection(p, weight_decay=0.0), count=1)
    assert {row.verdict for row in updates} == {"wrong"}
    for row in updates:  # 0.1 / √0.001 in the first step
        assert row.factor == pytest.approx(0.1 / 0.001**0.5, rel=1e-3)


class SpoilsItsSquares(torch.optim.Adam):
    """Its second moment is changed once the update was made of it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        p = self.param_groups[0]["params"][0]
        with torch.no_grad():
            self.state[p]["exp_avg_sq"].mul_(1.5)


def test_an_update_that_does_not_follow_from_the_states_is_wrong() -> None:
    updates = checked(lambda p: SpoilsItsSquares(p), count=1)
    (row,) = updates.wrong
    assert row.name == "0.weight"
    assert row.verdict == "wrong"
    assert row.factor == pytest.approx(1.5**0.5, rel=1e-3)


def test_a_state_spoilt_between_two_steps_shows_only_as_a_state() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in steps(model, optimizer, 1):
        pass
    with astray.state.check_updates(optimizer, model) as watch:

        def spoil(*_: Any) -> None:
            optimizer.state[model[0].weight]["momentum_buffer"].mul_(2)

        optimizer.register_step_pre_hook(spoil)
        for _ in steps(model, optimizer, 1):
            pass
    (row,) = watch.updates.wrong
    assert (row.name, row.verdict) == ("0.weight", "wrong state")
    assert re.fullmatch(r"\d+ elements of its states do not follow from the gradient", row.why)


def test_updates_that_are_too_fine_are_counted() -> None:
    """In bfloat16 a weight of 1 moves by 1/128 or not at all."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([1e-4] * 4 + [0.1] * 3 + [0.0], dtype=torch.bfloat16)
    with astray.state.check_updates(optimizer) as watch:
        optimizer.step()
    (row,) = watch.updates
    assert (row.name, row.verdict, row.lost) == ("group0.0", "right", 0.5)
    assert "up to 50% of a parameter's elements too fine to move" in str(watch.updates)


def test_the_effective_step_is_in_units_of_the_learning_rate() -> None:
    updates = checked(lambda p: torch.optim.Adam(p, lr=1e-3), count=1)
    for row in updates:
        assert row.effective == pytest.approx(1.0, abs=2e-2)  # Adam's first step is the sign of the gradient
        assert row.lr == 1e-3


def test_a_parameter_without_gradient_must_not_move() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with astray.state.check_updates(optimizer, model) as watch:
        for _ in steps(model, optimizer, 1):
            pass
    (idle,) = [row for row in watch.updates if row.verdict == "idle"]
    assert (idle.name, idle.why, idle.made) == ("1.weight", "it has no gradient", 0.0)

    def moves(*_: Any) -> None:
        model[1].weight.data[:3] += 1

    optimizer.register_step_post_hook(moves)
    with astray.state.check_updates(optimizer, model) as watch:
        for _ in steps(model, optimizer, 1):
            pass
    (row,) = watch.updates.wrong
    assert (row.name, row.verdict) == ("1.weight", "moved without gradient")
    assert row.why == "it has no gradient, yet 3 of 40 elements moved"


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_may_scale_and_skip(fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(16, 24)
    with astray.state.check_updates(optimizer, model) as watch:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean() * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    updates = watch.updates
    assert not updates.wrong, str(updates)
    skipped = [row for row in updates if row.verdict == "idle"]
    assert len(skipped) == (6 if fused else 0)  # another optimizer is not even called
    assert all(row.why == "its GradScaler has left the step out" for row in skipped)


def test_a_closure_makes_the_gradients() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 24)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return float(loss.detach())

    with astray.state.check_updates(optimizer, model) as watch:
        optimizer.step(closure)
    assert [row.verdict for row in watch.updates] == ["right"] * 6


def test_an_optimizer_without_rule_is_not_checked_and_says_so() -> None:
    updates = checked(lambda p: torch.optim.RMSprop(p), count=1)
    assert {(row.verdict, row.why) for row in updates} == {("unchecked", "there is no rule for RMSprop")}
    assert str(updates).startswith("0 updates as due in 1 step, 6 not checked")


def test_a_rule_of_ones_own() -> None:
    def rule(before: ParameterState) -> ExpectedUpdate:
        change = -before.group["lr"] * before.gradient.sign()
        return ExpectedUpdate(change, 1e-6 * torch.ones_like(change), {})

    class SignSGD(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad.sign(), alpha=-0.01)

    model = network()
    optimizer = SignSGD(model.parameters())
    for rules in ({SignSGD: rule}, {"SignSGD": rule}):
        with astray.state.check_updates(optimizer, model, rules=rules) as watch:
            for _ in steps(model, optimizer, 1):
                pass
        assert {row.verdict for row in watch.updates} == {"right"}


def test_sparse_gradients_are_not_checked_and_it_is_said() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with astray.state.check_updates(optimizer, table) as watch:
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
    (row,) = watch.updates
    assert (row.verdict, row.why) == ("unchecked", "updates by sparse_coo gradients are not recomputed")


def test_only_what_is_asked_for_is_looked_at() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with astray.state.check_updates(optimizer, model, pattern=r"3\.") as watch:
        for _ in steps(model, optimizer, 1):
            pass
    assert sorted(row.name for row in watch.updates) == ["3.bias", "3.weight"]
    for _ in steps(model, optimizer, 1):
        pass
    assert len(watch.updates) == 2  # it has ended


def test_what_cannot_be_is_said() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"No parameter's name matches 'weight'.*try '\.\*weight'"):
        astray.state.check_updates(optimizer, model, pattern="weight")
    with pytest.raises(UsageError, match="'\\(' is not a regular expression: missing"):
        astray.state.check_updates(optimizer, model, pattern="(")
    with pytest.raises(UsageError, match="None of the 6 parameters of this AdamW belongs to this Linear"):
        astray.state.check_updates(optimizer, nn.Linear(2, 2))
    with astray.state.check_updates(optimizer, model) as watch:
        pass
    assert str(watch.updates) == "No update was seen: no optimizer has stepped while it was watched."


def test_watching_changes_nothing() -> None:
    def weights(watched: bool) -> list[torch.Tensor]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        if watched:
            astray.state.check_updates(optimizer, model)
        for _ in steps(model, optimizer):
            pass
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(weights(False), weights(True), strict=True))
