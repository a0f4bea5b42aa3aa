"""Whole tensors to disk: how fast a recording writes them, beside plain writes of as many bytes by several threads.

Plain writes are tried both ways, through the page cache and past it (O_DIRECT), and the best of them counts. They come
from more memory than a processor's caches hold, as the bytes of tensors do. Two times are taken of each: until all is
written, which may be no further than the page cache, and until it is on the disk (fsync of every file). What was
written is removed before the next turn.
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
STEPS = 3
WAYS = [(threads, direct) for direct in (False, True) for threads in (4, 8)]
CHUNK = 1 << 24
MEMORY = 1 << 29


class Written(NamedTuple):
    """Seconds until everything was written, and until it was on the disk."""

    written: float
    synced: float


class Stored(NamedTuple):
    """A recording with values: all in seconds, but the bytes."""

    bytes: int
    step: float
    took: Written
    waited: float


def run(work: Work, report: Report) -> None:
    report.write("### Values")
    training = work.training()
    bare = work.seconds(training.step, work.times(10, 2))
    stored = [record(work, training)]
    total = stored[0].bytes
    plain = {way: [write(work, total, *way)] for way in WAYS}
    best = min(plain, key=lambda way: plain[way][0].written)
    stored.append(record(work, training))
    plain[best].append(write(work, total, *best))
    stored.append(record(work, training))
    ours = fastest([run.took for run in stored])
    theirs = {way: fastest(times) for way, times in plain.items()}
    limit = fastest(list(theirs.values()))
    report.write(
        f"{STEPS} steps with every tensor of the module calls in six blocks, forward and backward: "
        f"{total / 1e9:.1f} GB. The time is from the start of the first step until `stop` has returned, or until what "
        f"it wrote is on the disk. The best of {len(stored)} recordings; plain writes of as many bytes take turns with "
        "them. In brackets the fraction of the best plain write."
    )
    report.table(
        ["", "GB/s, written", "GB/s, on the disk", "seconds", "step ÷ bare step", "s waited for the disk"],
        [
            ["astray", *rates(total, ours, limit), seconds(ours), f"{min(run.step for run in stored) / bare:.1f}",
             f"{min(run.waited for run in stored):.2f}"],
            *(
                [f"plain, {threads} threads{', direct' if direct else ''}", *rates(total, took, limit), seconds(took),
                 "–", "–"]
                for (threads, direct), took in theirs.items()
            ),
        ],
    )  # fmt: skip
    report.write(
        f"GB/s of each recording, written: {', '.join(f'{total / run.took.written / 1e9:.2f}' for run in stored)}."
    )


def fastest(times: list[Written]) -> Written:
    return Written(min(one.written for one in times), min(one.synced for one in times))


def rates(total: int, took: Written, limit: Written) -> list[str]:
    return [f"{total / one / 1e9:.2f} ({least / one:.2f})" for one, least in zip(took, limit, strict=True)]


def seconds(took: Written) -> str:
    return f"{took.written:.2f}, {took.synced:.2f}"


def record(work: Work, training: Training) -> Stored:
    with recording(work, training, SETTINGS) as run:
        started = time.perf_counter()
        step = work.seconds(run.step, STEPS)
        end = run.stop()
        written = time.perf_counter() - started
        sync(work.folder)
        took = Written(written, time.perf_counter() - started)
    print(f"recorded {end.value_bytes / 1e9:.1f} GB in {seconds(took)} s", file=sys.stderr, flush=True)
    return Stored(end.value_bytes, step, took, end.waited_seconds)


def write(work: Work, total: int, threads: int, direct: bool) -> Written:
    """So many bytes, from memory into one new file for each thread."""
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
    written = time.perf_counter() - started
    sync(folder)
    took = Written(written, time.perf_counter() - started)
    print(f"plain, {threads} threads, direct {direct}: {seconds(took)} s", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return took


def sync(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def _fill(path: Path, data: memoryview, start: int, count: int, direct: bool) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0))
    try:
        while count:
            written = os.write(file, data[start : start + min(count, CHUNK)])
            count -= written
            start = (start + written) % MEMORY
    finally:
        os.close(file)
