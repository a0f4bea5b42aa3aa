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
