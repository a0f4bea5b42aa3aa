"""The GPT of train_gpt.py as a port might have it: other names, attention by hand, and a GELU that is approximated.

It starts from the same weights and sees the same batches, so that `astray compare` can tell what the port computes
otherwise. With `--exact-gelu` it computes what the original does; with `--dtype bfloat16` it does so in bfloat16.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from train_gpt import BATCH, CONTEXT, HEADS, LAYERS, TEXT, WIDTH


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.in_proj(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, -math.inf).softmax(dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class FeedForward(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU(approximate=approximate)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), SelfAttention()
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward(approximate)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, approximate):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(approximate) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--exact-gelu", action="store_true", help="GELU by erf, as the original has it")
    parser.add_argument("--dtype", default="float32", help="of weights and activations")
    options = parser.parse_args()

    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT])
    model = Decoder(len(letters), "none" if options.exact_gelu else "tanh").to(getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(options.steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        ids = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}   loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
