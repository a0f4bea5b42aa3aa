"""The programs that the recording benchmarks train: a GPT with AdamW, and a chain of tiny layers.

Imported by processes in different environments, so that every tool records the very same program. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, LENGTH, BATCH, VOCABULARY = 384, 6, 6, 256, 4, 512


class Training(NamedTuple):
    """A model, and what trains it by one step."""

    model: nn.Module
    step: Callable[[], None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def gpt() -> Training:
    """6 layers, d = 384, T = 256, B = 4, trained by AdamW on one batch."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Training(model, step)


def chain() -> Training:
    """400 layers of four numbers each, forward and backward: nothing but calls."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) if i % 2 else nn.LayerNorm(4) for i in range(400)))
    x = torch.randn(2, 4, requires_grad=True)
    return Training(model, lambda: model(x).sum().backward())
