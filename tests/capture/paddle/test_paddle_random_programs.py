"""Random Paddle programs, recorded from anywhere to anywhere, also to the middle of a backward pass: no bit changes."""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

import paddle.nn.functional as F  # noqa: E402
from paddle import nn  # noqa: E402

import astray  # noqa: E402
from astray.capture.paddle.native.core import _paddle  # noqa: E402

pytestmark = pytest.mark.paddle

LEVELS = "module", "module,function"
KEEPS = "stats", "stats,tensors"


class RandomLayer(nn.Layer):
    """Eight operations on anything that was made before."""

    def __init__(self, random: Random, width: int = 8) -> None:
        super().__init__()
        self.parts = nn.LayerList([nn.Linear(width, width) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.random = random
        self.chosen = [random.randrange(9) for _ in range(8)]

    def forward(self, x: Any) -> tuple[Any, Any]:
        made = [x]
        for number, which in enumerate(self.chosen):
            made.append(self.operation(which, number, made[-1], self.random.choice(made)))
        return made[-1], self.random.choice(made)

    def operation(self, which: int, number: int, last: Any, other: Any) -> Any:
        if which == 0:
            return self.parts[number % 4](last)
        if which == 1:
            return last + other
        if which == 2:
            return last * other
        if which == 3:
            return self.norm(last)
        if which == 4:
            return paddle.concat(paddle.split(last, 2, axis=-1)[::-1], -1)
        if which == 5:
            changed = last.clone()
            changed[:, 0] = 0.5
            return changed
        if which == 6:
            return F.relu(last - other)
        if which == 7:
            return paddle.stack([last, other]).mean(0)
        return F.tanh_(last * 1.0)


class Recordings:
    """Starts and stops recordings of a model where the random numbers say so; makes none without a folder."""

    def __init__(self, folder: Path | None, model: Any) -> None:
        self.folder = folder
        self.model = model
        self.current: Any = None
        self.made: list[Any] = []

    def start(self, number: int) -> None:
        if self.folder is not None and self.current is None:
            path = self.folder / str(len(self.made))
            self.current = astray.record(path, self.model, level=LEVELS[number % 2], keep=KEEPS[number // 2 % 2])
            self.made.append(self.current)

    def stop(self) -> None:
        if self.current is not None:
            self.current.stop()
        self.current = None

    def step(self) -> None:
        if self.current is not None:
            self.current.step()


def run(seed: int, folder: Path | None) -> list[bytes]:
    """All losses and weights of a program. Its random choices are the same with and without recordings."""
    paddle.seed(seed)
    model, choices = RandomLayer(Random(seed)), Random(seed + 1)
    recordings = Recordings(folder, model)
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    numbers, held = [], []
    for _ in range(12):
        chosen = choices.randrange(6)
        if chosen < 3:
            recordings.start(chosen)
        x = paddle.randn([3, 8])
        x.stop_gradient = choices.random() < 0.5
        first, second = model(x)
        loss = first.square().mean() + second.mean()
        how = choices.randrange(5)
        if how == 0:  # twice through one graph
            loss.backward(retain_graph=True)
            loss.backward()
        elif how == 1:  # much later, or never
            held.append(loss)
        elif how == 2:  # the recording ends in the middle of it
            hook = model.parts[0].weight.register_hook(lambda _: recordings.stop())
            loss.backward()
            hook.remove()
        else:
            loss.backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=choices.random() < 0.5)
        recordings.step()
        numbers.append(loss.numpy().tobytes())
        if chosen == 5:
            recordings.stop()
        if len(held) > 2:
            held.pop(0).backward()
    recordings.stop()
    return [*numbers, *(parameter.numpy().tobytes() for parameter in model.parameters())]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_no_bit_changes_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    plain = run(seed, None)
    assert run(seed, tmp_path) == plain
    gc.collect()
    assert _paddle.living() == 0
