"""What recording costs a training step on the CPU: step time with astray over step time without.

A GPT of 6 layers (d = 384, T = 256, B = 4) with AdamW, one thread. Bare and recorded steps are taken in turns, a few at
a time, so that both see the same machine; the best of each counts. With `--tiny`, a chain of 400 small layers instead:
there a step is nothing but calls, which shows the cost of one.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.stats import set_threads

WIDTH, LAYERS, HEADS, LENGTH, BATCH, VOCABULARY = 384, 6, 6, 256, 4, 512
KEEPS = ("stats", "fingerprint", "sample", "tensors")


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


def gpt() -> tuple[nn.Module, Callable[[], None]]:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def chain() -> tuple[nn.Module, Callable[[], None]]:
    model = nn.Sequential(*(nn.Linear(4, 4) if i % 2 else nn.LayerNorm(4) for i in range(400)))
    x = torch.randn(2, 4, requires_grad=True)
    return model, lambda: model(x).sum().backward()


def seconds(step: Callable[[], None], after: Callable[[], None], steps: int) -> float:
    best = float("inf")
    for _ in range(steps):
        started = time.perf_counter()
        step()
        after()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a chain of small layers instead of a GPT")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_threads(1)
    torch.manual_seed(0)
    model, step = chain() if options.tiny else gpt()
    steps = 10 if options.tiny else 3
    seconds(step, lambda: None, steps)
    print("| keep | bare ms | recorded ms | ratio | tensors a step | MB a step | µs a tensor |")
    print("|---|---|---|---|---|---|---|")
    for keep in KEEPS:
        bare = recorded = float("inf")
        for _ in range(options.rounds):
            folder = Path(tempfile.mkdtemp())
            bare = min(bare, seconds(step, lambda: None, steps))
            with astray.record(folder / "run", model, keep=keep) as rec:
                recorded = min(recorded, seconds(step, rec.step, steps))
            end = astray.open(folder / "run").ranks[0].end
            shutil.rmtree(folder)
        assert end is not None
        tensors = end.tensors / end.steps
        print(
            f"| {keep} | {bare * 1e3:.1f} | {recorded * 1e3:.1f} | {recorded / bare:.2f} | {tensors:.0f} | "
            f"{end.value_bytes / end.steps / 1e6:.1f} | {(recorded - bare) / tensors * 1e6:.1f} |"
        )
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
