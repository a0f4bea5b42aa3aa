"""What Paddle's optimizers should make of a weight, in float64 and element by element: as `rules` for those of torch.

`paddle_steps` gives the settings. Those that Paddle's kernels take in single precision, whatever the weight's dtype,
are rounded to it here; Adam's are not. The powers of the betas, `beta1_pow_acc`, are those before the step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from astray.state.updates.rules import (
    ROUNDINGS,
    ExpectedUpdate,
    ParameterState,
    Rule,
    SummedTerm,
    SummingRule,
    after,
    moved,
)

_DOUBLE = 1e-12  # the spacing of double precision is below, that of single precision above


def sgd(b: ParameterState) -> ExpectedUpdate:
    """The gradient, with its regularisation, times the learning rate."""
    gradient, lr = _regularised(b), _lr(b)
    return moved(b, -lr * gradient.value, lr * gradient.size, {})


def momentum(b: ParameterState) -> ExpectedUpdate:
    """Momentum without dampening, Nesterov's too; a decay of L2 is made by the kernel."""
    lr, mu, scale, decay = _lr(b), *(_single(b.group[name]) for name in ("momentum", "rescale_grad", "fused_l2"))
    plain = _regularised(b)
    gradient = SummedTerm(scale * plain.value + decay * b.weight, abs(scale) * plain.size + decay * b.weight.abs())
    old = mu * b.state("velocity")
    velocity = SummedTerm(old + gradient.value, old.abs() + gradient.size)
    now = after(b, "velocity")
    direction, size = now, now.abs()
    if b.group["use_nesterov"]:
        direction, size = gradient.value + mu * now, gradient.size + mu * now.abs()
    return moved(b, -lr * direction, lr * size, {"velocity": velocity})


def adam(b: ParameterState) -> ExpectedUpdate:
    """Both moments with their bias corrected; the decay is part of the gradient."""
    return _adam(b, 0.0)


def adamw(b: ParameterState) -> ExpectedUpdate:
    """Adam whose decay takes a share of the weight itself; both go by the parameter's share of the learning rate."""
    return _adam(b, _single(b.group["decay"]))


def _adam(b: ParameterState, decay: float) -> ExpectedUpdate:
    beta1, beta2, lr = b.group["beta1"], b.group["beta2"], _lr(b) * b.group["lr_ratio"]
    states = _moments(b, beta1, beta2)
    second = after(b, "moment2")
    if b.group["amsgrad"]:
        largest = torch.maximum(b.state("moment2_max"), second)
        states["moment2_max"] = SummedTerm(largest, largest)
        second = after(b, "moment2_max")
    direction, size = _corrected(b, second, b.group["epsilon"])
    shrunk = lr * decay * b.weight
    return moved(b, -lr * direction - shrunk, lr * size + shrunk.abs(), states)


def adagrad(b: ParameterState) -> ExpectedUpdate:
    """The gradient over the root of the sum of all squares."""
    gradient, lr, epsilon = _regularised(b), _lr(b), _single(b.group["epsilon"])
    squared = _squared(b, gradient)
    begun = b.states.get("moment", torch.full_like(b.gradient, b.group["initial_accumulator_value"]))
    states = {"moment": SummedTerm(begun + squared.value, begun + squared.size)}
    root = after(b, "moment").sqrt() + epsilon
    return moved(b, -lr * gradient.value / root, lr * gradient.size / root, states)


def rmsprop(b: ParameterState) -> ExpectedUpdate:
    """The gradient over the root of a mean of squares, or of their variance, with momentum."""
    rho, epsilon, mu = (_single(b.group[name]) for name in ("rho", "epsilon", "momentum"))
    gradient, lr = _regularised(b), _lr(b)
    states = {"mean_square": _mean(b.state("mean_square"), _squared(b, gradient), rho)}
    square = size = after(b, "mean_square")
    if b.group["centered"]:
        states["mean_grad"] = _mean(b.state("mean_grad"), gradient, rho)
        mean = after(b, "mean_grad")
        square, size = square - mean**2, square + mean**2
    root = (square + epsilon).sqrt()
    scaled, old = lr * gradient.value / root, mu * b.state("momentum")
    doubt = scaled.abs() * (1 + (size + epsilon) / (square + epsilon))  # the difference may have lost its digits
    states["momentum"] = SummedTerm(old + scaled, old.abs() + doubt + lr * gradient.size / root)
    now = after(b, "momentum")
    return moved(b, -now, now.abs(), states)


