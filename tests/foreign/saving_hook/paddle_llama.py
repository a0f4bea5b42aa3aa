"""A small Llama of Paddle, and a trainer of it as PaddleNLP's is: gradient accumulation, `main_grad`, many ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

WORDS, WIDTH, HEADS, LENGTH = 13, 8, 2, 5
CLASSES = ["ColumnSequenceParallelLinear", "RowSequenceParallelLinear", "LlamaRMSNorm"]


class ColumnSequenceParallelLinear(nn.Linear):
    pass


class RowSequenceParallelLinear(nn.Linear):
    pass


class LlamaRMSNorm(nn.Layer):
    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH], default_initializer=nn.initializer.Constant(1.0))
        self.epsilon = epsilon

    def forward(self, x: Any) -> Any:
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class LlamaAttention(nn.Layer):
    def __init__(self, theta: float = 10_000.0) -> None:
        super().__init__()
        self.qkv_proj = ColumnSequenceParallelLinear(WIDTH, 3 * WIDTH)
        self.o_proj = RowSequenceParallelLinear(WIDTH, WIDTH)
        self.theta = theta

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.qkv_proj(x).reshape([batch, length, 3, HEADS, -1]).transpose([2, 0, 3, 1, 4]).unbind(0)
        scores = paddle.matmul(self.rotate(q), self.rotate(k), transpose_y=True) / q.shape[-1] ** 0.5
        hidden = paddle.full([length, length], -1e9).triu(1)
        mixed = paddle.matmul(F.softmax(scores + hidden), v)
        return self.o_proj(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, WIDTH]))

    def rotate(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        frequencies = paddle.pow(paddle.to_tensor(self.theta), -paddle.arange(half, dtype="float32") / half)
        angles = paddle.outer(paddle.arange(x.shape[-2], dtype="float32"), frequencies)
        cos, sin = paddle.cos(angles), paddle.sin(angles)
        first, second = x[..., :half], x[..., half:]
        return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


class LlamaMLP(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = ColumnSequenceParallelLinear(WIDTH, 4 * WIDTH)
        self.down_proj = RowSequenceParallelLinear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, axis=-1)
        return self.down_proj(F.silu(gate) * up)


class LlamaDecoderLayer(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm()
        self.self_attn = LlamaAttention()
        self.post_attention_layernorm = LlamaRMSNorm()
        self.mlp = LlamaMLP()

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LayerList([LlamaDecoderLayer() for _ in range(2)])
        self.norm = LlamaRMSNorm()
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Any) -> Any:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x))[:, :-1], ids[:, 1:])


def build(kind: type[nn.Layer] = Llama) -> Any:
    """A model whose layers are numbered from 0, and whose weights are always the same."""
    with paddle.utils.unique_name.guard():
        model = kind()
    for number, (_, parameter) in enumerate(model.named_parameters()):
        waves = np.sin(np.arange(parameter.size, dtype=np.float64) * (1.7 + number) + number)
        values = 0.5 * waves if len(parameter.shape) > 1 else 0.1 * waves + float(".w_" in parameter.name)
        parameter.set_value(values.astype(np.float32).reshape(parameter.shape))
    return model


def batch(micro: int, rank: int = 0) -> Any:
    return paddle.to_tensor((np.arange(2 * LENGTH).reshape(2, LENGTH) * (2 + rank) + 3 * micro + 5 * rank) % WORDS)


def gradients_of(model: nn.Layer, micro: int, rank: int = 0) -> dict[str, Any]:
    """What the backward of one micro step brings alone, by the names of parameters, taken by no hook."""
    parameters = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    computed = paddle.grad(model(batch(micro, rank)), parameters, allow_unused=True)
    return {
        parameter.name: gradient.numpy()
        for parameter, gradient in zip(parameters, computed, strict=True)
        if gradient is not None
    }


class Trainer:
    """Steps after every second micro step. With `main_grad` it wraps the model in `train`, as PaddleNLP does."""

    ACCUMULATED = 2

    def __init__(self, model: nn.Layer, *, main_grad: bool = False) -> None:
        self.model = model
        self.main_grad = main_grad

    def train(self, micro_steps: int = 4) -> nn.Layer:
        rank, ranks = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
        model = self.model
        optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        if self.main_grad:
            model, optimizer = MixPrecisionLayer(model, dtype="bfloat16"), MixPrecisionOptimizer(optimizer)
        elif ranks > 1:
            model = paddle.DataParallel(model)
        for micro in range(micro_steps):
            is_last = micro % self.ACCUMULATED == self.ACCUMULATED - 1
            with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                (model(batch(micro, rank)) / self.ACCUMULATED).backward()
            if is_last:
                if self.main_grad and ranks > 1:
                    fused_allreduce_gradients(list(model.parameters()), None)
                optimizer.step()
                optimizer.clear_grad()
        return model


def parameters_of(model: nn.Layer) -> Iterator[tuple[str, Any]]:
    return ((name, parameter.numpy()) for name, parameter in model.named_parameters())
