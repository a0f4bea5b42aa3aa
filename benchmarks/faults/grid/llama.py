"""A llama-like model in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY = 128, 4, 2, 320, 512


class Attention(nn.Module):
    """Each key head serves several query heads: query head i takes key head i // groups."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.implementation = implementation
        self.head_dim = WIDTH // HEADS
        self.scale = self.head_dim**-0.5
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in self.projections)
        query, key = self.rotate(query, rotation), self.rotate(key, rotation)
        y = self.attend(query, key, value, causal_mask(x), self.scale)
        return self.o(y.transpose(1, 2).flatten(2))

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rotation
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if self.implementation == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        weights = (query @ key.transpose(-2, -1) * scale + mask).softmax(-1, dtype=torch.float32)
        return weights.to(value.dtype) @ value


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.norm_1, self.attn = nn.RMSNorm(WIDTH, eps=1e-6), Attention(implementation)
        self.norm_2, self.mlp = nn.RMSNorm(WIDTH, eps=1e-6), MLP()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = self.skip(x) + self.attn(self.norm_1(x), rotation)
        return x + self.mlp(self.norm_2(x))

    def skip(self, x: Tensor) -> Tensor:
        """What of the layer's input is added to the result of its attention."""
        return x


class Llama(nn.Module):
    def __init__(self, layers: int, implementation: str = "eager") -> None:
        super().__init__()
        self.theta = 10_000.0
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(implementation) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # scores of about 1, so that attention attends to something
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        rotation = self.rotation(x)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))

    def rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angle of each position and pair of features."""
        pairs = torch.arange(0, WIDTH // HEADS, 2, device=x.device) / (WIDTH // HEADS)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.theta**-pairs)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def causal_mask(x: Tensor) -> Tensor:
    """What is added to the scores: minus infinity where the key comes after the query."""
    length = x.shape[-2]
    return torch.full((length, length), -torch.inf, device=x.device, dtype=x.dtype).triu(1)
