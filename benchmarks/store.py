"""How fast a run is written and read, beside a plain write of the same bytes to the same disk.

    python benchmarks/store.py [FOLDER]

The plain write is by several threads, buffered and direct, each into a file of its own, and its best way counts. Runs
of all kinds alternate and the best of each counts, so that a busy disk hurts all alike. Needs about 2 GiB in FOLDER
(default: a temporary folder), and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

from astray.records import Call, Statistics, Tensor
from astray.store import RunInfo, RunWriter, open_run

ROUNDS = 3
TOTAL = 2 << 30
THREADS = 1, 2, 4, 8
QUEUE = 1 << 30
ROWS = 1 << 20
ROWS_PER_STEP = 300

STATISTICS = Statistics(-1.5, 2.5, 0.25, 0.75, 12.0, 2.5, 3, 0, 0, 4096)


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="astray-benchmark-") as folder:
        print("| values | plain write, the best way | astray | of plain | astray, packed into its own memory |")
        print("|---|---|---|---|---|")
        for size in (256 << 20, 64 << 20, 4 << 20, 256 << 10, 64 << 10, 16 << 10):
            values_line(Path(folder), size)
        print("\n| rows | per second | |")
        print("|---|---|---|")
        rows_lines(Path(folder))


def values_line(folder: Path, size: int) -> None:
    """One line: tensors of `size` bytes, written plainly in every way and as a run."""
    count = min(TOTAL // size, 16384)
    data = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(min(count, 8))]
    plain: dict[str, list[float]] = {}
    astray: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for direct, threads in product((False, True), THREADS):
            name = f"{threads} thread{'s' * (threads > 1)}, {'direct' if direct else 'buffered'}"
            with contextlib.suppress(OSError):  # not every file system takes direct writes
                times = seconds(write_plainly, folder / "plain", data, count, threads, direct)
                plain.setdefault(name, []).append(times)
            remove(folder / "plain")
            for kind, write in (("handed over", write_values), ("packed", pack_values)):
                astray.setdefault(kind, []).append(seconds(write, folder / "run", data, count))
                remove(folder / "run")
    speeds = {name: count * size / min(times) / 1e6 for name, times in (plain | astray).items()}
    best = max(plain, key=speeds.__getitem__)
    print(
        f"| {count} × {size >> 10} KiB | {speeds[best]:,.0f} MB/s ({best}) | {speeds['handed over']:,.0f} MB/s "
        f"| {speeds['handed over'] / speeds[best]:.2f} | {speeds['packed']:,.0f} MB/s |"
    )


def write_plainly(folder: Path, data: list[np.ndarray], count: int, threads: int, direct: bool) -> None:
    """Threads that write tensors one after the other, each into a file of its own: no rows, no names, no promises."""
    folder.mkdir()
    numbers = itertools.count()
    if direct:
        data = [aligned(array) for array in data]

    def work(name: int) -> None:
        with os.fdopen(os.open(folder / f"{name}", os.O_CREAT | os.O_WRONLY | (os.O_DIRECT * direct)), "wb", 0) as file:
            while (number := next(numbers)) < count:
                file.write(data[number % len(data)].data)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def aligned(array: np.ndarray) -> np.ndarray:
    """The same bytes, at an address that direct writes need."""
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes), np.uint8)
    copy[:] = array
    return copy


def write_values(path: Path, data: list[np.ndarray], count: int) -> None:
    with RunWriter(path, info=RunInfo.of_process(), queue_bytes=QUEUE) as writer:
        for i in range(count):
            values = data[i % len(data)]
            writer.tensor(Tensor(i, "output", "0", "uint8", values.shape, (1,), "cpu", False), values)


def pack_values(path: Path, data: list[np.ndarray], count: int) -> None:
    """As while recording: the program goes on with its tensor, so its bytes are copied first."""
    with RunWriter(path, info=RunInfo.of_process(), queue_bytes=QUEUE) as writer:
        for i in range(count):
            values = data[i % len(data)]
            buffer = writer.take_buffer(values.nbytes)
            np.copyto(buffer.array, values)
            writer.tensor(Tensor(i, "output", "0", "uint8", values.shape, (1,), "cpu", False), buffer)


def rows_lines(folder: Path) -> None:
    """Tensor rows without values: how fast the program gets rid of them, and how fast they are written and read."""
    tensors = [tensor(i) for i in range(ROWS)]
    calls = [Call(i, i // 100, 0, "module", f"layers.{i % 100}", "Linear", 0, "forward") for i in range(ROWS // 4)]
    handed, written, read, opened = [], [], [], []
    for _ in range(3):
        writer = RunWriter(folder / "run", info=RunInfo.of_process())
        start = time.perf_counter()
        for row in tensors[: 1 << 15]:
            writer.tensor(row)
        handed.append((time.perf_counter() - start) / (1 << 15))
        writer.close()
        remove(folder / "run")
        written.append(seconds(lambda: write_rows(folder / "run", calls, tensors)))
        read.append(seconds(lambda: open_run(folder / "run").ranks[0].tensors))
        opened.append(seconds(lambda: open_run(folder / "run").ranks[0].call_rows))
        remove(folder / "run")
    total = len(calls) + len(tensors)
    print(f"| handed over by the program | {1 / min(handed):,.0f} | {min(handed) * 1e6:.2f} µs each |")
    print(f"| written, {total:,} | {total / min(written):,.0f} | {min(written):.2f} s |")
    print(f"| tensors read, {ROWS:,} | {ROWS / min(read):,.0f} | {min(read):.2f} s |")
    print(f"| calls and tensors read and joined | {total / min(opened):,.0f} | {min(opened):.2f} s |")


def write_rows(path: Path, calls: list[Call], tensors: list[Tensor]) -> None:
    with RunWriter(path, info=RunInfo.of_process()) as writer:
        for i in range(0, len(tensors), ROWS_PER_STEP):
            for call in calls[i // 4 : (i + ROWS_PER_STEP) // 4]:
                writer.call(call)
            for row in tensors[i : i + ROWS_PER_STEP]:
                writer.tensor(row)
            writer.step_done()


def tensor(i: int) -> Tensor:
    shape = (8, 128, 512 + i % 7)
    fingerprint = i * 0x9E3779B97F4A7C15 % 2**64
    role = "input" if i % 4 else "output"
    return Tensor(i // 4, role, str(i % 4), "bfloat16", shape, (65536, 512, 1), "cuda:0", True, STATISTICS, fingerprint)


def seconds(work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def remove(path: Path) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            (Path(folder) / name).unlink()
        Path(folder).rmdir()


if __name__ == "__main__":
    main()
