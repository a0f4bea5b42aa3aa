"""How fast the kernels go, beside what merely reading the same memory takes.

    python benchmarks/kernels.py [--elements 16777216] [--repeats 7] [--threads 1 2]

Prints a markdown table. The bound is a native loop that adds up 64-bit words, with the same number of threads over the
same memory in the same process, run in turn with the kernels; the best of the repeats counts for each. GB/s are of the
bytes of the tensor, of both tensors for `contrast`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from astray.stats import (
    BACKEND,
    DTYPES,
    Strided,
    contrast,
    factorize,
    gather,
    measure,
    pack,
    sample_positions,
    set_threads,
)

try:
    from astray.stats import _native
except ImportError as error:
    raise SystemExit("The native kernels are not built. Run: python setup.py build_ext --inplace") from error

DTYPE_NAMES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int32", "int64", "complex64"]


def make(dtype: str, elements: int, seed: int) -> np.ndarray:
    """Ordinary values: normal with mean 0, as weights and activations are; small integers for integers."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    if kind.kind == "int":
        return rng.integers(-100, 100, elements).astype(kind.storage)
    values = rng.standard_normal(elements, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype.startswith("float8"):
        return rng.integers(0, 0x70, elements).astype(np.uint8)
    return values.astype(kind.storage)


def best(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each job, all run in turn so that a noisy moment hits them alike."""
    times = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def throughput(elements: int, repeats: int, threads: list[int]) -> None:
    """GB/s of every kernel over tensors that no cache holds."""
    print(f"| dtype | layout | threads | read | {' | '.join(HEADINGS)} |")
    print("|---|---|---|---|" + "---|" * len(HEADINGS))
    side = int(elements**0.5)
    for dtype in DTYPE_NAMES:
        one = make(dtype, side * side, 0)
        other = one.copy()
        other[::3] = make(dtype, side * side, 1)[::3]
        for layout in ("contiguous", "transposed"):
            shaped = [array.reshape(side, side) for array in (one, other)]
            first, second = (Strided.from_numpy(a.T if layout == "transposed" else a, dtype) for a in shaped)
            for count in threads:
                set_threads(count)
                _row(dtype, layout, count, first, second, one, repeats)
    set_threads(None)


HEADINGS = ["stats + fingerprint", "stats", "fingerprint", "contrast", "pack"]


def _row(
    dtype: str, layout: str, threads: int, first: Strided, second: Strided, memory: np.ndarray, repeats: int
) -> None:
    address, nbytes = first.address, memory.nbytes
    out = np.empty(nbytes, np.uint8)
    times = best(
        {
            "read": lambda: _native.read(address, nbytes),
            "stats + fingerprint": lambda: measure(first),
            "stats": lambda: measure(first, fingerprint=False),
            "fingerprint": lambda: measure(first, statistics=False),
            "contrast": lambda: contrast(first, second),
            "pack": lambda: pack(first, out),
        },
        repeats,
    )
    read = nbytes / times["read"] / 1e9
    cells = []
    for name in HEADINGS:
        speed = (2 if name == "contrast" else 1) * nbytes / times[name] / 1e9
        cells.append(f"{speed:.1f} ({speed / read:.2f})")
    print(f"| {dtype} | {layout} | {threads} | {read:.1f} | {' | '.join(cells)} |")


def small(repeats: int) -> None:
    """Microseconds per call on tensors so small that only the call counts."""
    values = np.ones(16, np.float32)
    tensor = Strided.from_numpy(values)
    jobs: dict[str, Callable[[], object]] = {
        "measure": lambda: measure(tensor),
        "measure, stats only": lambda: measure(tensor, fingerprint=False),
        "contrast": lambda: contrast(tensor, tensor),
        "gather 16": lambda: gather(tensor, sample_positions(16, 16)),
    }
    print("\n| 16 float32 elements | µs per call |\n|---|---|")
    calls = 20_000
    for name, job in jobs.items():
        elapsed = best({name: lambda job=job: [job() for _ in range(calls)]}, repeats)[name]
        print(f"| {name} | {elapsed / calls * 1e6:.2f} |")


def strings(repeats: int) -> None:
    """Rows per second when numbering short strings."""
    rows = 4_000_000
    print("\n| factorize, 4 M rows | M rows/s |\n|---|---|")
    for distinct in (100, 100_000):
        names = np.array([f"layers.{i}.mlp" for i in range(distinct)], dtype=np.bytes_)
        lengths = np.char.str_len(names)
        pick = np.random.default_rng(0).integers(0, distinct, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths[pick])]).astype(np.int64)
        data = np.frombuffer(b"".join(names[pick].tolist()), np.uint8)
        elapsed = best({"factorize": lambda data=data, offsets=offsets: factorize(data, offsets)}, repeats)["factorize"]
        print(f"| {distinct:,} distinct | {rows / elapsed / 1e6:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 24, help="per tensor; the default is out of every cache")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(
        f"{BACKEND} kernels, {_native.isas()[-1]}, {options.elements:,} elements; in brackets, the fraction of a read\n"
    )
    throughput(options.elements, options.repeats, options.threads)
    small(options.repeats)
    strings(options.repeats)


if __name__ == "__main__":
    main()
