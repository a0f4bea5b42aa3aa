"""Faults in what the program is given: ids and targets."""

from __future__ import annotations

from faults.declared import LOSS, OUTSIDE, ROOT, Culprit, fault
from faults.training import Batch, Training


@fault("two batches change places at step 2", Culprit(2, ROOT, "forward", "input"))
def data_order(training: Training) -> None:
    training.data[2], training.data[3] = training.data[3], training.data[2]


@fault("one token of one batch is another at step 1", Culprit(1, ROOT, "forward", "input"))
def token_changed(training: Training) -> None:
    training.data[1][0].ids[2, 9] += 1


@fault(
    "each token is its own target, not the next one",
    Culprit(0, OUTSIDE, "forward", "input", "flatten"),
    Culprit(0, LOSS, "forward", "input"),
)
def labels_off_by_one(training: Training) -> None:
    training.data = [[Batch(batch.ids, batch.ids) for batch in step] for step in training.data]
