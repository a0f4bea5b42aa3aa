"""The GPT that the faults are planted in: small, but with the parts that people get wrong.

It has both kinds of positions (learned and rotary), both kinds of norms, an explicit causal mask, dropout and a tied
head. Choices that a fault changes are plain attributes, and each stage of the attention is a method, so that a fault
replaces the one thing it is about.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 64, 4, 3, 32, 96


class Heads(NamedTuple):
    """Queries, keys and values, each of batch × heads × length × width of a head."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position: i with i + half, or each with its neighbour."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.interleaved = False
        cos, sin = rotations(width, base=10_000.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)


def rotations(width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair of features."""
    angles = torch.outer(torch.arange(LENGTH), base ** -(torch.arange(0, width, 2) / width))
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.diagonal = 0  # of the causal mask: the last key that a query sees, counted from its own position
        self.softmax_dim = -1
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rope = Rotary(WIDTH // HEADS)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.project(x))
        return self.proj(y.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> Heads:
        return Heads(*(layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)))

    def attend(self, heads: Heads) -> Tensor:
        scores = self.scores(self.rope(heads.query), self.rope(heads.key))
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(self.diagonal)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(self.softmax_dim)
        return self.drop(weights) @ heads.value

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-2, -1) * self.scale


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.residual = 1.0
        self.norm_1, self.attn = nn.LayerNorm(WIDTH), Attention(dropout)
        self.norm_2, self.mlp = nn.RMSNorm(WIDTH, eps=1e-5), MLP()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.residual + self.drop(self.attn(self.norm_1(x)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, *, dropout: float, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.preserve_rng_state = True  # in checkpointing: draw the same dropout again
        self.first_position = 0
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.first_position, self.first_position + LENGTH)
        x = self.drop(self.tokens(ids) + self.positions(positions))
        for block in self.h:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)
            else:
                x = block(x)
        return self.head(self.norm_f(x))
