"""Faults in what calls start from: parameters that are wrong before anything is computed with them."""

from __future__ import annotations

import torch

from faults.grid.declared import kind
from faults.grid.training import Training

LINEAR = ("down", "conv", "o")


@kind("one weight × 1.005", *LINEAR, layer=5, cause="parameter")
def weight_off_by_half_a_percent(training: Training, site: str) -> None:
    training.module(site).weight.data.mul_(1.005)


@kind("one weight × 1.02", "v", "up", "conv", "o", layer=7, cause="parameter")
def weight_off_by_2_percent(training: Training, site: str) -> None:
    training.module(site).weight.data.mul_(1.02)


@kind("one weight × 1.05", "o", "up", "conv", layer=2, cause="parameter")
def weight_off_by_5_percent(training: Training, site: str) -> None:
    training.module(site).weight.data.mul_(1.05)


@kind("one row of a weight is zero", "up", "conv", "q", layer=6, cause="parameter")
def weight_row_zeroed(training: Training, site: str) -> None:
    training.module(site).weight.data[3] = 0


@kind(
    "a linear layer has no bias", "up", layer=4, cause="parameter",
    models=("gpt2", "bert", "convnext", "vit", "neox", "opt"),
)  # fmt: skip
def bias_dropped(training: Training, site: str) -> None:
    if training.declared.name == "gpt2":  # its layer cannot do without
        training.module(site).bias.data.zero_()
    else:
        training.module(site).bias = None


@kind("a square weight is loaded transposed", "o", layer=9, cause="parameter")
def weight_transposed(training: Training, site: str) -> None:
    weight = training.module(site).weight
    weight.data = weight.data.T.clone()


@kind(
    "queries and keys are loaded in each other's place", "q", layer=6, cause="parameter",
    models=("bert", "t5", "vit", "opt"),
)  # fmt: skip
def query_and_key_weights_swapped(training: Training, site: str) -> None:
    layout = training.layout
    query, key = training.module(site), training.module(layout.site("k", 6))
    query.weight.data, key.weight.data = key.weight.data, query.weight.data


@kind("the weight of a norm was not loaded", "norm", layer=4, cause="parameter")
def norm_weight_not_loaded(training: Training, site: str) -> None:
    training.module(site).weight.data.fill_(1.0)


@kind("one row of a weight changes its sign at step 1", "down", "conv", "v", layer=3, step=1, cause="parameter")
def weight_row_flipped(training: Training, site: str) -> None:
    training.at(1, "begin", lambda: training.module(site).weight[5].mul_(-1))


@kind("an element of a weight becomes NaN at step 1", "o", "conv", layer=8, step=1, cause="parameter")
def nan_in_weight(training: Training, site: str) -> None:
    training.at(1, "begin", lambda: training.module(site).weight[5, 0].fill_(torch.nan))


@kind("the weights of one expert × 1.05", "experts", layer=4, cause="parameter")
def expert_off_by_5_percent(training: Training, site: str) -> None:
    training.module(site).down_proj.data[1].mul_(1.05)


@kind("a weight is rounded to bfloat16", "up", "conv", "v", layer=5, cause="parameter", coarse=False)
def weight_rounded(training: Training, site: str) -> None:
    weight = training.module(site).weight
    weight.data = weight.data.bfloat16().float()


@kind("two rows of a weight change places", "up", "conv", "q", layer=4, cause="parameter", half="unseen")
def weight_rows_swapped(training: Training, site: str) -> None:
    weight = training.module(site).weight.data
    weight[[2, 7]] = weight[[7, 2]]


@kind("a weight is loaded into the next layer, too", "down", "o", layer=7, cause="parameter", half="unseen")
def weight_of_another_layer(training: Training, site: str) -> None:
    other = training.layout.site("down" if "down" in training.layout.parts else "o", 6)
    training.module(site).weight.data = training.module(other).weight.data.clone()


@kind("the update of one weight is applied twice", "v", "conv", "up", layer=5, step=1, cause="parameter", half="unseen")
def update_applied_twice(training: Training, site: str) -> None:
    before: list[torch.Tensor] = []
    training.at(0, "update", lambda: before.append(training.module(site).weight.clone()))
    training.at(1, "begin", lambda: training.module(site).weight.mul_(2).sub_(before[0]))
