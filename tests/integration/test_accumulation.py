"""Gradient accumulation against larger batches: real programs that cut the same data into more or fewer micro steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.cli import main as run_command
from astray.comparison.measure import measurements

BATCH, TIME, WORDS, WIDTH = 8, 6, 13, 16
Fault = Callable[[nn.Module, int, int], None]


class Block(nn.Module):
    """Attention and an MLP. The mask has no batch, the heads are a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        # Without a bias: that of the keys has no gradient but rounding, which Adam makes steps of.
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(TIME, TIME).tril() == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, 2, width // 2).transpose(1, 2) for part in self.heads(self.before(x)).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) * (width // 2) ** -0.5
        attention = scores.masked_fill(self.mask, -torch.inf).softmax(-1)
        x = x + self.out((attention @ value).transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Gpt(nn.Module):
    """Positions are looked up once for all samples, so that their gradient is a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


class TimeFirst(nn.Module):
    """The rows that its head is given are time · batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens).transpose(0, 1))
        return self.head(x.flatten(0, 1)).view(TIME, -1, WORDS).transpose(0, 1)


class Normed(nn.Module):
    """What comes out for one sample depends on all others of its micro step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2))


def no_fault(model: nn.Module, step: int, micro: int) -> None:
    """The program as it is."""


def train(
    path: Path,
    sizes: list[int],
    fault: Fault = no_fault,
    model: type[nn.Module] = Gpt,
    divide: bool = True,
    **settings: Any,
) -> Path:
    """Record three steps of training on micro steps of these sizes."""
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    steps = [torch.randint(0, WORDS, (2, BATCH, TIME), generator=data) for _ in range(3)]
    cut = [list(zip(tokens.split(sizes), wanted.split(sizes), strict=True)) for tokens, wanted in steps]
    weights = [size / BATCH if divide else 1.0 for size in sizes]
    with astray.record(path, network, **settings) as recording:
        for step, parts in enumerate(cut):
            for micro, (tokens, wanted) in enumerate(parts):
                fault(network, step, micro)
                loss = F.cross_entropy(network(tokens).flatten(0, 1), wanted.flatten())
                (loss * weights[micro]).backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()
    return path


CUTS = {"1x8": [8], "2x4": [4, 4], "4x2": [2] * 4, "uneven": [3, 3, 2]}
KEEPS = [
    {"keep": "stats"},
    pytest.param({"keep": "tensors"}, marks=pytest.mark.slow),
    pytest.param({"keep": "tensors", "level": "function"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", KEEPS, ids=lambda settings: "-".join(settings.values()))
def test_however_a_batch_is_cut_the_runs_agree(tmp_path, settings):
    runs = {name: train(tmp_path / name, sizes, **settings) for name, sizes in CUTS.items()}
    for reference in runs:
        for candidate in runs:
            diff = astray.compare(runs[reference], runs[candidate], micro="joined")
            assert diff.first is None, f"{reference} against {candidate}: {diff.first}"
            assert diff.same
            alone = {label: count for label, count in diff.counts.items() if count and label.startswith("only")}
            assert not alone
            undecided = {
                diff.pairs["path"][row] for row, verdict in enumerate(diff.pairs["verdict"]) if verdict == "unknown"
            }
            # The gradient of the positions is a sum over micro steps, which statistics do not tell.
            expected = {"out"} if settings == {"keep": "stats"} and reference != candidate else set()
            assert undecided == expected, f"{reference} against {candidate}"


def eps(model: nn.Module, step: int, micro: int) -> None:
    model.h[1].after.eps = 1e-2 if (step, micro) == (1, 1) else 1e-5


def mask(model: nn.Module, step: int, micro: int) -> None:
    model.h[0].mask[0, 1] = (step, micro) != (1, 1)  # the first word sees the second


def scaled(model: nn.Module, step: int, micro: int) -> None:
    if step == 1 and micro in (1, 2):
        with torch.no_grad():
            model.h[1].wide.weight.mul_(1.01 if micro == 1 else 1 / 1.01)


@pytest.mark.parametrize("settings", KEEPS, ids=lambda settings: "-".join(settings.values()))
@pytest.mark.parametrize(
    ("fault", "module", "function"),
    [
        (eps, ("h.1.after", "computation"), "h.1.after/layer_norm"),
        (mask, ("h.0", "computation"), "h.0/masked_fill"),
        (scaled, ("h.1.wide", "computation"), "h.1.wide/linear"),
    ],
    ids=["eps", "mask", "scaled"],
)
def test_a_fault_in_one_micro_step_is_named(tmp_path, settings, fault, module, function):
    good = train(tmp_path / "good", CUTS["1x8"], **settings)
    bad = train(tmp_path / "bad", CUTS["4x2"], fault, **settings)
    for reference, candidate, side in ((good, bad, "candidate"), (bad, good, "reference")):
        first = astray.compare(reference, candidate, micro="joined").first
        assert (first.step, first.phase) == (1, "forward")
        if "level" in settings:
            assert first.site == function
        else:
            assert (first.site, first.cause) == module
        if fault is scaled and "level" not in settings and side == "candidate":
            assert any(text.startswith("Its parameter `weight` changes between micro steps") for text in first.evidence)
        if settings["keep"] == "tensors":
            assert f"Of the 4 micro steps of the {side} only micro 1 is off." in first.evidence


def test_a_loss_that_is_not_divided_is_a_factor(tmp_path):
    good, bad = train(tmp_path / "good", CUTS["1x8"]), train(tmp_path / "bad", CUTS["4x2"], divide=False)
    first = astray.compare(good, bad, micro="joined").first
    assert (first.step, first.phase, first.cause) == (0, "backward", "input")
    assert first.error == pytest.approx(3.0, rel=1e-4)
    assert first.evidence[1] == (
        "The candidate's is 4 times the reference's, by every statistic, and one run has 4 micro steps where the other "
        "has 1: is the loss divided by their number in one run only?"
    )


def test_a_batch_that_lies_inside_of_time(tmp_path, monkeypatch):
    good = train(tmp_path / "good", CUTS["1x8"], model=TimeFirst, keep="tensors")
    other = train(tmp_path / "other", CUTS["uneven"], model=TimeFirst, keep="tensors")
    diff = astray.compare(good, other, micro="joined")
    assert diff.first is None
    assert diff.same
    monkeypatch.setattr(measurements, "SHUFFLED", float("inf"))
    assert np.nanmax(astray.compare(good, other, micro="joined").pairs["error"]) > 0.1


def test_batch_statistics_really_differ(tmp_path):
    good = train(tmp_path / "good", CUTS["1x8"], model=Normed)
    bad = train(tmp_path / "bad", CUTS["4x2"], model=Normed)
    diff = astray.compare(good, bad, micro="joined")
    assert (diff.first.step, diff.first.site, diff.first.cause) == (0, "norm", "computation")
    changing = [
        (diff.pairs["path"][row], diff.pairs["verdict"][row])
        for row, reason in enumerate(diff.pairs["reason"])
        if "it changes between micro steps; what the first of them saw was compared" in (reason or "")
    ]
    counted = [verdict for path, verdict in changing if path == "num_batches_tracked"]
    assert counted == ["identical", "diverged", "diverged"]


def test_the_command_line(tmp_path, capsys):
    good, bad = train(tmp_path / "good", CUTS["1x8"]), train(tmp_path / "bad", CUTS["4x2"])
    assert run_command(["compare", str(good), str(bad)]) == 1
    assert "join them with --micro joined" in " ".join(capsys.readouterr().out.split())
    assert run_command(["compare", str(good), str(bad), "--micro", "joined"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "No divergence" in text
    assert "Micro steps were joined along the batch: the reference has 1 in a step, the candidate 4." in text
    assert run_command(["compare", str(good), str(bad), "--micro", "joined", "--csv", str(tmp_path / "csv")]) == 0
    assert ",float32,float32,8×6×16,8×6×16," in (tmp_path / "csv" / "pairs.csv").read_text(encoding="utf-8")
