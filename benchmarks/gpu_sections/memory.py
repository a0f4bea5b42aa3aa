"""Device memory over 50 recorded steps, beside as many bare ones: what recording takes, and that it does not grow."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from gpu_sections.work import BOTH, Report, Work, recording

CASES = {"bare": None, "statistics, both": {"level": BOTH}, "fingerprints, ops": {"level": "op", "keep": "fingerprint"}}


class Memory(NamedTuple):
    """Bytes: in use after each step, the most at any time, held by torch, and taken from the device by the process."""

    after: list[int]
    peak: int
    reserved: int
    taken: int


def run(work: Work, report: Report) -> None:
    report.write("### Device memory")
    if not work.has_gpu:
        report.write("Not measured: there is no GPU.")
        return
    steps = work.times(50, 5)
    training = work.training()
    work.seconds(training.step, 5)
    found: dict[str, Memory] = {}
    for name, settings in CASES.items():
        if settings is None:
            found[name] = watch(training.step, steps)
            continue
        with recording(work, training, settings) as recorded:
            found[name] = watch(recorded.step, steps)
    bare = found["bare"]
    report.write(f"Over {steps} steps, in MB. Growth is from after the second step to after the last.")
    report.table(
        ["recorded", "in use after a step", "growth", "peak", "peak over bare", "held by torch", "over bare",
         "taken from the device", "over bare"],
        [
            [
                name,
                f"{memory.after[-1] / 1e6:,.1f}",
                f"**{(memory.after[-1] - memory.after[1]) / 1e6:+.3f}**",
                f"{memory.peak / 1e6:,.1f}",
                f"{(memory.peak - bare.peak) / 1e6:+,.1f}",
                f"{memory.reserved / 1e6:,.0f}",
                f"{(memory.reserved - bare.reserved) / 1e6:+,.0f}",
                f"{memory.taken / 1e6:,.0f}",
                f"{(memory.taken - bare.taken) / 1e6:+,.0f}",
            ]
            for name, memory in found.items()
        ],
    )  # fmt: skip


def watch(step: Callable[[], object], steps: int) -> Memory:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    after = []
    for _ in range(steps):
        step()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    free, total = torch.cuda.mem_get_info()
    return Memory(after, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free)
