"""Faults in gradients: the forward pass is right, and its backward is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faults.grid.attention import change_attention
from faults.grid.declared import kind
from faults.grid.residuals import change_residual
from faults.grid.training import Training


class ScaledGradient(torch.autograd.Function):
    """Passes its input on, and so many times the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def _of_weight(training: Training, site: str, change: Callable[[Tensor], Tensor]) -> None:
    training.module(site).weight.register_hook(change)


@kind("a residual is detached", "block", layer=3, phase="backward")
def residual_detached(training: Training, _: str) -> None:
    change_residual(training, 3, lambda x: x.detach())


@kind("the backward of one layer sends half the gradient", "act", "norm", layer=6, phase="backward")
def gradient_halved(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(ScaledGradient.apply(x, 0.5)))


@kind("the backward of one layer sends 1.05 times the gradient", "up", "conv", "v", layer=9, phase="backward")
def gradient_off_by_5_percent(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(ScaledGradient.apply(x, 1.05)))


@kind("the gradient of one weight is zero", "o", "conv", layer=8, phase="backward", suffix=".weight")
def weight_gradient_zero(training: Training, site: str) -> None:
    _of_weight(training, site, torch.zeros_like)


@kind("the gradient of one weight has the other sign", "up", "conv", "q", layer=5, phase="backward", suffix=".weight")
def weight_gradient_flipped(training: Training, site: str) -> None:
    _of_weight(training, site, torch.neg)


@kind("the gradient of one weight × 1.05", "down", "conv", "v", layer=2, phase="backward", suffix=".weight")
def weight_gradient_off_by_5_percent(training: Training, site: str) -> None:
    _of_weight(training, site, lambda gradient: gradient * 1.05)


@kind("one row of the gradient of a weight is doubled", "v", "conv", "up", layer=6, phase="backward", suffix=".weight")
def weight_gradient_row_doubled(training: Training, site: str) -> None:
    def double(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[3] *= 2
        return gradient

    _of_weight(training, site, double)


@kind("no gradient reaches the values of one attention", "attn", layer=4, phase="backward")
def values_detached(training: Training, site: str) -> None:
    change_attention(training, site, lambda given: given._replace(value=given.value.detach()))


class MaskedGradient(torch.autograd.Function):
    """Passes its input on, and the gradient times a mask back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


def _without(x: Tensor, dimension: int, places: slice) -> Tensor:
    """The tensor, of which some places of a dimension get no gradient."""
    shape = [-1 if one == dimension % x.dim() else 1 for one in range(x.dim())]
    mask = torch.ones(x.shape[dimension], device=x.device, dtype=x.dtype)
    mask[places] = 0
    return MaskedGradient.apply(x, mask.view(shape))  # type: ignore[no-any-return]


@kind("the backward of one layer leaves an example out", "down", "conv", "o", layer=8, phase="backward", half="unseen")
def example_without_gradient(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: _without(original(x), 0, slice(1)))


@kind(
    "the backward of one layer does not reach the last features it was given", "up", "conv", "v", layer=7,
    phase="backward", half="unseen",
)  # fmt: skip
def features_without_gradient(training: Training, site: str) -> None:
    def forward(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        features = 1 if isinstance(training.module(site), torch.nn.Conv2d) else -1
        return original(_without(x, features, slice(-4, None)))

    training.override(site, "forward", forward)


@kind("no gradient reaches the queries of one attention", "attn", layer=7, phase="backward", half="unseen")
def queries_detached(training: Training, site: str) -> None:
    change_attention(training, site, lambda given: given._replace(query=given.query.detach()))


@kind(
    "the last rows of the gradient of a weight are zero", "down", "conv", "o", layer=4, phase="backward",
    suffix=".weight", half="unseen",
)  # fmt: skip
def weight_gradient_rows_zero(training: Training, site: str) -> None:
    def cut(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[-4:] = 0
        return gradient

    _of_weight(training, site, cut)


@kind("the backward of a norm takes its statistics for constants", "norm", layer=9, phase="backward", half="unseen")
def norm_statistics_detached(training: Training, site: str) -> None:
    norm = training.module(site)

    def forward(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = original(x)
        batch = isinstance(norm, torch.nn.BatchNorm2d)
        dims = (0, 2, 3) if batch else (-1,)
        shape = (1, -1, 1, 1) if batch else (-1,)
        scale = x.detach().float().var(dims, keepdim=True).rsqrt().to(x.dtype) * norm.weight.view(shape)
        bias = norm.bias.view(shape) if getattr(norm, "bias", None) is not None else 0.0
        linear = x * scale + bias
        return y.detach() + (linear - linear.detach())

    training.override(site, "forward", forward)
