"""What recording costs a user: default settings through the public API, each step waited for by `loss.item()`.

Blocks of bare and of recorded steps take turns in one process, a recording a block. The ratio is of the medians of all
steps but the first of each block. Beside it stands the same without waiting, for loops that look at their loss seldom.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, NamedTuple

import torch
from gpt import Training
from programs import PROGRAMS

import astray
from gpu_sections.work import Report, Work

LEVELS: dict[str, dict[str, Any]] = {
    "modules": {},
    "functions": {"level": "function"},
    "both": {"level": ["module", "function"]},
    "op fingerprints": {"level": "op", "keep": "fingerprint"},
}
TRAINED = [*LEVELS, "guard"]
GENERATED = ["modules", "functions", "both"]
WAITED, FREE, LONG = 8, 10, 2
"""Steps of a block that are waited for one by one, and of one that is waited for at its end; of both for `generate`."""


class Cost(NamedTuple):
    """Seconds of a step."""

    bare: float
    recorded: float
    bare_free: float
    recorded_free: float
    tensors: float

    @property
    def ratio(self) -> float:
        return self.recorded / self.bare

    def told(self) -> str:
        return f"{self.ratio:.2f} ({self.recorded_free / self.bare_free:.2f})"


def run(work: Work, report: Report, programs: list[str] | None = None) -> None:
    report.say(
        "### What a user gets\n\nDefault settings, each step waited for; in brackets, waited for after ten. Step over "
        "bare step."
    )
    rows, parts = [], []
    for name in programs or PROGRAMS:
        training = PROGRAMS[name].make(work.device, work.small)
        blocks(work, training, None, work.times(2, 1))
        costs = {}
        for case in GENERATED if name == "generate" else TRAINED:
            costs[case] = cost = measure(work, training, case, LONG if name == "generate" else WAITED)
            print(f"{name}, {case}: {cost.ratio:.2f} of {cost.bare * 1e3:.1f} ms", file=sys.stderr, flush=True)
            each = (cost.recorded - cost.bare) / max(cost.tensors, 1) * 1e6
            tensors = f"{cost.tensors:,.0f}" if cost.tensors else "–"
            parts.append(
                [name, case, f"{cost.bare * 1e3:.1f}", f"{cost.recorded * 1e3:.1f}", tensors,
                 f"{each:.1f}" if cost.tensors else "–"]
            )  # fmt: skip
            report.ratios[f"{name}, {case}"] = cost.ratio
        rows.append([
            PROGRAMS[name].what,
            *(costs[case].told() if case in costs else "" for case in TRAINED),
        ])  # fmt: skip
        del training
        if work.has_gpu:
            torch.cuda.empty_cache()
    report.table(["program", *TRAINED], rows)
    report.table(["program", "recorded", "bare ms", "recorded ms", "tensors a step", "µs more a tensor"], parts)


def measure(work: Work, training: Training, case: str, count: int) -> Cost:
    """Blocks of bare and recorded steps in turn."""
    bare: tuple[list[float], list[float]] = [], []
    recorded: tuple[list[float], list[float]] = [], []
    tensors = 0.0
    for _ in range(work.times(3, 1)):
        for kept, given in zip(bare, blocks(work, training, None, work.times(count, 1)), strict=True):
            kept.extend(given)
        folder = work.scratch()
        with recorder(case, training, folder) as tool:
            step_done = getattr(tool, "step", None) if case != "guard" else None
            for kept, given in zip(recorded, blocks(work, training, step_done, work.times(count, 1)), strict=True):
                kept.extend(given)
        if case != "guard":
            end = astray.open(folder / "run").ranks[0].end
            assert end is not None
            tensors = end.tensors / max(end.steps, 1)
        shutil.rmtree(folder)
    return Cost(*map(median, (bare[0], recorded[0], bare[1], recorded[1])), tensors)


def recorder(case: str, training: Training, folder: Any) -> AbstractContextManager[Any]:
    if case == "guard":
        return astray.guard(training.model, path=folder / "guard")
    return astray.record(folder / "run", training.model, **LEVELS[case])


def blocks(
    work: Work, training: Training, step_done: Callable[[], object] | None, count: int
) -> tuple[list[float], list[float]]:
    """The times of steps that are waited for, and of others that are waited for together. The first is not timed."""

    def step() -> torch.Tensor:
        loss = training.step()
        if step_done is not None:
            step_done()
        return loss

    step().item()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step().item()
        times.append(time.perf_counter() - begun)
    free = min(work.times(FREE, 1), count)
    begun = time.perf_counter()
    for _ in range(free):
        loss = step()
    loss.item()
    work.synchronize()
    return times, [(time.perf_counter() - begun) / free]
