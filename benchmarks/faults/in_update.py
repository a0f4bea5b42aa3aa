"""Faults between the gradients and the next step: the optimizer, its settings, its state, clipping and schedule.

A recording of modules alone sees them in the step after, as parameters that differ though their gradients agreed.
"""

from __future__ import annotations

import torch

from faults.declared import ANYWHERE, OPTIMIZER, OUTSIDE, Culprit, fault
from faults.training import Program, Training

AT_STEP_0 = Culprit(0, OPTIMIZER, "update", "computation")
IN_STEP_1 = Culprit(1, ANYWHERE, "forward", "parameter")


@fault("Adam, with decay in its gradients, for AdamW", AT_STEP_0, IN_STEP_1)
def adam_for_adamw(training: Training) -> None:
    training.optimize_with(torch.optim.Adam)


@fault("ε of AdamW is 1e-6, not 1e-8", AT_STEP_0, IN_STEP_1)
def adam_eps(training: Training) -> None:
    training.optimize_with(torch.optim.AdamW, eps=1e-6)


@fault(
    "β₁ and β₂ of AdamW are exchanged, which the first update does not show, but its moments do",
    AT_STEP_0,
    Culprit(2, ANYWHERE, "forward", "parameter", setting="betas"),
)
def betas_swapped(training: Training) -> None:
    training.optimize_with(torch.optim.AdamW, betas=(0.95, 0.9))


@fault("the learning rate warms up one step late", AT_STEP_0, IN_STEP_1)
def warmup_off_by_one(training: Training) -> None:
    training.warmed_at += 1


@fault(
    "norms and biases decay too",
    AT_STEP_0,
    Culprit(1, "h.0.norm_1", "forward", "parameter"),
)
def decay_on_norms(training: Training) -> None:
    training.optimizer.param_groups[1]["weight_decay"] = 0.1


@fault("gradients are not clipped", Culprit(0, OPTIMIZER, "update", "input"), IN_STEP_1)
def clipping_missing(training: Training) -> None:
    training.largest_norm = None


@fault(
    "the optimizer counts its steps anew from step 3 on",
    Culprit(3, OPTIMIZER, "update", "parameter"),
    Culprit(4, ANYWHERE, "forward", "parameter"),
)
def step_counter_reset(training: Training) -> None:
    def reset() -> None:
        for state in training.optimizer.state.values():
            state["step"].zero_()

    training.at(3, "begin", reset)


@fault(
    "the first moment of one weight is lost at step 3",
    Culprit(3, "h.1.attn.v.weight", "update", "parameter"),
    Culprit(4, "h.1.attn.v", "forward", "parameter"),
)
def moment_lost(training: Training) -> None:
    weight = training.module("h.1.attn.v").weight
    training.at(3, "begin", lambda: training.optimizer.state[weight]["exp_avg"].zero_())


@fault(
    "one weight is not given to the optimizer",
    Culprit(0, "h.2.mlp.up.weight", "update", "computation"),
    Culprit(1, "h.2.mlp.up", "forward", "parameter"),
)
def weight_not_optimized(training: Training) -> None:
    frozen = training.module("h.2.mlp.up").weight
    group = training.optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter is not frozen]


@fault(
    "one gradient is scaled after the backward of step 2, as by a wrong sum over ranks",
    Culprit(2, OUTSIDE, "forward", "input"),
    Culprit(2, "h.1.mlp.up.weight", "update", "input"),
    Culprit(3, "h.1.mlp.up", "forward", "parameter"),
)
def gradient_scaled(training: Training) -> None:
    training.at(2, "gradients", lambda: training.module("h.1.mlp.up").weight.grad.mul_(2))


@fault(
    "the all-reduce of one gradient is skipped at step 2",
    Culprit(2, OUTSIDE, "forward", "computation", "all_reduce"),
    Culprit(2, "h.1.mlp.up.weight", "update", "input"),
    Culprit(3, "h.1.mlp.up", "forward", "parameter"),
    program=Program(ranks=2),
)
def all_reduce_skipped(training: Training) -> None:
    training.unreduced = (2, "h.1.mlp.up.weight")
