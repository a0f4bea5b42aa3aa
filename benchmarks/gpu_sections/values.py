"""Whole tensors to disk: how fast a recording writes them, beside plain writes of as many bytes by several threads.

Neither side waits for the disk at the end (no fsync): both go through the page cache, and to the disk as far as the
system insists. So the same number of bytes is written each time, and what was written is removed before the next.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gpt import Training

from gpu_sections.work import LIKE_PEERS, Report, Work, recording

SETTINGS = {"level": "module", "keep": "tensors", **LIKE_PEERS}
STEPS = 2
THREADS = (1, 2, 4, 8, 16)
CHUNK = 1 << 24


class Stored(NamedTuple):
    """A recording with values: all in seconds, but the bytes."""

    bytes: int
    steps: float
    all: float
    waited: float

    @property
    def rate(self) -> float:
        return self.bytes / self.all


def run(work: Work, report: Report) -> None:
    report.say("### Values")
    training = work.training()
    bare = work.seconds(training.step, work.times(10, 2))
    stored = [record(work, training)]
    total = stored[0].bytes
    plain = {threads: write(work, total, threads) for threads in THREADS}
    best = min(plain, key=lambda threads: plain[threads])
    for _ in range(2):
        stored.append(record(work, training))
        plain[best] = min(plain[best], write(work, total, best))
    fastest = max(stored, key=lambda run: run.rate)
    report.say(
        f"{STEPS} steps with every tensor of every module call, forward and backward, into a folder: "
        f"{total / 1e9:.1f} GB. The time is from the start of the first step until `stop` has returned. Best of "
        f"{len(stored)}; plain writes of as many bytes take turns with it."
    )
    report.table(
        ["", "GB/s", "of the best plain write", "seconds", "step ÷ bare step", "s waited for the disk"],
        [
            [
                "astray",
                f"{fastest.rate / 1e9:.2f}",
                f"**{fastest.rate * plain[best] / total:.2f}**",
                f"{fastest.all:.2f}",
                f"{fastest.steps / bare:.1f}",
                f"{fastest.waited:.2f}",
            ],
            *(
                [f"plain, threads: {threads}", f"{total / spent / 1e9:.2f}", f"{plain[best] / spent:.2f}",
                 f"{spent:.2f}", "–", "–"]
                for threads, spent in plain.items()
            ),
        ],
    )  # fmt: skip
    report.say(f"GB/s of each recording: {', '.join(f'{run.rate / 1e9:.2f}' for run in stored)}.")


def record(work: Work, training: Training) -> Stored:
    with recording(work, training, SETTINGS) as run:
        started = time.perf_counter()
        steps = work.seconds(run.step, STEPS)
        end = run.stop()
        spent = time.perf_counter() - started
    return Stored(end.value_bytes, steps, spent, end.waited_seconds)


def write(work: Work, total: int, threads: int) -> float:
    """Seconds for so many bytes, from memory into one new file for each thread."""
    folder = work.scratch()
    data = memoryview(np.random.default_rng(0).bytes(CHUNK))
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_fill, folder / str(number), data, total // threads) for number in range(threads)]
        for job in jobs:
            job.result()
    spent = time.perf_counter() - started
    shutil.rmtree(folder)
    return spent


def _fill(path: Path, data: memoryview, count: int) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while count:
            count -= os.write(file, data[:count])
    finally:
        os.close(file)
