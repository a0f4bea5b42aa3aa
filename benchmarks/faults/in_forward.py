"""Faults in what is computed in the forward pass, inside modules, while what they are given is right."""

from __future__ import annotations

import torch
from torch import Tensor

from faults.declared import ROOT, Culprit, fault
from faults.model import WIDTH, Heads
from faults.training import EVALUATED, Training


@fault("GELU by tanh in one layer", Culprit(0, "h.1.mlp.act", "forward", "computation", "gelu"))
def gelu_by_tanh(training: Training) -> None:
    training.module("h.1.mlp.act").approximate = "tanh"


@fault("the causal mask shows the next token", Culprit(0, "h.0.attn", "forward", "computation", "tril"))
def mask_off_by_one(training: Training) -> None:
    training.module("h.0.attn").diagonal = 1


@fault("rotary positions interleaved, not in halves", Culprit(0, "h.0.attn.rope", "forward", "computation"))
def rope_layout(training: Training) -> None:
    training.module("h.0.attn.rope").interleaved = True


@fault("the input of a norm is cast to bfloat16 and back", Culprit(0, "h.1.norm_2", "forward", "computation"))
def norm_in_bfloat16(training: Training) -> None:
    training.override("h.1.norm_2", "forward", lambda original, x: original(x.bfloat16().float()))


@fault("ε of a layer norm is 1e-6, not 1e-5", Culprit(0, "h.1.norm_1", "forward", "computation", "layer_norm"))
def layer_norm_eps(training: Training) -> None:
    training.module("h.1.norm_1").eps = 1e-6


@fault("ε of an RMS norm is 1e-6, not 1e-5", Culprit(0, "h.0.norm_2", "forward", "computation", "rms_norm"))
def rms_norm_eps(training: Training) -> None:
    training.module("h.0.norm_2").eps = 1e-6


@fault("the residual of one block is scaled by 0.999", Culprit(0, "h.2", "forward", "computation", "mul"))
def residual_scale(training: Training) -> None:
    training.module("h.2").residual = 0.999


@fault("softmax over the queries", Culprit(0, "h.1.attn", "forward", "computation", "softmax"))
def softmax_over_wrong_dim(training: Training) -> None:
    training.module("h.1.attn").softmax_dim = -2


@fault("scores divided by √width of the model, not of a head", Culprit(0, "h.0.attn", "forward", "computation", "mul"))
def attention_scale(training: Training) -> None:
    training.module("h.0.attn").scale = WIDTH**-0.5


@fault("queries and keys exchanged in the code", Culprit(0, "h.1.attn", "forward", "computation"))
def query_and_key_swapped(training: Training) -> None:
    def exchange(heads: Heads) -> Heads:
        return Heads(heads.key, heads.query, heads.value)

    training.override("h.1.attn", "project", lambda original, x: exchange(original(x)))


@fault("attention scores in float16", Culprit(0, "h.1.attn", "forward", "computation"))
def attention_in_float16(training: Training) -> None:
    training.override("h.1.attn", "scores", lambda original, q, k: original(q.half(), k.half()).float())


@fault("the output of one head is zero", Culprit(0, "h.2.attn", "forward", "computation"))
def head_zeroed(training: Training) -> None:
    def zero(y: Tensor) -> Tensor:
        return torch.cat([y[:, :1] * 0, y[:, 1:]], 1)

    training.override("h.2.attn", "attend", lambda original, heads: zero(original(heads)))


@fault("positions are counted from 1", Culprit(0, ROOT, "forward", "computation", "arange"))
def positions_shifted(training: Training) -> None:
    training.model.first_position = 1


@fault("dropout stays on in evaluation", Culprit(EVALUATED, "drop", "forward", "computation", "dropout"))
def dropout_in_evaluation(training: Training) -> None:
    training.eval_mode = False


@fault("one layer drops 11 %, not 10 %", Culprit(0, "h.0.drop", "forward", "computation", "dropout"))
def dropout_rate(training: Training) -> None:
    training.module("h.0.drop").p = 0.11


@fault("a random number is drawn at step 3", Culprit(3, "drop", "forward", "computation", "dropout"))
def random_state_shifted(training: Training) -> None:
    training.at(3, "begin", lambda: torch.rand(1))


@fault("an activation becomes NaN at step 3", Culprit(3, "h.1.mlp.act", "forward", "computation"))
def nan_in_activation(training: Training) -> None:
    def spoil(y: Tensor) -> Tensor:
        return y.index_fill(-1, torch.tensor(7), torch.nan) if training.now == 3 else y

    training.override("h.1.mlp.act", "forward", lambda original, x: spoil(original(x)))


@fault("one element of an output is off by 2 % at step 2", Culprit(2, "h.2.mlp.down", "forward", "computation"))
def element_corrupted(training: Training) -> None:
    """As a chip does that computes wrongly now and then."""

    def corrupt(y: Tensor) -> Tensor:
        factor = torch.ones_like(y)
        if training.now == 2:
            factor[1, 2, 3] = 1.02
        return y * factor

    training.override("h.2.mlp.down", "forward", lambda original, x: corrupt(original(x)))


@fault("a linear layer multiplies in bfloat16", Culprit(0, "h.0.attn.v", "forward", "computation"))
def linear_in_bfloat16(training: Training) -> None:
    def multiply(layer: torch.nn.Linear, x: Tensor) -> Tensor:
        assert layer.bias is not None
        return (x.bfloat16() @ layer.weight.T.bfloat16()).float() + layer.bias

    training.override("h.0.attn.v", "forward", lambda _, x: multiply(training.module("h.0.attn.v"), x))
