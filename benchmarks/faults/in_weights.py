"""Faults in what calls start from: parameters and buffers that are wrong before anything is computed with them."""

from __future__ import annotations

import torch

from faults.declared import ANYWHERE, Culprit, fault
from faults.model import HEADS, WIDTH, rotations
from faults.training import Training


@fault("one weight is scaled by 1.001 from step 3 on", Culprit(3, "h.1.mlp.down", "forward", "parameter"))
def weight_scaled(training: Training) -> None:
    training.at(3, "begin", lambda: training.module("h.1.mlp.down").weight.mul_(1.001))


@fault("a square weight is loaded transposed", Culprit(0, "h.1.attn.proj", "forward", "parameter"))
def weight_transposed(training: Training) -> None:
    weight = training.module("h.1.attn.proj").weight
    training.at(0, "begin", lambda: weight.copy_(weight.T.clone()))


@fault("queries and keys are loaded in each other's place", Culprit(0, "h.1.attn.q", "forward", "parameter"))
def query_and_key_weights_swapped(training: Training) -> None:
    attention = training.module("h.1.attn")
    attention.q, attention.k = attention.k, attention.q


@fault("the weights are loaded from a checkpoint in bfloat16", Culprit(0, ANYWHERE, "forward", "parameter"))
def weights_rounded(training: Training) -> None:
    def round_all() -> None:
        for parameter in training.model.parameters():
            parameter.copy_(parameter.bfloat16())

    training.at(0, "begin", round_all)


@fault("a linear layer has no bias", Culprit(0, "h.2.mlp.up", "forward", "parameter"))
def bias_dropped(training: Training) -> None:
    training.module("h.2.mlp.up").bias = None
    training.optimize_with(torch.optim.AdamW)


@fault("one row of the embedding is overwritten at step 3", Culprit(3, "tokens", "forward", "parameter"))
def embedding_row_corrupted(training: Training) -> None:
    row = int(training.data[3][0].ids[0, 0])
    training.at(3, "begin", lambda: training.module("tokens").weight[row].mul_(-1))


@fault("one element of a weight becomes NaN at step 3", Culprit(3, "h.0.mlp.up", "forward", "parameter"))
def nan_in_weight(training: Training) -> None:
    training.at(3, "begin", lambda: training.module("h.0.mlp.up").weight[5, 3].fill_(torch.nan))


@fault("the rotations of one layer are of another base", Culprit(0, "h.2.attn.rope", "forward", "parameter"))
def stale_buffer(training: Training) -> None:
    rope = training.module("h.2.attn.rope")
    rope.cos, rope.sin = rotations(WIDTH // HEADS, base=9_000.0)


@fault("a weight drawn with a slightly larger spread", Culprit(0, "h.2.attn.v", "forward", "parameter"))
def initialisation_changed(training: Training) -> None:
    training.at(0, "begin", lambda: training.module("h.2.attn.v").weight.mul_(1.05))
