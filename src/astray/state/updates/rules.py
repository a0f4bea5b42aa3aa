"""What an optimizer of torch should make of a weight, as its paper writes it, in float64 and element by element.

A rule gets flat blocks of tensors, all of one length, and returns the change of the weight and the new states, each
with the size of the terms it is the sum of: rounding is proportional to the terms, not to their sum. The change is
computed from the states as they *are* after the step (`after`), so that a wrong state and a wrong change have
different verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ParameterState(NamedTuple):
    """A block of one parameter before a step, in float64, and its states after the step."""

    weight: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    group: Mapping[str, Any]
    """The settings of the parameter's group: lr, betas, weight_decay and so on."""
    eps: float
    """The spacing of the numbers of the parameter's dtype, at 1."""
    rough: float
    """The spacing of the settings, where these are tensors of less precision."""
    least: float
    """The smallest spacing of the parameter's dtype, that of subnormal numbers."""

    def state(self, name: str) -> Tensor:
        """A state before the step; zeros where there was none, as in the first step."""
        return self.states.get(name, torch.zeros_like(self.gradient))


class SummedTerm(NamedTuple):
    """A number, and the size of the terms it is the sum of."""

    value: Tensor
    size: Tensor


class ExpectedUpdate(NamedTuple):
    """The result of a rule: the change of the weight, the error that rounding may cause, and the new states."""

    change: Tensor
    slack: Tensor
    states: Mapping[str, SummedTerm]


Rule = Callable[[ParameterState], ExpectedUpdate]


@dataclass(frozen=True)
class SummingRule:
    """A rule that needs sums over all blocks of a parameter, such as norms. It has them among the settings."""

    sums: Callable[[ParameterState], Mapping[str, Tensor]]
    rule: Rule

    def __call__(self, b: ParameterState) -> ExpectedUpdate:
        return self.rule(b)


ROUNDINGS = 8
"""Roundings, each of half a spacing, that a step may make of the terms of one number."""


class NoRuleError(Exception):
    """A parameter's update cannot be recomputed; the text says why."""


def sgd(b: ParameterState) -> ExpectedUpdate:
    """Momentum with dampening, Nesterov's too; the decay is part of the gradient."""
    momentum, lr = b.group["momentum"], b.group["lr"]
    gradient = _decayed_gradient(b)
    if not momentum:
        return moved(b, -lr * gradient.value, lr * gradient.size, {})
    keep = 1 - b.group["dampening"]
    if "momentum_buffer" in b.states:
        old = momentum * b.state("momentum_buffer")
        buffer = SummedTerm(old + keep * gradient.value, old.abs() + abs(keep) * gradient.size)
    else:  # the first gradient is not dampened
        buffer = gradient
    now = after(b, "momentum_buffer")
    direction, size = now, now.abs()
    if b.group["nesterov"]:
        direction, size = gradient.value + momentum * now, gradient.size + momentum * now.abs()
    return moved(b, -lr * direction, lr * size, {"momentum_buffer": buffer})


def adam(b: ParameterState) -> ExpectedUpdate:
    """Both moments with their bias corrected; the decay is part of the gradient unless it is decoupled."""
    return _adam(b, decoupled=bool(b.group.get("decoupled_weight_decay", False)))


def adamw(b: ParameterState) -> ExpectedUpdate:
    """Adam whose decay takes a share of the weight itself."""
    return _adam(b, decoupled=True)


