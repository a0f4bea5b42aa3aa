"""What is suspected where no recorded call made a wrong value: the code between, a call of one run, a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = "look at the data, its order, the seed and the preprocessing"


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 20))


def generate(path: Path, *, wrong: bool, steps: bool) -> Path:
    """Words one after another; from the third on a wrong processor of logits chooses them."""
    model, words = language_model(), torch.tensor([[1, 2, 3]])
    with torch.no_grad(), astray.record(path, model) as recorder:
        for number in range(4):
            logits = model(words)[:, -1]
            if wrong and number == 1:
                logits = -logits
            words = torch.cat([words, logits.argmax(-1, keepdim=True)], 1)
            if steps:
                recorder.step()
    return path


def test_code_between_two_calls_is_suspected_and_not_the_data(tmp_path):
    right, wrong = (generate(tmp_path / str(fault), wrong=fault, steps=False) for fault in (False, True))
    first = astray.compare(right, wrong).first
    assert (first.site, first.micro, first.cause, first.sureness) == ("<root>", 2, "input", "certain")
    assert first.evidence[0] == (
        "The input `0` of this outermost call already differs, and no recorded call made it: look at the code between "
        "the call of <root> (Sequential) before it and this one, which was not recorded. What that call gave agrees "
        "(identical)."
    )


def test_where_each_word_is_a_step_it_may_be_either(tmp_path):
    right, wrong = (generate(tmp_path / str(fault), wrong=fault, steps=True) for fault in (False, True))
    first = astray.compare(right, wrong).first
    assert (first.site, first.step, first.cause) == ("<root>", 2, "input")
    assert f"{DATA}, or at the code between the call of <root> (Sequential) before it" in first.evidence[0]


def train(path: Path, change=lambda step, words: words, level: str = "module", model=language_model) -> Path:
    """Three steps of training; `change` may change what a step is given."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    with astray.record(path, net, level=level) as recorder:
        for step in range(3):
            words = change(step, torch.randint(20, (4, 5)))
            F.cross_entropy(net(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return path


def test_other_data_in_training_is_called_data(tmp_path):
    other = train(tmp_path / "b", lambda step, words: (words + 1) % 20 if step == 1 else words)
    first = astray.compare(train(tmp_path / "a"), other).first
    assert (first.step, first.cause) == (1, "input")
    assert first.evidence[0].endswith(f"no call before it produced it: {DATA}.")


class _Gate(nn.Module):
    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.by_function = by_function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return self.down(F.silu(x) if self.by_function else self.act(x))


def gated(by_function: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), _Gate(by_function), nn.Linear(16, 20))


def test_a_call_that_only_one_run_has_is_named(tmp_path):
    right, wrong = (train(tmp_path / str(by), model=lambda by=by: gated(by)) for by in (False, True))
    first = astray.compare(right, wrong).first
    assert first.evidence[0] == (
        "The wrong value shows first as input `0` of 1.down (Linear). In the reference it comes from 1.act (GELU), "
        "which the candidate does not call: look at the code of 1 (_Gate)."
    )


def test_calls_that_each_run_has_alone_are_both_named(tmp_path):
    right, wrong = (train(tmp_path / str(by), model=lambda by=by: gated(by), level="function") for by in (False, True))
    first = astray.compare(right, wrong).first
    assert "It comes from 1.act/gelu (torch.nn.functional.gelu) in the reference and from 1/silu" in first.evidence[0]


def scaled() -> nn.Module:
    net = language_model()
    with torch.no_grad():
        net[1].weight.mul_(1.01)
    return net


def test_a_weight_is_called_a_weight_where_functions_alone_were_recorded(tmp_path):
    right, wrong = (
        train(tmp_path / name, model=model, level="function") for name, model in (("a", language_model), ("b", scaled))
    )
    diff = astray.compare(right, wrong)
    first = diff.first
    assert (first.site, first.cause, first.role) == ("1/linear", "parameter", "output")
    assert first.parameter.tensor == "parameter `1`"
    assert first.evidence[0] == (
        f"Its input agrees (identical), but its parameter `1` already differs on entry (diverged, "
        f"{first.parameter.error:.1e}), as the only parameter in this step. This is the first step: look at the "
        "initialisation or the loaded weights."
    )
    assert "of its parameter `1`" in first.explained
    assert first.explained in " ".join(str(diff).split())


def test_a_learning_rate_is_the_cause_where_functions_alone_were_recorded(tmp_path):
    runs = []
    for name, rate in (("a", 0.1), ("b", 0.2)):
        net = language_model()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        torch.manual_seed(1)
        with astray.record(tmp_path / name, net, level="function") as recorder:
            for _ in range(2):
                words = torch.randint(20, (4, 5))
                F.cross_entropy(net(words).flatten(0, 1), words.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        runs.append(tmp_path / name)
    first = astray.compare(*runs).first
    assert first.settings[0].name == "lr"
    assert first.evidence[0] == first.settings[0].sentence