def adamax(b: ParameterState) -> ExpectedUpdate:
    """Adam whose second moment is the largest gradient there was, which fades."""
    beta1, beta2, epsilon = (_single(b.group[name]) for name in ("beta1", "beta2", "epsilon"))
    gradient, lr = _regularised(b), _lr(b)
    largest = torch.maximum(gradient.value.abs(), beta2 * b.state("inf_norm") + epsilon)
    states = {
        "moment": _mean(b.state("moment"), gradient, beta1),
        "inf_norm": SummedTerm(largest, torch.maximum(gradient.size, largest)),
    }
    change = -lr / (1 - _power(b, "beta1")) * after(b, "moment") / after(b, "inf_norm")
    return moved(b, change, change.abs(), states)


def lamb(b: ParameterState) -> ExpectedUpdate:
    """Adam's direction and a decay, as long as the weight is: the norms of both are the sums of `_lamb_sums`."""
    lr, sums = _lr(b), b.group
    direction, size, states = _lamb_direction(b)
    ratio = 1.0
    if (b.group["decay"] > 0 or b.group["always_adapt"]) and sums["weights"] > 0 and sums["directions"] > 0:
        ratio = float((sums["weights"] / sums["directions"]).sqrt())
    doubt = 1 + float(sums["elements"]) ** 0.5  # of norms that are summed in the weight's own precision
    change = -lr * ratio * direction
    return moved(b, change, lr * ratio * size + change.abs() * doubt, states)


def _lamb_sums(b: ParameterState) -> Mapping[str, Tensor]:
    direction, _, _ = _lamb_direction(b)
    elements = torch.full_like(direction.sum(), direction.numel())
    return {"weights": (b.weight**2).sum(), "directions": (direction**2).sum(), "elements": elements}


def _lamb_direction(b: ParameterState) -> tuple[Tensor, Tensor, dict[str, SummedTerm]]:
    beta1, beta2, epsilon, decay = (_single(b.group[name]) for name in ("beta1", "beta2", "epsilon", "decay"))
    states = _moments(b, beta1, beta2)
    direction, size = _corrected(b, after(b, "moment2"), epsilon)
    return direction + decay * b.weight, size + decay * b.weight.abs(), states


RULES: dict[str, Rule] = {
    "SGD": sgd,
    "Momentum": momentum,
    "Adam": adam,
    "AdamW": adamw,
    "Adagrad": adagrad,
    "RMSProp": rmsprop,
    "Adamax": adamax,
    "Lamb": SummingRule(_lamb_sums, lamb),
}
"""The rules, by the name of the optimizer's class or of a base class."""


def _moments(b: ParameterState, beta1: float, beta2: float) -> dict[str, SummedTerm]:
    gradient = _regularised(b)
    first, second = _mean(b.state("moment1"), gradient, beta1), _mean(b.state("moment2"), _squared(b, gradient), beta2)
    return {"moment1": first, "moment2": second}


def _corrected(b: ParameterState, second: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Adam's direction from the moments after the step, and its size."""
    first = after(b, "moment1") / (1 - _power(b, "beta1"))
    direction = first / ((second / (1 - _power(b, "beta2"))).sqrt() + epsilon)
    return direction, direction.abs()


def _power(b: ParameterState, beta: str) -> float:
    """A beta to the power of the number of this step; it begins in the precision of the states."""
    begun: float = b.group[beta]
    power: float = b.group.get(f"{beta}_pow_acc", begun if b.eps < _DOUBLE else _single(begun))
    return power


def _lr(b: ParameterState) -> float:
    return float(b.group["lr"])


def _single(number: float) -> float:
    """A number as single precision has it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _regularised(b: ParameterState) -> SummedTerm:
    """The gradient with the decay that is added to it beforehand, in the gradient's dtype."""
    decay = b.group["l2"] * b.weight + b.group["l1"] * b.weight.sign()
    size = b.gradient.abs() + decay.abs()
    if b.group["l2"] or b.group["l1"]:
        size = size * max(1.0, b.group["gradient_eps"] / b.eps)
    return SummedTerm(b.gradient + decay, size)


def _squared(b: ParameterState, term: SummedTerm) -> SummedTerm:
    return SummedTerm(term.value**2, 2 * term.value.abs() * term.size + ROUNDINGS * b.eps * term.size**2)


def _mean(old: Tensor, new: SummedTerm, beta: float) -> SummedTerm:
    """A mean that fades. 1 − beta is made in the precision of the weight, and loses digits where beta is near 1."""
    size = beta * old.abs() + (1 - beta) * new.size + (old.abs() + new.value.abs()) / ROUNDINGS
    return SummedTerm(beta * old + (1 - beta) * new.value, size)
