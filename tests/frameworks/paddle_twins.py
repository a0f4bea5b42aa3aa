"""The Paddle side of the programs in `torch_twins`, as one would write them there. `scale` is a place for a fault."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn


class Attention(nn.Layer):
    """Causal attention over a few heads. scale: what its scores are multiplied by besides."""

    def __init__(self, width: int, heads: int, scale: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self._factor = [scale * (width // heads) ** -0.5]  # in a list, which no recording takes for a setting

    def split(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        return x.reshape([batch, length, self.heads, width // self.heads]).transpose([0, 2, 1, 3])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = paddle.matmul(q, k.transpose([0, 1, 3, 2])) * self._factor[0]
        scores = scores + paddle.triu(paddle.full([length, length], float("-inf")), 1)
        mixed = paddle.matmul(F.softmax(scores), v)
        return self.proj(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, width]))


class FusedAttention(Attention):
    """By one function of the framework, which has positions before heads."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        shape = [batch, length, self.heads, width // self.heads]
        q, k, v = self.q(x).reshape(shape), self.k(x).reshape(shape), self.v(x).reshape(shape)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nn.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(self.act(self.up(self.ln2(x))))


class Transformer(nn.Layer):
    def __init__(self, words: int = 13, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.h = nn.LayerList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        x = self.tokens(ids) + self.positions(paddle.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


class Mixer(nn.Layer):
    """A block with other names, in another order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.self_attention = Attention(width, heads)
        self.norm_before, self.norm_between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.self_attention(self.norm_before(x))
        return x + self.feed_forward(self.norm_between(x))


class Renamed(nn.Layer):
    """The transformer as someone else would have written it, inside of something."""

    def __init__(self, words: int = 13, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.decoder = nn.Layer()
        self.decoder.embed_tokens, self.decoder.embed_positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.decoder.layers = nn.LayerList([Mixer(width, heads) for _ in range(layers)])
        self.decoder.final_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        x = self.decoder.embed_tokens(ids) + self.decoder.embed_positions(paddle.arange(ids.shape[1]))
        for layer in self.decoder.layers:
            x = layer(x)
        return self.output(self.decoder.final_norm(x))


class ConvNet(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2D(3, 8, 3, padding=1), nn.BatchNorm2D(8)
        self.pool = nn.MaxPool2D(2)
        self.conv2, self.bn2 = nn.Conv2D(8, 12, 3, stride=2), nn.BatchNorm2D(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))
