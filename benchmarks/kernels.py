"""How fast the kernels go, beside what merely reading the same memory takes.

    python benchmarks/kernels.py [--elements 16777216] [--repeats 7] [--threads 1 2]
                                 [--dtypes float32 ...] [--layouts contiguous ...] [--only contrast ...]

Prints a markdown table. The bound is a native loop that adds up 64-bit words, with the same number of threads over the
same memory in the same process, run in turn with the kernels; the best of the repeats counts for each. GB/s are of the
bytes of the tensor, of both tensors for `contrast`, which meets three candidates: `far`, every third element another;
`near`, rounding noise of 1e-6 on each element, which for small ones is a large relative error, or for narrow types one
bit on every third; and `same`, a copy.
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
from astray.stats.moments import moments

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


def candidates(one: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """What `one` is contrasted with."""
    far, near = one.copy(), one.copy()
    far[::3] = make(dtype, one.size, 1)[::3]
    if dtype in ("float32", "float64", "complex64"):
        near += 1e-6 * make(dtype, one.size, 2)
    else:
        near.view(f"u{one.itemsize}")[::3] ^= 1
    return {"far": far, "near": near, "same": one.copy()}


def throughput(options: argparse.Namespace) -> None:
    """GB/s of every kernel over tensors that no cache holds."""
    print(f"| dtype | layout | threads | read | {' | '.join(options.only)} |")
    print("|---|---|---|---|" + "---|" * len(options.only))
    side = int(options.elements**0.5)
    for dtype in options.dtypes:
        one = make(dtype, side * side, 0)
        others = candidates(one, dtype)
        for layout in options.layouts:

            def shaped(array: np.ndarray, layout: str = layout, dtype: str = dtype) -> Strided:
                square = array.reshape(side, side)
                return Strided.from_numpy(square.T if layout == "transposed" else square, dtype)

            for threads in options.threads:
                set_threads(threads)
                speeds = _speeds(shaped(one), {name: shaped(other) for name, other in others.items()}, one, options)
                read = speeds.pop("read")
                cells = " | ".join(f"{speed:.1f} ({speed / read:.2f})" for speed in speeds.values())
                print(f"| {dtype} | {layout} | {threads} | {read:.1f} | {cells} |", flush=True)
    set_threads(None)


LAYOUTS = ["contiguous", "transposed"]
HEADINGS = [
    "stats + fingerprint",
    "stats",
    "fingerprint",
    "moments",
    "contrast far",
    "contrast near",
    "contrast same",
    "pack",
]


def _speeds(
    tensor: Strided, others: dict[str, Strided], memory: np.ndarray, options: argparse.Namespace
) -> dict[str, float]:
    out = np.empty(memory.nbytes, np.uint8)
    jobs: dict[str, Callable[[], object]] = {
        "read": lambda: _native.read(tensor.address, memory.nbytes),
        "stats + fingerprint": lambda: measure(tensor),
        "stats": lambda: measure(tensor, fingerprint=False),
        "fingerprint": lambda: measure(tensor, statistics=False),
        "moments": lambda: moments(tensor),
        **{f"contrast {name}": lambda other=other: contrast(tensor, other) for name, other in others.items()},
        "pack": lambda: pack(tensor, out),
    }
    times = best({name: jobs[name] for name in ["read", *options.only]}, options.repeats)
    return {
        name: (2 if name.startswith("contrast") else 1) * memory.nbytes / elapsed / 1e9
        for name, elapsed in times.items()
    }


def small(repeats: int) -> None:
    """Microseconds per call on tensors so small that only the call counts."""
    values = np.ones(16, np.float32)
    tensor = Strided.from_numpy(values)
    jobs: dict[str, Callable[[], object]] = {
        "measure": lambda: measure(tensor),
        "measure, stats only": lambda: measure(tensor, fingerprint=False),
        "moments": lambda: moments(tensor),
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
    parser.add_argument("--dtypes", nargs="+", default=DTYPE_NAMES, choices=DTYPE_NAMES)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--only", nargs="+", default=HEADINGS, choices=HEADINGS, help="columns; without the small ones")
    options = parser.parse_args()
    print(
        f"{BACKEND} kernels, {_native.isas()[-1]}, {options.elements:,} elements; in brackets, the fraction of a read\n"
    )
    throughput(options)
    if options.only is HEADINGS:
        small(options.repeats)
        strings(options.repeats)


if __name__ == "__main__":
    main()
