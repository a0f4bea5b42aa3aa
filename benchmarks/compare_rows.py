"""How long it takes to compare two runs of a million tensors each, by statistics and fingerprints.

    python benchmarks/compare_rows.py [--rows 1000000] [--different 0.5]

Writes two runs into a temporary folder, compares them as a user would, and prints a table of where the time goes. The
second run differs from the first in the given fraction of its rows, from the middle on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from astray import compare
from astray.comparison import comparison
from astray.comparison.ranks import rank
from astray.records import Call, Statistics, Tensor
from astray.store import RunInfo, RunWriter, open_run

STEPS = 100
TENSORS = (("input", "0"), ("parameter", "weight"), ("parameter", "bias"), ("output", "out"), ("gradient", ""))


def write_run(path: Path, rows: int, different: float, rank: int = 0, world_size: int = 1) -> None:
    """Record `rows` tensors in 100 steps, five to a call, with numbers that depend on rank and row alone."""
    random = np.random.default_rng(rank)
    calls = rows // STEPS // len(TENSORS)
    with RunWriter(path, rank, info=RunInfo.of_process(world_size=world_size)) as writer:
        row = 0
        for step in range(STEPS):
            numbers = random.normal(size=(calls * len(TENSORS), 2)).tolist()
            prints = random.integers(0, 1 << 63, calls * len(TENSORS)).tolist()
            for call in range(calls):
                seq = step * calls + call
                phase = "forward" if call < calls // 2 else "backward"
                site = f"layers.{call % (calls // 2) // 8}.block.{call % 8}"
                writer.call(Call(seq, step, 0, "module", site, "Linear", 0, phase))
                for place, (role, name) in enumerate(TENSORS):
                    mean, noise = numbers[call * len(TENSORS) + place]
                    changed = row >= rows * (1 - different)
                    if changed:
                        mean += 1e-3 * noise
                    statistics = Statistics(-3.0, 3.0, mean, 1.0, 32.0, 3.0, 0, 0, 0, 1024)
                    mark = prints[call * len(TENSORS) + place] ^ changed
                    writer.tensor(
                        Tensor(seq, role, name, "float32", (32, 32), (32, 1), "cpu", True, statistics, mark)  # type: ignore[arg-type]
                    )
                    row += 1
            writer.step_done()


class Stopwatch:
    """Adds up the time spent in functions, by wrapping them where they are looked up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return run


def measure(reference: Path, candidate: Path) -> tuple[dict[str, float], str]:
    """The seconds of every stage of one comparison, and its report."""
    watch = Stopwatch()

    def read(path: Path) -> Any:
        run = open_run(path)
        for one in run.ranks.values():
            assert len(one.call_rows) == len(one.tensors)
        return run

    stages = {rank: ("read_rows", "align", "judge", "find_divergences"), comparison: ("table", "problems")}
    for module, names in stages.items():
        for stage in names:
            setattr(module, stage, watch.timed(stage, getattr(module, stage)))
    start = time.perf_counter()
    timed_read = watch.timed("read the files", read)
    result = compare(timed_read(reference), timed_read(candidate))
    report = watch.timed("report", str)(result)
    watch.seconds["total"] = time.perf_counter() - start
    return watch.seconds, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--different", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, different in (("a", 0.0), ("b", options.different)):
            write_run(Path(folder) / name, options.rows, different)
        seconds, report = measure(Path(folder) / "a", Path(folder) / "b")
    print(report, end="\n\n")
    print(f"{options.rows:,} tensors in each run, {options.different:.0%} of them different\n")
    print("| stage | seconds |\n|---|---:|")
    for stage, spent in seconds.items():
        print(f"| {stage} | {spent:.3f} |")


if __name__ == "__main__":
    main()
