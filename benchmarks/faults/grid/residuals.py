"""Changes what a block of a model adds to its result: its residual.

The code of the models is repeated here, with the change in it, because it stands in the middle of a `forward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from faults.grid.training import Training

Change = Callable[[Tensor], Tensor]


def change_residual(training: Training, layer: int, change: Change) -> None:
    """Let one layer add `change(x)` where it adds its input x."""
    site = training.layout.site("block", layer)
    if training.layout.residual == "skip":
        training.override(site, "skip", lambda original, x: change(original(x)))
    else:
        rewrite = REWRITTEN[training.layout.residual]
        block = training.module(site)
        parts = {name: training.module(training.layout.site(name, layer)) for name in ("norm_1", "norm", "attn", "mlp")
                 if name in training.layout.parts}  # fmt: skip
        training.override(site, "forward", rewrite(block, parts, change))


Parts = dict[str, nn.Module]


def _pre_norm(_block: Any, parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(original: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        given = inspect.signature(original).bind(*arguments, **named)
        named = {**given.arguments, **given.arguments.pop("kwargs", {})}
        named.pop("kwargs", None)
        x = named.pop("hidden_states")
        x = parts["attn"](parts["norm_1"](x), **named)[0] + change(x)
        return x + parts["mlp"](parts["norm"](x))

    return forward


def _post_norm(_block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    return lambda original, hidden, given: original(hidden, change(given))


def _t5(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor) -> Tensor:
        return change(x) + block.dropout(block.DenseReluDense(block.layer_norm(x)))

    return forward


def _convnext(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor) -> Tensor:
        y = block.layernorm(block.dwconv(x).permute(0, 2, 3, 1))
        y = block.layer_scale_parameter * block.pwconv2(block.act(block.pwconv1(y)))
        return change(x) + block.drop_path(y.permute(0, 3, 1, 2))

    return forward


def _mobilenet(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor) -> Tensor:
        assert block.use_residual
        return change(x) + block.reduce_1x1(block.conv_3x3(block.expand_1x1(x)))

    return forward


def _parallel(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor, **named: Any) -> Tensor:
        attended = block.post_attention_dropout(block.attention(block.input_layernorm(x), **named)[0])
        return block.post_mlp_dropout(block.mlp(block.post_attention_layernorm(x))) + attended + change(x)

    return forward


def _opt(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor, **named: Any) -> Tensor:
        named.pop("use_cache", None)
        x = change(x) + block.self_attn(hidden_states=block.self_attn_layer_norm(x), **named)[0]
        flat = x.reshape(-1, x.size(-1))
        return (flat + block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(flat))))).view(x.shape)

    return forward


def _sandwich(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor, **named: Any) -> Tensor:
        attended = block.self_attn(hidden_states=block.input_layernorm(x), **named)[0]
        x = change(x) + block.post_attention_layernorm(attended)
        return x + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))

    return forward


def _regnet(block: Any, _parts: Parts, change: Change) -> Callable[..., Tensor]:
    def forward(_: object, x: Tensor) -> Tensor:
        y = block.layer(x)
        y += change(block.shortcut(x))
        return block.activation(y)

    return forward


REWRITTEN = {
    "pre-norm": _pre_norm,
    "parallel": _parallel,
    "opt": _opt,
    "sandwich": _sandwich,
    "regnet": _regnet,
    "post-norm": _post_norm,
    "t5": _t5,
    "convnext": _convnext,
    "mobilenet": _mobilenet,
}
