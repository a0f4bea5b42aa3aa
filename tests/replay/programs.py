"""Healthy programs to replay, in two halves: thresholds were set beside the first, and tried on the second later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.results.run import Run


class Block(nn.Module):
    """Attention by hand and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        future = ~torch.tril(torch.ones(length, length, dtype=torch.bool))
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.shrink(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2, words: int = 100) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(words, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, a residual, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.pool(F.relu(x + self.norm2(self.conv(x)), inplace=True))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class RMSNorm(nn.Module):
    """As in Llama: computed in float32, whatever it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Llama(nn.Module):
    """One layer: rotary positions, scaled_dot_product_attention, SwiGLU, tied embeddings."""

    def __init__(self, width: int = 64, heads: int = 4, words: int = 100) -> None:
        super().__init__()
        self.tok = nn.Embedding(words, width)
        self.norm, self.norm2 = RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down, self.heads = nn.Linear(2 * width, width, bias=False), heads

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        angles = torch.outer(torch.arange(x.shape[-2]).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))
        cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return F.linear(x, self.tok.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.lstm = nn.Embedding(50, 32), nn.LSTM(32, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(96, 32, batch_first=True), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.tok(ids))
        return self.head(self.gru(x)[0])


class Upscaler(nn.Module):
    """Grouped and transposed convolutions, GroupNorm, activations of many kinds, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 16, 3, stride=2, padding=1, groups=2), nn.GroupNorm(4, 16)
        self.up, self.line = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.Conv1d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.mish(self.norm(self.conv(x)))
        x = F.leaky_relu(self.up(x), 0.1)
        x = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
        return torch.tanh(self.line(x.mean(-1)) * torch.sigmoid(x.amax(-1)[..., 1:-1]))


def ids(words: int = 100, batch: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, words, (batch, length))


def language_loss(model: nn.Module, words: int = 100) -> torch.Tensor:
    given, wanted = ids(words), ids(words)
    return F.cross_entropy(model(given).float().flatten(0, 1), wanted.flatten())


def image_loss(model: nn.Module) -> torch.Tensor:
    images = torch.randn(4, 3, 16, 16).to(next(model.parameters()).dtype)
    return F.cross_entropy(model(images).float(), torch.randint(0, 10, (4,)), label_smoothing=0.1)


def upscaler_loss(model: nn.Module) -> torch.Tensor:
    out = model(torch.randn(4, 4, 32, 32).to(next(model.parameters()).dtype))
    wanted = torch.rand_like(out)
    return F.smooth_l1_loss(out, wanted) + F.mse_loss(out, wanted) + F.binary_cross_entropy_with_logits(out, wanted)


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return language_loss(model)


def penalty(model: nn.Module) -> torch.Tensor:
    """In place, views, indices, reductions with cancelling sums, and a loss by hand."""
    weight = model.weight  # type: ignore[union-attr]
    x = torch.randn(64, weight.shape[1]).to(weight.dtype)
    y = F.linear(x, weight)
    y = y - y.mean(0, keepdim=True)
    z = y.clone()
    z[:, 0] = 0.5
    z[1:3] *= 2
    z.clamp_(-3, 3).add_(y, alpha=0.25)
    z = torch.where(z > 0, z, z.exp() - 1)
    logs = z.log_softmax(-1)
    picked = logs.gather(1, torch.randint(0, z.shape[1], (64, 1)))
    top = z.topk(3, dim=1).values.sum() + z.std(dim=0).norm() + torch.einsum("ij,kj->ik", z, z).logsumexp(0).mean()
    return (
        -picked.float().mean() + 1 / (1 + top.float().abs()) + z.var().float() + z.cumsum(0)[-1].float().square().mean()
    )


Program = tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor], torch.dtype]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

FIRST_HALF: dict[str, Program] = {
    "gpt bf16": (GPT, language_loss, BF16),
    "gpt f32": (GPT, language_loss, F32),
    "conv net f32": (ConvNet, image_loss, F32),
    "conv net bf16": (ConvNet, image_loss, BF16),
    "autocast": (GPT, under_autocast, F32),
}
SECOND_HALF: dict[str, Program] = {
    "llama bf16": (Llama, language_loss, BF16),
    "llama f16": (Llama, language_loss, F16),
    "llama f32": (Llama, language_loss, F32),
    "lstm f32": (Recurrent, lambda model: language_loss(model, 50), F32),
    "lstm bf16": (Recurrent, lambda model: language_loss(model, 50), BF16),
    "upscaler f32": (Upscaler, upscaler_loss, F32),
    "upscaler bf16": (Upscaler, upscaler_loss, BF16),
    "gpt f16": (GPT, language_loss, F16),
    "llama autocast": (Llama, under_autocast, F32),
    "by hand f32": (lambda: nn.Linear(48, 40), penalty, F32),
    "by hand bf16": (lambda: nn.Linear(48, 40), penalty, BF16),
}


def record(path: Path, program: Program, level: str = "function", fault: Any = None, seed: int = 0) -> Run:
    """One step of a program, recorded; with the mode `fault` around it, inside of what the recorder sees."""
    make, loss, dtype = program
    torch.manual_seed(seed)
    model = make().to(dtype)
    with astray.record(path, model, level=level, keep="stats,tensors") as recorder:
        if fault is None:
            loss(model).backward()
        else:
            with fault:
                loss(model).backward()
        recorder.step()
    return astray.open(path)