def _adam(b: ParameterState, *, decoupled: bool) -> ExpectedUpdate:
    (beta1, beta2), lr, eps = b.group["betas"], b.group["lr"], b.group["eps"]
    gradient = _ascending(b) if decoupled else _decayed_gradient(b)
    first = _average(b, b.state("exp_avg"), gradient, beta1)
    squared = SummedTerm(gradient.value**2, gradient.size**2)
    states = {"exp_avg": first, "exp_avg_sq": _average(b, b.state("exp_avg_sq"), squared, beta2)}
    count = torch.as_tensor(after(b, "step"), dtype=torch.float64)
    second = after(b, "exp_avg_sq")
    if b.group.get("amsgrad"):
        largest = torch.maximum(b.state("max_exp_avg_sq"), second)
        states["max_exp_avg_sq"] = SummedTerm(largest, largest)
        second = after(b, "max_exp_avg_sq")
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    change = -lr * after(b, "exp_avg") / correction1 / ((second / correction2).sqrt() + eps)
    size = change.abs()
    if _counts_on_device(b):  # then these differences of nearly equal numbers are made in single precision
        size = size * (1 + torch.finfo(torch.float32).eps / b.eps / torch.minimum(correction1, correction2))
    if decoupled:
        decay = lr * b.group["weight_decay"] * b.weight
        change, size = change - decay, size + decay.abs()
    return moved(b, change, size, states)


def lion(b: ParameterState) -> ExpectedUpdate:
    """The sign of a mean of momentum and gradient, and a decay of the weight itself."""
    beta1, beta2 = b.group["betas"]
    lr, decay = b.group["lr"], b.group.get("weight_decay", 0.0)
    gradient = _ascending(b)
    mean = _average(b, b.state("exp_avg"), gradient, beta1)
    near_zero = mean.value.abs() <= ROUNDINGS * (b.eps * mean.size + b.least)  # where rounding decides about the sign
    change = -lr * mean.value.sign() - lr * decay * b.weight
    slack = rounding(b, change, lr * (1 + abs(decay) * b.weight.abs()))
    slack = slack + 2 * lr * (near_zero & (mean.size > 0))
    return ExpectedUpdate(change, slack, {"exp_avg": _average(b, b.state("exp_avg"), gradient, beta2)})


RULES: dict[str, Rule] = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "Lion": lion}
"""The rules, by the name of the optimizer's class or of a base class. Those of Paddle's are in `paddle_rules`."""


def rule_of(optimizer: Any, own: Mapping[Any, Rule], known: Mapping[str, Rule]) -> Rule:
    """The rule of an optimizer: the user's own, else that of its class or its nearest base class."""
    for kind in type(optimizer).__mro__:
        rule = own.get(kind) or own.get(kind.__name__) or known.get(kind.__name__)
        if rule is not None:
            return rule
    raise NoRuleError(f"there is no rule for {type(optimizer).__name__}")


def after(b: ParameterState, name: str) -> Tensor:
    """A state after the step. Raises NoRuleError where there is none."""
    if name not in b.after:
        names = ", ".join(b.after) or "nothing"
        raise NoRuleError(f"its state has no {name!r}, only {names}")
    return b.after[name]


def _counts_on_device(b: ParameterState) -> bool:
    return bool(b.group.get("capturable") or b.group.get("fused"))


def _ascending(b: ParameterState) -> SummedTerm:
    gradient = -b.gradient if b.group.get("maximize") else b.gradient
    return SummedTerm(gradient, gradient.abs())


def _decayed_gradient(b: ParameterState) -> SummedTerm:
    gradient, decay = _ascending(b), b.group.get("weight_decay", 0.0) * b.weight
    return SummedTerm(gradient.value + decay, gradient.size + decay.abs())


def _average(b: ParameterState, old: Tensor, new: SummedTerm, beta: Any) -> SummedTerm:
    size = beta * old.abs() + (1 - beta) * new.size
    if _counts_on_device(b):  # there 1 − beta is made in single precision, of a beta near 1
        size = size + (old.abs() + new.size) / ROUNDINGS
    return SummedTerm(beta * old + (1 - beta) * new.value, size)


def moved(b: ParameterState, change: Tensor, size: Tensor, states: Mapping[str, SummedTerm]) -> ExpectedUpdate:
    """The result of a rule whose change is the sum of terms of this size."""
    return ExpectedUpdate(change, rounding(b, change, size), states)


def rounding(b: ParameterState, change: Tensor, size: Tensor) -> Tensor:
    """The error of the weight that rounding explains: twice its spacing, and roundings of the terms of the change."""
    largest = torch.maximum(b.weight.abs(), (b.weight + change).abs())
    return 2 * b.eps * largest + ROUNDINGS * (b.rough * size + b.least)
