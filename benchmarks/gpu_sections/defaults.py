"""What recording costs a user: default settings through the public API, each step waited for by `loss.item()`.

Blocks of bare and of recorded steps take turns in one process, a recording a block. The ratio is of the medians of all
steps but the first of each block. Beside it stands the same without waiting, for loops that look at their loss seldom.
Below, what it is made of: what a step takes more of the clock, of the processor (all threads of the process, also what
runs while the device computes) and of the device, by torch's profiler. The last two overlap.
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
from gpu_sections.steps import Kernels, profiled
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


class Times(NamedTuple):
    """Seconds of steps: of each that was waited for, of all others together by block, and what the processor took."""

    waited: list[float]
    free: list[float]
    processor: list[float]

    def extend(self, other: Times) -> None:
        for mine, given in zip(self, other, strict=True):
            mine.extend(given)


class Cost(NamedTuple):
    """Seconds of a step, and how many tensors it has; 0 tensors for a guard, where they are not counted."""

    bare: float
    recorded: float
    bare_free: float
    recorded_free: float
    bare_processor: float
    recorded_processor: float
    tensors: float

    @property
    def ratio(self) -> float:
        return self.recorded / self.bare

    def ratios_text(self) -> str:
        return f"{self.ratio:.2f} ({self.recorded_free / self.bare_free:.2f})"

    def parts(self, bare: Kernels | None, recorded: Kernels | None) -> list[str]:
        """What more a step takes, in microseconds a tensor; in milliseconds where tensors were not counted."""
        known = bare is not None and recorded is not None
        more = [self.recorded - self.bare, self.recorded_processor - self.bare_processor]
        more += [recorded.seconds - bare.seconds] if known else []
        each = [f"{one / self.tensors * 1e6:.1f}" if self.tensors else f"{one * 1e3:.1f} ms" for one in more]
        return [
            f"{self.bare * 1e3:.1f}",
            f"{self.recorded * 1e3:.1f}",
            f"{self.tensors:,.0f}" if self.tensors else "–",
            f"{recorded.count - bare.count:,}" if known else "–",
            *each,
            *([] if known else ["–"]),
        ]


def run(work: Work, report: Report, programs: list[str] | None = None) -> None:
    report.write(
        "### What a user gets\n\nDefault settings, each step waited for; in brackets, waited for after ten. Step over "
        "bare step."
    )
    names = programs or list(PROGRAMS)
    costs = {name: costs_of(work, name) for name in names}
    rows = [
        [PROGRAMS[name].what, *(costs[name][case].ratios_text() if case in costs[name] else "" for case in TRAINED)]
        for name in names
    ]
    report.table(["program", *TRAINED], rows)
    report.ratios |= {f"{name}, {case}": cost.ratio for name in names for case, cost in costs[name].items()}
    parts = []
    for name in names:  # last, for a profiler that has been on may slow down what comes after it
        kernels = kernels_of(work, name)
        parts.extend([name, case, *cost.parts(kernels[""], kernels[case])] for case, cost in costs[name].items())
    report.table(
        ["program", "recorded", "bare ms", "recorded ms", "tensors a step", "kernels more", "µs more a tensor",
         "of the processor", "of the device"],
        parts,
    )  # fmt: skip


def cases_of(name: str) -> list[str]:
    return GENERATED if name == "generate" else TRAINED


def costs_of(work: Work, name: str) -> dict[str, Cost]:
    training, costs = PROGRAMS[name].make(work.device, work.small), {}
    blocks(work, step_of(training), work.times(2, 1))
    for case in cases_of(name):
        costs[case] = cost = measure(work, training, case, LONG if name == "generate" else WAITED)
        print(f"{name}, {case}: {cost.ratio:.2f} of {cost.bare * 1e3:.1f} ms", file=sys.stderr, flush=True)
    del training
    if work.has_gpu:
        torch.cuda.empty_cache()
    return costs


def kernels_of(work: Work, name: str) -> dict[str, Kernels | None]:
    """What the device does in a step: a bare one under the empty name, and one of each case."""
    if not work.has_gpu:
        return dict.fromkeys(["", *cases_of(name)])
    training = PROGRAMS[name].make(work.device, work.small)
    training.step()
    found = {"": profiled(training.step)}
    for case in cases_of(name):
        folder = work.scratch()
        with recorder(case, training, folder) as tool:
            step = step_of(training, tool, case)
            step()
            found[case] = profiled(step)
        shutil.rmtree(folder)
    del training
    torch.cuda.empty_cache()
    return found


def measure(work: Work, training: Training, case: str, count: int) -> Cost:
    """Blocks of bare and recorded steps in turn."""
    bare, recorded = Times([], [], []), Times([], [], [])
    tensors = 0.0
    for _ in range(work.times(3, 1)):
        bare.extend(blocks(work, step_of(training), work.times(count, 1)))
        folder = work.scratch()
        with recorder(case, training, folder) as tool:
            recorded.extend(blocks(work, step_of(training, tool, case), work.times(count, 1)))
        if case != "guard":
            end = astray.open(folder / "run").ranks[0].end
            assert end is not None
            tensors = end.tensors / max(end.steps, 1)
        shutil.rmtree(folder)
    return Cost(*(median(times) for pair in zip(bare, recorded, strict=True) for times in pair), tensors)


def recorder(case: str, training: Training, folder: Any) -> AbstractContextManager[Any]:
    if case == "guard":
        return astray.guard(training.model, path=folder / "guard")
    return astray.record(folder / "run", training.model, **LEVELS[case])


def step_of(training: Training, tool: Any = None, case: str = "") -> Callable[[], torch.Tensor]:
    """A step of the program, which a recording is told of and a guard is not."""
    if tool is None or case == "guard":
        return training.step

    def step() -> torch.Tensor:
        loss = training.step()
        tool.step()
        return loss

    return step


def blocks(work: Work, step: Callable[[], torch.Tensor], count: int) -> Times:
    """Steps that are waited for, and others that are waited for together. The first is not timed."""
    step().item()
    waited = []
    processor = time.process_time()
    for _ in range(count):
        begun = time.perf_counter()
        step().item()
        waited.append(time.perf_counter() - begun)
    processor = (time.process_time() - processor) / count
    free = min(work.times(FREE, 1), count)
    begun = time.perf_counter()
    for _ in range(free):
        loss = step()
    loss.item()
    work.synchronize()
    return Times(waited, [(time.perf_counter() - begun) / free], [processor])
