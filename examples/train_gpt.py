"""Trains a small GPT on a toy text for a few steps. It knows nothing of astray; `astray run` records it as it is.

With `--fault` it does what a hurried port might: from step 3 on, one projection works with a weight that is 1.001 times
what it should be. The loss hardly shows it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

TEXT = "it was the best of times, it was the worst of times, it was the age of wisdom. " * 40
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 8, 64, 4, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.act(self.expand(x))
        return self.proj(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def loss_by_hand(logits, targets):
    probabilities = logits.softmax(dim=-1)
    picked = probabilities.gather(-1, targets[..., None])
    return -torch.log(picked).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--fault", action="store_true", help="scale one weight by 1.001 at step 3")
    parser.add_argument("--by-hand", action="store_true", help="compute the loss as in a textbook, not as F does")
    options = parser.parse_args()

    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT])
    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        if options.fault and step == 3:
            with torch.no_grad():
                model.h[2].mlp.proj.weight.mul_(1.001)
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        ids = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        logits = model(ids[:, :-1])
        if options.by_hand:
            loss = loss_by_hand(logits, ids[:, 1:])
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}   loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
