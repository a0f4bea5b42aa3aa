"""Other ways to compute the same. They change roundings, and must give no alarm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.declared import control
from faults.model import Attention, Heads
from faults.planting import modules
from faults.training import Program, Training

WITHOUT_DROPOUT = Program(dropout=0.0)


@control("the same again")
def rerun(training: Training) -> None:
    pass


@control("two threads, not one")
def threads(training: Training) -> None:
    training.threads = 2


@control("each matrix product in two halves, which are added")
def blocking(training: Training) -> None:
    def in_halves(layer: nn.Linear, x: Tensor) -> Tensor:
        half = layer.in_features // 2
        y = F.linear(x[..., :half], layer.weight[:, :half]) + F.linear(x[..., half:], layer.weight[:, half:])
        return y if layer.bias is None else y + layer.bias

    for site in modules(training, nn.Linear):
        layer = training.module(site)
        training.override(site, "forward", lambda _, x, layer=layer: in_halves(layer, x))


@control("each linear layer computes one sequence after another")
def batch_split(training: Training) -> None:
    for site in modules(training, nn.Linear):
        training.override(site, "forward", lambda original, x: torch.cat([original(part) for part in x.split(1)]))


@control("the fused kernel for attention", program=WITHOUT_DROPOUT)
def fused_attention(training: Training) -> None:
    def attend(heads: Heads, attention: Attention) -> Tensor:
        query, key = attention.rope(heads.query), attention.rope(heads.key)
        return F.scaled_dot_product_attention(query, key, heads.value, is_causal=True)

    for site in modules(training, Attention):
        attention = training.module(site)
        training.override(site, "attend", lambda _, heads, attention=attention: attend(heads, attention))


@control("norms computed in float64")
def norms_in_float64(training: Training) -> None:
    def precise(norm: nn.Module, x: Tensor) -> Tensor:
        if isinstance(norm, nn.LayerNorm):
            weight, bias = norm.weight.double(), norm.bias.double()
            return F.layer_norm(x.double(), norm.normalized_shape, weight, bias, norm.eps).float()
        assert isinstance(norm, nn.RMSNorm)
        assert norm.weight is not None
        return F.rms_norm(x.double(), norm.normalized_shape, norm.weight.double(), norm.eps).float()

    for kind in (nn.LayerNorm, nn.RMSNorm):
        for site in modules(training, kind):
            norm = training.module(site)
            training.override(site, "forward", lambda _, x, norm=norm: precise(norm, x))


@control("AdamW over all parameters at once (foreach)")
def foreach_optimizer(training: Training) -> None:
    training.optimize_with(torch.optim.AdamW, foreach=True)


@control("AdamW in one kernel (fused)")
def fused_optimizer(training: Training) -> None:
    training.optimize_with(torch.optim.AdamW, foreach=None, fused=True)


@control("activation checkpointing, with its random state")
def checkpointing(training: Training) -> None:
    training.model.checkpointing = True


@control("everything in float64", program=WITHOUT_DROPOUT)
def float64(training: Training) -> None:
    training.model.double()


@control("computed in bfloat16, by autocast", program=WITHOUT_DROPOUT)
def bfloat16(training: Training) -> None:
    training.context = lambda: torch.autocast("cpu", torch.bfloat16)
