"""A small transformer with what msprobe names in ways of its own, run under its debugger or astray's: `blocks.py WHOSE
FOLDER LEVEL TASK [LIST]`. LIST is msprobe's own list of the functions that it knows.

Operators from the left and from the right, in place and by name; functions written in Python with arguments by position
and by name; views, creators and initialisers; an optimizer's step and gradients that are clipped inside of the dump.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS = 8, 2, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = math.sqrt(WIDTH // HEADS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).split(WIDTH, dim=-1)
        query, key, value = (self.heads(one) for one in (query, key, value))
        scores = query @ key.transpose(-2, -1) / self.scale
        scores = scores.masked_fill(mask == 0, -1e9)
        weights = F.dropout(F.softmax(scores, dim=-1), 0.0, self.training)
        mixed = torch.matmul(weights, value).transpose(1, 2)
        return self.out(mixed.reshape(x.shape))  # type: ignore[no-any-return]

    def heads(self, one: torch.Tensor) -> torch.Tensor:
        return one.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.attention(self.norm_1(x), mask)
        inner = F.gelu(self.up(self.norm_2(x)))
        gate = torch.sigmoid(inner)
        inner = inner * (1 - gate)
        inner += 1e-3
        inner.mul_(0.99)
        return x.add(self.drop(self.down(inner)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.zeros(6, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.act = nn.ReLU()
        self.head = nn.Linear(WIDTH, TOKENS)
        nn.init.normal_(self.place, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.tril(torch.full((6, 6), 1.0))
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.act(self.norm(x)))  # type: ignore[no-any-return]


def run(debugger: Any, level: str, steps: int = 2) -> None:
    """Trains for some steps, with everything of them inside of the dump."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    ids = torch.randint(TOKENS, (3, 7))
    for _ in range(steps):
        debugger.start(model if level != "L1" else None)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
        penalty = sum(weight.pow(2).sum() for weight in model.head.parameters())
        total = loss + 0.01 * penalty
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        debugger.stop()
        optimizer.zero_grad()
        debugger.step()


def main(whose: str, folder: str, level: str, task: str, listed: str | None = None) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    settings = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"rank": [], "step": [], "dump_path": str(path / "dump"), "task": task, "level": level, task: settings}
    config["risk_level"] = "ALL"  # else msprobe leaves out what it takes for harmless, such as views
    (path / "config.json").write_text(json.dumps(config))
    debugger: Any
    if whose == "msprobe":
        sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "peers"))
        import stand_ins

        stand_ins.install()
        from msprobe.pytorch import PrecisionDebugger

        debugger = PrecisionDebugger(config_path=str(path / "config.json"))
    else:
        from astray.compat.msprobe import PrecisionDebugger as Ours

        debugger = Ours(str(path / "config.json"), support_wrap_ops=listed)
    run(debugger, level)


if __name__ == "__main__":
    main(*sys.argv[1:])
