"""What recording costs a training step of Paddle on the CPU, beside the bare step, through the public API.

A GPT of 6 layers (d = 384, T = 128, B = 4) with AdamW, as a loop trains that prints its loss; and a chain of 200 small
layers, where a step is nothing but calls. Bare and recorded steps take turns in one process, so that both times come
from the same minutes. Run it with the Python of the environment that `make test-paddle` makes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from tables import installed, markdown, provenance

import astray

SETTINGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "functions too": {"level": "module,function"},
    "functions and updates": {"level": "module,function", "optimizer": "gradient,state,update,weight"},
    "fingerprints alone": {"keep": "fingerprint"},
    "values": {"keep": "stats,tensors"},
    "steps not selected": {"level": "module,function", "steps": "1000"},
}


class Block(nn.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = hidden.shape
        parts = paddle.split(self.qkv(self.ln1(hidden)), 3, axis=-1)
        shape = [batch, length, self.heads, width // self.heads]
        q, k, v = (part.reshape(shape).transpose([0, 2, 1, 3]) for part in parts)
        scores = q @ k.transpose([0, 1, 3, 2]) * (width // self.heads) ** -0.5
        scores = scores + paddle.triu(paddle.full([length, length], float("-inf")), 1)
        mixed = (F.softmax(scores) @ v).transpose([0, 2, 1, 3]).reshape([batch, length, width])
        hidden = hidden + self.proj(mixed)
        return hidden + self.down(F.gelu(self.up(self.ln2(hidden))))


class Gpt(nn.Layer):
    def __init__(self, words: int = 1024, width: int = 384, layers: int = 6, length: int = 128) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.LayerList([Block(width, 6) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        hidden = self.wte(ids) + self.wpe(paddle.arange(ids.shape[1]))
        for block in self.h:
            hidden = block(hidden)
        return self.head(self.ln(hidden))


def gpt() -> tuple[nn.Layer, Callable[[], float]]:
    model = Gpt()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    ids = paddle.randint(0, 1024, [4, 128])

    def step() -> float:
        loss = F.cross_entropy(model(ids).reshape([-1, 1024]), ids.reshape([-1]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)

    return model, step


def chain() -> tuple[nn.Layer, Callable[[], float]]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(200)))
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    x = paddle.randn([4, 16])

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)

    return model, step


def timed(step: Callable[[], object], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        before = time.perf_counter()
        step()
        times.append(time.perf_counter() - before)
    return times


def measure(what: str, model: nn.Layer, step: Callable[[], float], rounds: int, steps: int) -> list[list[str]]:
    lines = []
    timed(step, 3)
    for name, settings in SETTINGS.items():
        bare, recorded, tensors = [], [], 0
        for _ in range(rounds):
            bare += timed(step, steps)
            scratch = Path(tempfile.mkdtemp())
            with astray.record(scratch / "run", model, **settings) as recorder:
                timed(lambda recorder=recorder: (step(), recorder.step()), 2)
                recorded += timed(lambda recorder=recorder: (step(), recorder.step()), steps)
            run = astray.open(scratch / "run")
            tensors = sum(len(rank.tensors) for rank in run.ranks.values()) / max(len(run.steps), 1)
            shutil.rmtree(scratch)
        ratios = min(recorded) / min(bare), median(recorded) / median(bare)
        lines.append(
            [what, name, f"**{ratios[0]:.2f}**", f"{ratios[1]:.2f}", f"{min(bare) * 1e3:.1f}",
             f"{min(recorded) * 1e3:.1f}", f"{tensors:,.0f}"]
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    paddle.seed(0)
    lines = measure("GPT", *gpt(), options.rounds, options.steps)
    lines += measure("200 layers", *chain(), options.rounds, options.steps)
    print(f"{provenance(installed('paddlepaddle', 'numpy'))}\n")
    heads = ["model", "recorded", "ratio", "of medians", "bare ms", "recorded ms", "tensors a step"]
    print(markdown(heads, lines, words=2))


if __name__ == "__main__":
    main()
