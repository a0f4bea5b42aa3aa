"""Whole tensors to disk: how fast a recording writes them, beside plain writes of as many bytes by several threads.

Plain writes are tried both ways, through the page cache and past it (O_DIRECT), and the best of them counts. They come
from more memory than a processor's caches hold, as the bytes of tensors do. Neither side waits for the disk at the end
(no fsync). What was written is removed before the next turn.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gpt import Training

from gpu_sections.work import LIKE_PEERS, Report, Work, recording

SETTINGS = {"level": "module", "keep": "tensors", "match": r"^h\.[0-5]\b", **LIKE_PEERS}
STEPS = 1
WAYS = [(threads, direct) for direct in (False, True) for threads in (4, 8)]
CHUNK = 1 << 24
MEMORY = 1 << 29


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
    plain = {way: write(work, total, *way) for way in WAYS}
    best = min(plain, key=lambda way: plain[way])
    stored.append(record(work, training))
    plain[best] = min(plain[best], write(work, total, *best))
    stored.append(record(work, training))
    fastest = max(stored, key=lambda run: run.rate)
    report.say(
        f"{STEPS} step with every tensor of the module calls in six blocks, forward and backward: "
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
                [f"plain, {threads} threads{', direct' if direct else ''}", f"{total / spent / 1e9:.2f}",
                 f"{plain[best] / spent:.2f}", f"{spent:.2f}", "–", "–"]
                for (threads, direct), spent in plain.items()
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
    stored = Stored(end.value_bytes, steps, spent, end.waited_seconds)
    print(f"recorded {stored.bytes / 1e9:.1f} GB at {stored.rate / 1e9:.2f} GB/s", file=sys.stderr)
    return stored


def write(work: Work, total: int, threads: int, direct: bool) -> float:
    """Seconds for so many bytes, from memory into one new file for each thread."""
    folder = work.scratch()
    memory = mmap.mmap(-1, MEMORY)  # which begins at a page
    chunk = np.random.default_rng(0).bytes(CHUNK)
    for _ in range(MEMORY // CHUNK):
        memory.write(chunk)
    data, share = memoryview(memory), total // threads // mmap.PAGESIZE * mmap.PAGESIZE
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(_fill, folder / str(number), data, number * MEMORY // threads, share, direct)
            for number in range(threads)
        ]
        for job in jobs:
            job.result()
    spent = time.perf_counter() - started
    print(f"plain, {threads} threads, direct {direct}: {total / spent / 1e9:.2f} GB/s", file=sys.stderr)
    shutil.rmtree(folder)
    return spent


def _fill(path: Path, data: memoryview, start: int, count: int, direct: bool) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0))
    try:
        while count:
            written = os.write(file, data[start : start + min(count, CHUNK)])
            count -= written
            start = (start + written) % MEMORY
    finally:
        os.close(file)
