"""Faults between the gradients and the next step: the optimizer, its settings, clipping, schedule."""

from __future__ import annotations

from faults.declared import ANYWHERE, Culprit
from faults.grid.declared import kind, updated
from faults.grid.training import Training


def _of_weight(step: int) -> dict[str, object]:
    """A fault in the update of one weight, which recorded modules show in the next step."""
    shows = (Culprit(step + 1, "", "forward", "parameter"),)
    return {"step": step, "phase": "update", "suffix": ".weight", "shows": shows}


@kind("the learning rate × 1.1", **updated(setting="lr"))
def learning_rate(training: Training, _: str) -> None:
    training.settings["lr"] *= 1.1


@kind("the learning rate is half as large in step 1", **updated(1, "lr"), steps=3)
def learning_rate_of_one_step(training: Training, _: str) -> None:
    training.schedule = lambda step: 0.5 if step == 1 else 1.0


@kind("weight decay is left out", **updated(setting="weight_decay"))
def weight_decay(training: Training, _: str) -> None:
    training.settings["weight_decay"] = 0.0


@kind("β₂ of AdamW is 0.999, not 0.95", **updated(setting="betas", shows=2), optimizer="AdamW", steps=3)
def betas(training: Training, _: str) -> None:
    training.settings["betas"] = (0.9, 0.999)


@kind("ε of AdamW is 1e-5, not 1e-8", **updated(setting="eps"), optimizer="AdamW")
def optimizer_epsilon(training: Training, _: str) -> None:
    training.settings["eps"] = 1e-5


@kind("the momentum of SGD is 0.8, not 0.9", **updated(1, "momentum"), optimizer="SGD", steps=3)
def momentum(training: Training, _: str) -> None:
    training.settings["momentum"] = 0.8


@kind("Adam, with decay in its gradients, for AdamW", **updated(), optimizer="AdamW")
def adam_for_adamw(training: Training, _: str) -> None:
    training.optimizer_class = "Adam"


@kind("SGD with Nesterov's momentum", **updated(setting="nesterov"), optimizer="SGD")
def nesterov(training: Training, _: str) -> None:
    training.settings["nesterov"] = True


@kind(
    "gradients are not clipped",
    **updated() | {"cause": "input"},
    also=(Culprit(2, ANYWHERE, "forward", "parameter"),),  # the first step of Adam is the same for any scale
    steps=3,
)
def clipping_left_out(training: Training, _: str) -> None:
    training.largest_norm = None


@kind("one weight is not given to the optimizer", "v", "conv", "up", layer=7, **_of_weight(0))
def weight_not_optimized(training: Training, site: str) -> None:
    training.not_optimized.add(f"{site}.weight")


@kind(
    "one row of one gradient × 4 before the update of step 1", "down", "conv", "o", layer=6,
    **_of_weight(1) | {"cause": "input"}, steps=3,
)  # fmt: skip
def gradient_row_scaled_before_update(training: Training, site: str) -> None:
    training.at(1, "update", lambda: training.module(site).weight.grad[3].mul_(4))


@kind("one gradient changes its sign before the update", "o", "conv", layer=5, **_of_weight(0) | {"cause": "input"})
def gradient_flipped_before_update(training: Training, site: str) -> None:
    training.at(0, "update", lambda: training.module(site).weight.grad.neg_())


@kind("the learning rate × 1.01", **updated(setting="lr"), half="unseen")
def learning_rate_slightly(training: Training, _: str) -> None:
    training.settings["lr"] *= 1.01


@kind(
    "one gradient is added up twice before the update", "v", "conv", "up", layer=3, half="unseen",
    **_of_weight(0) | {"cause": "input"}, also=(Culprit(2, "", "forward", "parameter"),), steps=3,
)  # fmt: skip
def gradient_doubled_before_update(training: Training, site: str) -> None:
    training.at(0, "update", lambda: training.module(site).weight.grad.mul_(2))
