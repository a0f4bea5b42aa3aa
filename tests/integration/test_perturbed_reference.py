"""A reference, the same with perturbed inputs, and candidates: roundings are not a fault, and a fault is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from integration.programs import PROGRAMS
from integration.programs.recorded import record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Bench:
    """Trains the small GPT of the planted faults, and records it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.controls = importlib.import_module("faults.controls")
        self._training = importlib.import_module("faults.training")

    def run(self, name: str, plant: Callable[[Any], None] | None = None, **settings: Any) -> Path:
        path = self._folder / name
        if not path.exists():
            training = self._training.Training(self._training.Program())
            if plant is not None:
                plant(training)
            with astray.record(path, training.model, **settings) as rec:
                training.run(rec.step)
        return path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    sys.path.insert(0, str(BENCHMARKS))
    yield Bench(tmp_path_factory.mktemp("perturbed"))
    sys.path.remove(str(BENCHMARKS))


def compared(bench: Bench, name: str, plant: Callable[[Any], None]) -> astray.Comparison:
    noise = bench.run("noise", perturb=0)
    return astray.compare(bench.run("reference"), bench.run(name, plant), noise=noise)


def test_the_perturbation_spreads_and_stays_small(bench: Bench) -> None:
    found = astray.compare(bench.run("reference"), bench.run("noise", perturb=0))
    assert found.same
    assert found.pairs.numbers("error")[found.matched].max() > 1e-6  # else there would be nothing to calibrate with
    computed = [
        verdict
        for verdict, step, role in zip(found.pairs["verdict"], found.pairs["step"], found.pairs["role"], strict=True)
        if step > 0 and role == "output"
    ]
    assert "identical" not in computed  # nothing that is computed is left out


@pytest.mark.parametrize("control", ["blocking", "threads", "batch_split", "norms_in_float64"])
def test_other_roundings_are_no_fault(bench: Bench, control: str) -> None:
    found = compared(bench, control, getattr(bench.controls, control))
    assert found.same, found
    assert found.counts["identical"] < len(found.pairs)
    rules = {
        rule
        for rule, verdict in zip(found.pairs["rule"], found.pairs["verdict"], strict=True)
        if verdict != "identical"
    }
    # The model: of rows all of whose inputs are bit-identical.
    assert {"noise run", "seen before"} <= rules <= {"noise run", "seen before", "siblings", "model"}


def test_a_weight_off_by_a_thousandth_is_named(bench: Bench) -> None:
    def scale(training: Any) -> None:
        training.at(3, "begin", lambda: training.module("h.1.mlp.down").weight.mul_(1.001))

    found = compared(bench, "scaled", scale)
    assert found.first is not None
    assert (found.first.site, found.first.step, found.first.cause) == ("h.1.mlp.down", 3, "parameter")


def test_a_weight_off_by_a_thousandth_is_named_among_other_roundings(bench: Bench) -> None:
    def scale(training: Any) -> None:
        bench.controls.blocking(training)
        training.at(3, "begin", lambda: training.module("h.1.mlp.down").weight.mul_(1.001))

    found = compared(bench, "scaled in halves", scale)
    assert found.first is not None
    assert (found.first.site, found.first.step, found.first.cause) == ("h.1.mlp.down", 3, "parameter")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        "gpt2", "checkpointing", "structured_outputs", "in_place", "autocast_bfloat16",
        *(pytest.param(name, marks=pytest.mark.slow) for name in (
            "reentrant_checkpointing", "compiled_model_by_aot_eager", "recurrent", "complex_numbers",
            "normalized_weights", "generation_with_a_static_cache",
        )),
    ],
)  # fmt: skip
def test_real_programs_run_on_and_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    first, second = (record(program, tmp_path / take, perturb=5) for take in ("first", "second"))
    assert first.state == second.state
    assert (first.left, first.complaints) == ([], [])  # it would complain if nothing had been changed
    assert astray.compare(first.path, second.path, exact=True).same


class Steep(nn.Module):
    """Makes errors a thousand times as large, and so right results further apart than the model of rounding allows."""

    def forward(self, x: Tensor) -> Tensor:
        return (1000 * x).sin()


class Chain(nn.Module):
    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.weight, self.steep, self.halves = nn.Parameter(torch.randn(64, 64)), Steep(), halves

    def forward(self, x: Tensor) -> Tensor:
        if self.halves:
            return self.steep(x[:, :32] @ self.weight[:32] + x[:, 32:] @ self.weight[32:])
        return self.steep(x @ self.weight)


def recorded(path: Path, halves: bool, scale: float = 1.0, **settings: Any) -> Path:
    torch.manual_seed(0)
    model, x = Chain(halves), torch.randn(64, 64)
    with torch.no_grad(), astray.record(path, model, **settings):
        model(x * scale)
    return path


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_an_ill_conditioned_program_is_calibrated(tmp_path: Path, keep: str) -> None:
    reference = recorded(tmp_path / "reference", halves=False, keep=keep)
    candidate = recorded(tmp_path / "candidate", halves=True, keep=keep)
    noise = recorded(tmp_path / "noise", halves=False, keep=keep, perturb=True)
    assert not astray.compare(reference, candidate).same  # the model does not know the condition of a computation
    assert astray.compare(reference, candidate, noise=noise).same
    wrong = recorded(tmp_path / "wrong", halves=True, scale=1.0001, keep=keep)
    assert not astray.compare(reference, wrong, noise=noise).same
