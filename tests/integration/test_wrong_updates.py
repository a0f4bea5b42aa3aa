"""Faults between the backward and the next forward: the parameter whose update went wrong is named, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from small_models import Residual, build

Optimize = Callable[[Any], torch.optim.Optimizer]
Meddle = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def adamw(**settings: Any) -> Optimize:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 0.01, **settings})


def trained(
    path: Path,
    optimize: Optimize = adamw(),  # noqa: B008 - it makes one, and holds none
    meddle: Meddle = lambda *_: None,
    *,
    micro_steps: int = 1,
    **settings: Any,
) -> Path:
    """Records three steps, with something done between the backward and the update."""
    model = build(Residual)
    optimizer = optimize(model.parameters())
    data = torch.Generator().manual_seed(5)
    wanted = ("gradient", "weight", "state", "update")
    with astray.record(path, model, **{"optimizer": wanted, **settings}) as rec:
        for step in range(3):
            optimizer.zero_grad()
            for x in torch.randn(8, 6, generator=data).chunk(micro_steps):
                (model(x).square().sum() / 8).backward()
            meddle(model, optimizer, step)
            optimizer.step()
            rec.step()
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return trained(tmp_path / "good")


def first_of(good: Path, bad: Path) -> astray.Divergence:
    first = astray.compare(good, bad).first
    assert first is not None
    return first


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_another_weight_decay(keep: str, tmp_path: Path) -> None:
    runs = [
        trained(tmp_path / name, adamw(lr=1e-4, weight_decay=decay), keep=keep)
        for name, decay in (("good", 0.01), ("bad", 0.1))
    ]
    first = first_of(*runs)
    assert (first.step, first.site, first.place.phase, first.place.path) == (0, "norm.weight", "update", "update")
    assert first.cause == "computation"
    assert first.enclosing == (("AdamW", "AdamW"),)
    text = " ".join(first.evidence)
    assert "Its input and its parameter agree (identical), but its output `update` does not" in text
    assert "`weight_decay` is 0.01 in the reference and 0.1 in the candidate" in text
    assert first.stack[0].code == "optimizer.step()"


def test_one_parameter_that_is_not_updated(good: Path, tmp_path: Path) -> None:
    class Forgetful(torch.optim.AdamW):
        """Puts one weight back after a later step."""

        def step(self, closure: Any = None) -> None:
            parameter = self.param_groups[0]["params"][2]
            before = parameter.detach().clone()
            super().step(closure)
            if self.state[parameter]["step"] == 2:
                parameter.data.copy_(before)

    class Proper(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    Proper.__name__ = Forgetful.__name__
    good = trained(tmp_path / "proper", Proper)
    first = first_of(good, trained(tmp_path / "bad", Forgetful))
    assert (first.step, first.site, first.place.path) == (1, "inner.weight", "update")
    assert first.candidate.statistics.absmax == 0
    assert "Its input, its parameter and its state agree" not in " ".join(first.evidence)  # the state was not changed
    assert first.previous is not None
    assert (first.previous.site, first.previous.path) == ("inner.weight", "state.exp_avg_sq")


def test_another_beta_shows_in_the_state_first(good: Path, tmp_path: Path) -> None:
    first = first_of(good, trained(tmp_path / "bad", adamw(betas=(0.8, 0.999))))
    assert (first.step, first.site, first.place.path) == (0, "norm.weight", "state.exp_avg")


def test_gradients_that_are_clipped_after_the_backward(good: Path, tmp_path: Path) -> None:
    def clip(model: nn.Module, _: Any, step: int) -> None:
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    first = first_of(good, trained(tmp_path / "bad", meddle=clip))
    assert (first.step, first.site, first.cause, first.place.path) == (1, "norm.weight", "input", "grad")
    assert "not clipped in the reference and clipped to a norm of 0.01 in the candidate" in first.evidence[0]
    assert "The gradient that the optimizer is given for norm.weight already differs" in first.evidence[1]


def test_a_weight_that_somebody_wrote_to_before_the_optimizer(good: Path, tmp_path: Path) -> None:
    def scale(model: nn.Module, _: Any, step: int) -> None:
        if step == 1:
            model.inner.weight.data.mul_(1.01)

    first = first_of(good, trained(tmp_path / "bad", meddle=scale))
    assert (first.step, first.site, first.cause) == (1, "inner.weight", "parameter")
    assert first.evidence[0] == (
        "Its input agrees (identical), but its parameter `weight` already differs on entry (diverged, 1.0e-02), as the "
        "only parameter in this step. It still agreed at step 1, forward, inner (Linear), parameter `weight`: look at "
        "what wrote to it since, before the optimizer."
    )


def loading(wrong: bool) -> Meddle:
    def load(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            if wrong:
                state["state"][3]["exp_avg"].zero_()
            optimizer.load_state_dict(state)

    return load


def test_a_state_that_was_loaded_wrong(tmp_path: Path) -> None:
    runs = [trained(tmp_path / str(wrong), meddle=loading(wrong)) for wrong in (False, True)]
    first = first_of(*runs)
    assert (first.step, first.site, first.cause) == (1, "inner.bias", "parameter")
    assert first.parameter is not None
    assert (first.parameter.role, first.parameter.path) == ("state", "state.exp_avg")
    assert "its state `state.exp_avg` already differs on entry" in first.evidence[0]
    assert "loaded into the optimizer" in first.evidence[0]


def test_a_state_that_only_one_run_has_loaded(good: Path, tmp_path: Path) -> None:
    first = first_of(good, trained(tmp_path / "bad", meddle=loading(True)))
    assert (first.step, first.site, first.place.path) == (1, "inner.bias", "state.exp_avg")
    assert any("only in candidate" in text and "state `state.exp_avg_sq`" in text for text in first.evidence)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    good, bad = (
        trained(tmp_path / name, adamw(lr=torch.tensor(lr), foreach=False))
        for name, lr in (("good", 0.01), ("bad", 0.02))
    )
    first = first_of(good, bad)
    assert (first.site, first.cause, first.place.path) == ("AdamW", "input", "param_groups.0.lr")
    assert "look at how it is made, and at its schedule" in first.evidence[0]


def rounded_otherwise(optimize: Optimize) -> Optimize:
    """The last bit of every weight is another at the start, as on a machine that rounds differently."""

    def start(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        for parameter in parameters:
            parameter.data.mul_(1 + 2**-23)
        return optimize(parameters)

    return start


@pytest.mark.parametrize("keep", ["stats", "tensors"])
@pytest.mark.parametrize("lr", [1e-2, 1e-7])
def test_roundings_of_the_weights_are_no_wrong_update(lr: float, keep: str, tmp_path: Path) -> None:
    """An update far below its weight has few digits that are sure, however exactly it was computed."""
    sgd: Optimize = lambda parameters: torch.optim.SGD(parameters, lr=lr, weight_decay=0.1)  # noqa: E731
    runs = [trained(tmp_path / "good", sgd, keep=keep), trained(tmp_path / "bad", rounded_otherwise(sgd), keep=keep)]
    diff = astray.compare(*runs)
    assert (diff.first.step, diff.first.cause) == (0, "parameter")  # it was another weight from the start
    wrong = [diff.pairs["path"][row] for row in range(len(diff.pairs)) if diff.pairs["origin"][row]]
    assert "update" not in wrong


def test_updates_of_large_gradients_are_not_taken_for_rounding(tmp_path: Path) -> None:
    def enlarge(model: nn.Module, _: Any, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1e6)

    good, bad = (trained(tmp_path / f"{lr}", adamw(lr=lr), enlarge) for lr in (1e-3, 2e-3))
    first = first_of(good, bad)
    assert (first.step, first.site, first.place.path) == (0, "norm.weight", "update")


def test_updates_are_paired_whatever_the_number_of_micro_steps(good: Path, tmp_path: Path) -> None:
    diff = astray.compare(good, trained(tmp_path / "accumulated", micro_steps=4))
    updates = [row for row in range(len(diff.pairs)) if diff.pairs["phase"][row] == "update"]
    assert len(updates) == 3 * 4 * (2 + 5)
    assert {diff.pairs["verdict"][row] for row in updates} <= {"identical", "rounding", "drifting"}
