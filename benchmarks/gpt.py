"""The programs that the recording benchmarks train: a GPT with AdamW, and a chain of tiny layers.

Imported by processes in different environments, so that every tool records the very same program. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Size(NamedTuple):
    """How large a GPT is, and what it is trained on. `gpt2` adds positions, and shares one matrix for both ends."""

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    gpt2: bool = True


SIZES = {
    "small": Size(384, 6, 6, 256, 4, 512, gpt2=False),
    "medium": Size(1024, 24, 16, 1024, 8, 50304),
    "thin": Size(64, 24, 4, 16, 1, 512),
    "tiny": Size(32, 2, 2, 16, 2, 64),
}
"""`small` is for the CPU, `medium` is GPT-2's. `thin` makes as many calls as that and computes next to nothing."""


class Training(NamedTuple):
    """A model, what trains it by one step and gives the loss, and where."""

    model: nn.Module
    step: Callable[[], torch.Tensor]
    device: torch.device = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(size), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width) if size.gpt2 else None
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=not size.gpt2)
        if size.gpt2:
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def gpt(size: str = "small", device: str = "cpu", *, mixed: bool = False) -> Training:
    """A GPT trained by AdamW on one batch; `mixed` computes in bfloat16 by autocast. The same bits each time."""
    made, where = SIZES[size], torch.device(device)
    torch.manual_seed(0)
    with where:
        model = GPT(made)
        ids = torch.randint(made.vocabulary, (made.batch, made.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=where.type == "cuda" or None)

    def step() -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16, enabled=mixed):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step, where)


def chain() -> Training:
    """400 layers of four numbers each, forward and backward: nothing but calls."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) if i % 2 else nn.LayerNorm(4) for i in range(400)))
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return Training(model, step)
