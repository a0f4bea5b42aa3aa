"""Faults in what is computed in the forward pass, while what the calls are given is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.declared import ROOT
from faults.grid.attention import Attending, change_attention, heads_repeated, later_key_visible
from faults.grid.declared import kind
from faults.grid.models import BATCH
from faults.grid.residuals import change_residual
from faults.grid.training import Training

OTHER_ACTIVATION: dict[str, type[nn.Module]] = {"SiLU": nn.GELU, "GELU": nn.SiLU, "ReLU6": nn.SiLU, "ReLU": nn.SiLU}
GELU_MODELS = ("gpt2", "bert", "convnext", "vit", "t5", "neox", "gemma")


def _replace(training: Training, site: str, module: nn.Module) -> None:
    training.model.set_submodule(site, module)


def _is(module: nn.Module, name: str) -> bool:
    return name.lower() in type(module).__name__.lower()


# -- activations -----------------------------------------------------------------------------------------------------


@kind("another activation in one layer: GELU for SiLU, SiLU for the others", "act", layer=6)
def activation_other(training: Training, site: str) -> None:
    present = training.module(site)
    _replace(training, site, next(other() for name, other in OTHER_ACTIVATION.items() if _is(present, name)))


@kind("another activation in all layers", "act")
def activation_other_everywhere(training: Training, site: str) -> None:
    activation_other(training, site)


@kind("GELU by tanh for the exact one in one layer, or the other way round", "act", layer=3, models=GELU_MODELS)
def gelu_by_tanh(training: Training, site: str) -> None:
    exact = type(training.module(site)).__name__ == "GELUActivation"
    _replace(training, site, nn.GELU(approximate="tanh" if exact else "none"))


@kind("ReLU for GELU or SiLU in one layer", "act", layer=9, models=("llama", "qwen3", *GELU_MODELS))
def activation_relu(training: Training, site: str) -> None:
    _replace(training, site, nn.ReLU())


# -- attention -------------------------------------------------------------------------------------------------------


@kind("key heads repeated as a whole, not one by one, in one layer", "attn", layer=7, features="grouped")
def key_heads_repeated_wrongly(training: Training, site: str) -> None:
    change_attention(training, site, heads_repeated)


@kind("the causal mask shows the next token in one layer", "attn", layer=4, features="causal")
def mask_off_by_one(training: Training, site: str) -> None:
    change_attention(training, site, later_key_visible)


@kind("rotary positions left out in one layer", "attn", layer=10, features="rotary")
def rotary_left_out(training: Training, site: str) -> None:
    if training.declared.plain_torch:
        training.override(site, "rotate", lambda _, x, _rotation: x)
        return

    def forward(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        cos, sin = named.pop("position_embeddings")
        return original(*arguments, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **named)

    training.override(site, "forward", forward)


@kind("another base of the rotary positions", site=ROOT, models=("llama",), setting="theta")
def rotary_base(training: Training, _: str) -> None:
    training.model.theta = 8_000.0  # type: ignore[assignment]


@kind(
    "another base of the rotary positions", site="model.rotary_emb", cause="parameter",
    models=("qwen3", "mixtral", "qwen3-moe"),
)  # fmt: skip
def rotary_base_in_buffer(training: Training, site: str) -> None:
    training.module(site).inv_freq.pow_(math.log(8_000.0) / math.log(10_000.0))


@kind("scores divided by the width of a head, not its root, in one layer", "attn", layer=2)
def attention_scale(training: Training, site: str) -> None:
    def change(given: Attending) -> Attending:
        return given._replace(scale=1.0 / given.query.shape[-1])

    change_attention(training, site, change)


@kind("the softmax of one layer in bfloat16", "attn", layer=5, coarse=False)
def scores_in_bfloat16(training: Training, site: str) -> None:
    def change(given: Attending) -> Attending:
        return given._replace(query=given.query.bfloat16().float(), key=given.key.bfloat16().float())

    change_attention(training, site, change)


@kind("the values of one head are zero in one layer", "attn", layer=9)
def head_zeroed(training: Training, site: str) -> None:
    def change(given: Attending) -> Attending:
        return given._replace(value=torch.cat([given.value[:, :1] * 0, given.value[:, 1:]], 1))

    change_attention(training, site, change)


@kind("the bias for relative positions left out in one layer", "attn", layer=6, features="relative positions")
def position_bias_left_out(training: Training, site: str) -> None:
    def forward(original: Callable[..., Any], *arguments: Any, position_bias: Tensor, **named: Any) -> Any:
        result = original(*arguments, position_bias=torch.zeros_like(position_bias), **named)
        return result[0], position_bias, result[2]

    training.override(site, "forward", forward)


@kind("the cross attention of one layer is given the states of the token before", "cross", layer=5)
def cross_states_shifted(training: Training, site: str) -> None:
    def forward(original: Callable[..., Any], *arguments: Any, key_value_states: Tensor, **named: Any) -> Any:
        return original(*arguments, key_value_states=key_value_states.roll(1, 1), **named)

    training.override(site, "forward", forward)


@kind("scores × 1.03 in one layer", "attn", layer=6, half="unseen")
def attention_scale_slightly(training: Training, site: str) -> None:
    change_attention(training, site, lambda given: given._replace(scale=given.scale * 1.03))


@kind("the first two heads of the values change places in one layer", "attn", layer=3, half="unseen")
def value_heads_swapped(training: Training, site: str) -> None:
    def change(given: Attending) -> Attending:
        first, second, *others = given.value.split(1, 1)
        return given._replace(value=torch.cat([second, first, *others], 1))

    change_attention(training, site, change)


@kind("each query of one layer sees the key of the token before", "attn", layer=8, half="unseen")
def keys_shifted(training: Training, site: str) -> None:
    change_attention(training, site, lambda given: given._replace(key=given.key.roll(1, -2)))


@kind("rotary positions turn the other way in one layer", "attn", layer=5, features="rotary", half="unseen")
def rotary_backwards(training: Training, site: str) -> None:
    if training.declared.plain_torch:
        training.override(site, "rotate", lambda original, x, rotation: original(x, (rotation[0], -rotation[1])))
        return

    def forward(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        cos, sin = named.pop("position_embeddings")
        return original(*arguments, position_embeddings=(cos, -sin), **named)

    training.override(site, "forward", forward)


# -- residuals -------------------------------------------------------------------------------------------------------


@kind("a residual × 1.02", "block", layer=7)
def residual_off_by_2_percent(training: Training, _: str) -> None:
    change_residual(training, 7, lambda x: x * 1.02)


@kind("a residual left out", "block", layer=3)
def residual_left_out(training: Training, _: str) -> None:
    change_residual(training, 3, lambda x: x * 0)


@kind("a residual × 0.99", "block", layer=10, half="unseen")
def residual_off_by_1_percent(training: Training, _: str) -> None:
    change_residual(training, 10, lambda x: x * 0.99)


# -- norms -----------------------------------------------------------------------------------------------------------


def _epsilon(module: Any) -> str:
    return "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"


@kind("ε of one norm is 1e-3", "norm", layer=6, setting="eps")
def norm_epsilon(training: Training, site: str) -> None:
    norm = training.module(site)
    setattr(norm, _epsilon(norm), 1e-3 if getattr(norm, _epsilon(norm)) < 1e-3 else 1e-1)


@kind("ε of one norm is 1e-4", "norm", layer=11, setting="eps")
def norm_epsilon_slightly(training: Training, site: str) -> None:
    norm = training.module(site)
    setattr(norm, _epsilon(norm), 1e-4 if getattr(norm, _epsilon(norm)) < 1e-4 else 1e-2)


@kind("ε of all norms of one kind is 1e-3", "norm", setting="eps")
def norm_epsilon_everywhere(training: Training, site: str) -> None:
    norm_epsilon(training, site)


@kind("a norm does not use its weight", "norm", layer=8)
def norm_without_weight(training: Training, site: str) -> None:
    norm = training.module(site)

    def forward(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, torch.ones_like(norm.weight), norm.bias, norm.eps)
        shape = [-1, *([1] * (x.dim() - 2))] if isinstance(norm, nn.BatchNorm2d) else [-1]
        bias = norm.bias.view(shape) if getattr(norm, "bias", None) is not None else 0.0
        return (original(x) - bias) / norm.weight.view(shape) + bias

    training.override(site, "forward", forward)


@kind("a batch norm is in eval mode", "bn", layer=5, setting="training")
def batch_norm_in_eval_mode(training: Training, site: str) -> None:
    training.module(site).eval()


@kind("the momentum of a batch norm is twice as large", "bn", layer=4, step=1, cause="parameter", setting="momentum")
def batch_norm_momentum(training: Training, site: str) -> None:
    norm = training.module(site)
    norm.momentum = norm.momentum * 2 if norm.momentum < 0.5 else norm.momentum / 2


@kind("a norm is off in the statistics of every sixteenth feature", "norm", layer=7, half="unseen")
def norm_of_some_features(training: Training, site: str) -> None:
    """As a kernel does that reads past the end of a tile."""
    norm = training.module(site)

    def forward(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        features = 1 if isinstance(norm, nn.BatchNorm2d) else -1
        shown = x.movedim(features, -1)
        factor = torch.ones(shown.shape[-1], device=x.device, dtype=x.dtype)
        factor[::16] = 1.25
        return original((shown * factor).movedim(-1, features))

    training.override(site, "forward", forward)


# -- convolutions ----------------------------------------------------------------------------------------------------


@kind("a convolution pads by reflection", "conv", layer=3, setting="padding_mode")
def convolution_padding(training: Training, site: str) -> None:
    layer = training.module(site)
    training.model.set_submodule(site, _convolution_like(layer, padding_mode="reflect"))


@kind("a convolution is dilated", "conv", layer=1, setting="dilation")
def convolution_dilated(training: Training, site: str) -> None:
    layer = training.module(site)
    padding, dilation = tuple(2 * one for one in layer.padding), tuple(2 * one for one in layer.dilation)
    training.model.set_submodule(site, _convolution_like(layer, padding=padding, dilation=dilation))


def _convolution_like(layer: nn.Conv2d, **changed: Any) -> nn.Conv2d:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    settings = {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None} | changed
    made = nn.Conv2d(**settings)
    made.weight, made.bias = layer.weight, layer.bias
    return made


@kind("the result of a convolution is shifted by a pixel", "conv", layer=5, half="unseen")
def convolution_shifted(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(x).roll(1, -1))


# -- experts ---------------------------------------------------------------------------------------------------------


@kind("one layer asks one expert for each token, not two", "router", layer=7, setting="top_k")
def one_expert(training: Training, site: str) -> None:
    training.module(site).top_k = 1


@kind("the weights of the experts do not sum to 1 in one layer", "router", layer=5)
def router_not_normalised(training: Training, site: str) -> None:
    def forward(original: Callable[..., Any], x: Tensor) -> Any:
        logits, _, index = original(x)
        return logits, logits.float().softmax(-1).gather(-1, index), index

    training.override(site, "forward", forward)


# -- anywhere --------------------------------------------------------------------------------------------------------


@kind("the output of one layer × 1.01, in its code", "up", "conv", "v", layer=8)
def output_off_by_1_percent(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(x) * 1.01)


@kind("one element of an output × 16 at step 1, as a chip does that flips a bit", "down", "conv", "o", layer=4, step=1)
def element_corrupted(training: Training, site: str) -> None:
    def corrupt(y: Tensor) -> Tensor:
        factor = torch.ones(y.numel(), device=y.device, dtype=y.dtype)
        if training.now == 1:
            factor[y.detach().abs().argmax()] = 16.0
        return y * factor.view(y.shape)

    training.override(site, "forward", lambda original, x: corrupt(original(x)))


@kind("an activation becomes NaN at step 1", "act", layer=7, step=1)
def nan_in_activation(training: Training, site: str) -> None:
    def spoil(y: Tensor) -> Tensor:
        return y.index_fill(-1, torch.tensor(1, device=y.device), torch.nan) if training.now == 1 else y

    training.override(site, "forward", lambda original, x: spoil(original(x)))


@kind("dropout is on in one layer", "drop", layer=4, setting="p")
def dropout_on(training: Training, site: str) -> None:
    training.module(site).p = 0.1


@kind(
    "a norm overwrites a part of its input, which the block still needs", "norm", layer=5, culprit_part="block",
    models=("llama", "gpt2", "qwen3", "mixtral", "vit", "t5", "opt", "gemma", "qwen3-moe"),
)  # fmt: skip
def input_overwritten(training: Training, site: str) -> None:
    def forward(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = original(x)
        x.data[..., :4] = 0
        return y

    training.override(site, "forward", forward)


@kind("one layer multiplies in bfloat16", "v", "conv", "up", layer=3, coarse=False)
def product_in_bfloat16(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(x.bfloat16().float()))


@kind("the last features of an output are not written", "down", "conv", "o", layer=7, half="unseen")
def tile_not_written(training: Training, site: str) -> None:
    def cut(y: Tensor) -> Tensor:
        features = 1 if y.dim() == 4 and isinstance(training.module(site), nn.Conv2d) else -1
        written = torch.ones(y.shape[features], device=y.device, dtype=y.dtype)
        written[-4:] = 0
        return (y.movedim(features, -1) * written).movedim(-1, features)

    training.override(site, "forward", lambda original, x: cut(original(x)))


@kind("an output is cut off at three times its standard deviation", "up", "conv", "v", layer=5, half="unseen")
def output_clamped(training: Training, site: str) -> None:
    def clamp(y: Tensor) -> Tensor:
        largest = 3 * float(y.detach().float().std())
        return y.clamp(-largest, largest)

    training.override(site, "forward", lambda original, x: clamp(original(x)))


@kind("the second example gets the result of the first", "down", "conv", "o", layer=9, half="unseen")
def example_repeated(training: Training, site: str) -> None:
    def repeat(y: Tensor) -> Tensor:
        examples = y.unflatten(0, (BATCH, -1)) if y.dim() == 2 else y
        examples = torch.cat([examples[:1], examples[:1], examples[2:]])
        return examples.flatten(0, 1) if y.dim() == 2 else examples

    training.override(site, "forward", lambda original, x: repeat(original(x)))


@kind("a bias is added twice", "up", layer=8, models=("gpt2", "bert", "convnext", "vit", "neox", "opt"), half="unseen")
def bias_added_twice(training: Training, site: str) -> None:
    training.override(site, "forward", lambda original, x: original(x) + training.module(site).bias)


@kind("x·σ(1.702 x) for GELU in one layer", "act", layer=2, models=GELU_MODELS, half="unseen")
def gelu_by_sigmoid(training: Training, site: str) -> None:
    training.override(site, "forward", lambda _, x: x * torch.sigmoid(1.702 * x))


@kind("an activation is computed from inputs of 4 bits", "act", layer=10, half="unseen")
def activation_quantised(training: Training, site: str) -> None:
    def rounded(x: Tensor) -> Tensor:
        scale = x.detach().abs().amax() / 7
        return x + ((x / scale).round() * scale - x).detach()

    training.override(site, "forward", lambda original, x: original(rounded(x)))
