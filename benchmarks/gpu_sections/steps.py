"""Step time over bare step time for each case, and what the extra time is spent on.

Blocks of bare and of recorded steps take turns in one process. Beside the measured extra time stand its three parts:
the floor, which is what merely reading the measured bytes would take; the device's own work, from torch's profiler; and
the host's, from a thin model that makes just as many calls and leaves the device nothing to do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from gpt import Training
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_sections.bandwidth import read_bandwidth
from gpu_sections.measured import Measured, counting
from gpu_sections.work import CASES, Report, Work, recording


class Times(NamedTuple):
    """Seconds a step, of each block."""

    bare: list[float]
    recorded: list[float]

    @property
    def ratio(self) -> float:
        return median(recorded / bare for bare, recorded in zip(self.bare, self.recorded, strict=True))

    @property
    def best(self) -> float:
        return min(self.recorded) / min(self.bare)

    @property
    def extra(self) -> float:
        return median(self.recorded) - median(self.bare)


class Amounts(NamedTuple):
    """What a recorded step leaves and does."""

    calls: float
    tensors: float
    measured: Measured
    stopping: float
    """Seconds that `stop` took, for all that was still to be written."""


class Kernels(NamedTuple):
    """What the device did in a step."""

    count: int
    seconds: float


class Case(NamedTuple):
    """What was measured of one kind of recording: of the model, and of the thin one, which is all host."""

    times: Times
    amounts: Amounts
    host: Times


def run(work: Work, report: Report) -> None:
    training, thin = work.training(), work.training("tiny" if work.small else "thin")
    work.seconds(training.step, work.times(10, 2))
    work.seconds(thin.step, work.times(10, 2))
    report.write(f"### Recorded steps\n\n{work.describe()}")
    cases: dict[str, Case] = {}
    for name, settings in CASES.items():
        times, amounts = take_turns(work, training, settings, work.times(5, 2), work.times(10, 1))
        host, _ = take_turns(work, thin, settings, work.times(4, 1), work.times(10, 1))
        cases[name] = Case(times, amounts, host)
        report.ratios[name] = times.ratio
        print(f"{name}: {times.ratio:.2f}", file=sys.stderr, flush=True)
    report.write("Step time over bare step time, by the medians of paired blocks and by the best of each.")
    report.table(
        ["recorded", "median", "best", "bare ms", "recorded ms", "calls a step", "tensors a step",
         "measured a step", "ms to stop"],
        [step_row(name, case) for name, case in cases.items()],
    )  # fmt: skip
    bandwidth = read_bandwidth(work)
    # Last, for a profiler that has been on may slow down what comes after it.
    bare = device_work(work, training, None)
    rows = [
        part_row(name, case, bandwidth, bare, device_work(work, training, CASES[name])) for name, case in cases.items()
    ]
    read = "not measured" if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s"
    report.write(
        f"Where the extra time goes. Floor: the bytes of the tensors that were measured, each once, at {read}, the "
        "best plain read in this run. Device: what all kernels and copies of a step take more than in a bare step, by "
        "the profiler. Host: what a step takes longer when the device has nothing to do. The two overlap."
    )
    report.table(
        ["recorded", "GB measured", "floor ms", "1 + floor ÷ bare", "extra ms", "device ms", "kernels and copies",
         "host ms", "of bare host ms", "host µs a tensor"],
        rows,
    )  # fmt: skip


def take_turns(
    work: Work, training: Training, settings: dict[str, Any], rounds: int, steps: int
) -> tuple[Times, Amounts]:
    """Blocks of bare and of recorded steps in turn. The first recorded step of a block is not timed: it sets up."""
    times = Times([], [])
    with counting() as measured, recording(work, training, settings) as run:  # by itself, for counting takes time
        run.step()
    for _ in range(rounds):
        times.bare.append(work.seconds(training.step, steps))
        with recording(work, training, settings) as run:
            run.step()
            times.recorded.append(work.seconds(run.step, steps))
            started = time.perf_counter()
            end = run.stop()
            stopping = time.perf_counter() - started
    return times, Amounts(end.calls / end.steps, end.tensors / end.steps, measured, stopping)


def device_work(work: Work, training: Training, settings: dict[str, Any] | None) -> Kernels | None:
    """What the device does in one step, recorded or bare; None where it cannot be measured."""
    if not work.has_gpu:
        return None
    if settings is None:
        return profiled(training.step)
    with recording(work, training, settings) as run:
        run.step()
        return profiled(run.step)


def profiled(step: Callable[[], object]) -> Kernels | None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    on_device = [
        event
        for event in found.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    if not on_device:
        return None
    return Kernels(len(on_device), sum(event.time_range.elapsed_us() for event in on_device) / 1e6)


def step_row(name: str, case: Case) -> list[str]:
    times, amounts, _ = case
    return [
        name,
        f"**{times.ratio:.2f}**",
        f"{times.best:.2f}",
        f"{median(times.bare) * 1e3:.1f}",
        f"{median(times.recorded) * 1e3:.1f}",
        f"{amounts.calls:,.0f}",
        f"{amounts.tensors:,.0f}",
        f"{amounts.measured.tensors:,}",
        f"{amounts.stopping * 1e3:.0f}",
    ]


def part_row(
    name: str, case: Case, bandwidth: float | None, bare: Kernels | None, recorded: Kernels | None
) -> list[str]:
    times, amounts, host = case
    floor = None if bandwidth is None else amounts.measured.bytes / bandwidth
    known = bare is not None and recorded is not None
    return [
        name,
        f"{amounts.measured.bytes / 1e9:.2f}",
        "–" if floor is None else f"{floor * 1e3:.2f}",
        "–" if floor is None else f"{1 + floor / median(times.bare):.3f}",
        f"{times.extra * 1e3:.1f}",
        f"{(recorded.seconds - bare.seconds) * 1e3:.1f}" if known else "–",
        f"{recorded.count - bare.count:+,}" if known else "–",
        f"{host.extra * 1e3:.1f}",
        f"{median(host.bare) * 1e3:.1f}",
        f"{host.extra / max(amounts.tensors, 1) * 1e6:.1f}",
    ]
