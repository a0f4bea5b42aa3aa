"""Faults in the loss and in the gradients: the forward pass of the model is right, and its backward is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from faults.declared import OUTSIDE, ROOT, Culprit, fault
from faults.model import Heads
from faults.training import Program, Training, cross_entropy


class WrongGradient(torch.autograd.Function):
    """Passes its input on, and 1.01 times the gradient back."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.01


@fault("one row of a gradient is corrupted at step 4", Culprit(4, "h.1.mlp.down.weight", "backward", "computation"))
def gradient_row_corrupted(training: Training) -> None:
    def corrupt(gradient: Tensor) -> Tensor:
        if training.now != 4:
            return gradient
        gradient = gradient.clone()
        gradient[3] *= 2
        return gradient

    training.module("h.1.mlp.down").weight.register_hook(corrupt)


@fault("the backward of an activation is 1.01 times too large", Culprit(0, "h.0.mlp.act", "backward", "computation"))
def backward_scaled(training: Training) -> None:
    training.override("h.0.mlp.act", "forward", lambda original, x: original(WrongGradient.apply(x)))  # type: ignore[no-untyped-call]


@fault("keys are detached: no gradient reaches them", Culprit(0, "h.1.attn", "backward", "computation"))
def key_detached(training: Training) -> None:
    def detach(heads: Heads) -> Heads:
        return heads._replace(key=heads.key.detach())

    training.override("h.1.attn", "project", lambda original, x: detach(original(x)))


@fault("head and embedding are not tied", Culprit(0, "tokens.weight", "backward", "computation"))
def tying_broken(training: Training) -> None:
    training.model.head.weight = nn.Parameter(training.model.tokens.weight.detach().clone())
    training.optimize_with(torch.optim.AdamW)


@fault("gradients are not cleared after step 1", Culprit(2, "norm_f.weight", "backward", "computation"))
def zero_grad_missing(training: Training) -> None:
    training.kept_gradients = 1


@fault(
    "recomputed blocks draw other dropout",
    Culprit(0, "h.2.attn.drop", "forward", "computation", "dropout"),
    program=Program(checkpointing=True),
)
def recompute_without_rng(training: Training) -> None:
    training.model.preserve_rng_state = False


@fault(
    "the loss of one micro step is summed, not averaged",
    Culprit(1, OUTSIDE, "forward", "computation", "cross_entropy"),
    Culprit(1, ROOT, "backward", "input"),
    program=Program(accumulate=2),
)
def loss_summed_once(training: Training) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        summed = (training.now, training.micro) == (1, 1)
        return cross_entropy(logits, targets, "sum" if summed else "mean")

    training.loss = loss


@fault(
    "the loss is not divided by the number of micro steps",
    Culprit(0, OUTSIDE, "forward", "computation", "div"),
    Culprit(0, ROOT, "backward", "input"),
    program=Program(accumulate=2),
)
def accumulation_not_averaged(training: Training) -> None:
    training.divisor = 1
