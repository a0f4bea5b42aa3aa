"""Faults in what the program is given, and in its loss."""

from __future__ import annotations

from faults.declared import LOSS, OUTSIDE, ROOT, Culprit
from faults.grid.declared import kind
from faults.grid.models import VOCABULARY
from faults.grid.training import Training

TOKENS = ("llama", "gpt2", "bert", "qwen3", "mixtral", "t5", "neox", "opt", "gemma", "qwen3-moe")
IMAGES = ("resnet", "convnext", "mobilenet", "vit", "regnet")
ARRIVES = (Culprit(0, ROOT, "backward", "input"),)
"""How modules show a wrong loss: by the gradient that arrives at the outermost."""
GIVEN = Culprit(0, LOSS, "forward", "input")
"""How they show wrong labels: as what the loss is given."""


@kind("one sequence is shifted by a token at step 1", site=ROOT, step=1, cause="input", models=TOKENS)
def tokens_shifted(training: Training, _: str) -> None:
    ids = training.data[1].inputs["input_ids"]
    ids[1] = ids[1].roll(1)


@kind("images × 1.02", site=ROOT, cause="input", models=IMAGES)
def images_off_by_2_percent(training: Training, _: str) -> None:
    for batch in training.data:
        batch.inputs["pixel_values"].mul_(1.02)


@kind("positions are counted from 1", site=ROOT, cause="input", features="learned positions")
def positions_off_by_one(training: Training, _: str) -> None:
    for batch in training.data:
        batch.inputs["position_ids"].add_(1)


@kind("two examples change places at step 1", site=ROOT, step=1, cause="input")
def examples_swapped(training: Training, _: str) -> None:
    for tensor in training.data[1].inputs.values():
        tensor[:2] = tensor[:2].flip(0).clone()
    targets = training.data[1].targets
    targets[:2] = targets[:2].flip(0).clone()


@kind(
    "labels are smoothed by 0.1", site=OUTSIDE, function="cross_entropy", shows=ARRIVES, setting="label_smoothing"
)  # fmt: skip
def label_smoothing(training: Training, _: str) -> None:
    training.label_smoothing = 0.1


@kind("the loss is half as large", site=OUTSIDE, function="div", shows=ARRIVES)
def loss_halved(training: Training, _: str) -> None:
    training.loss_divisor = 2.0


@kind("the targets of one example are shifted", site=OUTSIDE, cause="input", shows=ARRIVES, also=(GIVEN,))
def targets_shifted(training: Training, _: str) -> None:
    for batch in training.data:
        batch.targets.view(-1)[:8] = batch.targets.view(-1)[:8].roll(1)


@kind("one token of one sequence is another", site=ROOT, cause="input", models=TOKENS, half="unseen")
def token_changed(training: Training, _: str) -> None:
    ids = training.data[0].inputs["input_ids"]
    ids[2, 40] = (ids[2, 40] + 1) % VOCABULARY


@kind("the channels of images are in another order", site=ROOT, cause="input", models=IMAGES, half="unseen")
def channels_reversed(training: Training, _: str) -> None:
    for batch in training.data:
        batch.inputs["pixel_values"].copy_(batch.inputs["pixel_values"].flip(1).clone())


@kind("the loss leaves the first example out", site=OUTSIDE, cause="input", shows=ARRIVES, also=(GIVEN,), half="unseen")
def loss_without_an_example(training: Training, _: str) -> None:
    training.loss = lambda logits, targets: training.cross_entropy(logits[1:], targets[1:])
