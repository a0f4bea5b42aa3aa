"""How long it takes to compare runs of several ranks, in one process and in as many as there are cores.

    python benchmarks/compare_ranks.py [--ranks 2 8] [--rows 200000] [--bytes 1e9]

Each pair of runs differs in every tensor that is not in the first step: once with statistics alone, so many rows to a
rank, and once with values, so many bytes in all ranks together. Times are those of the command that a person types,
start-up and report included, the best of three.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from compare_rows import write_run
from tables import markdown, provenance

import astray
from astray.comparison.ranks.schedule import cores
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter

ROUNDS = 3
ELEMENTS = 1 << 20


def write_values(path: Path, tensors: int, rank: int, world_size: int, factor: float) -> None:
    """A rank that kept so many tensors of 4 MB, each the output of a call."""
    random = np.random.default_rng(rank)
    with RunWriter(path, rank, info=RunInfo.of_process(world_size=world_size)) as writer:
        for seq in range(tensors):
            values = random.normal(size=ELEMENTS).astype(np.float32)
            values *= np.float32(factor if seq else 1.0)
            found = measure(Strided.from_numpy(values))
            writer.call(Call(seq, seq, 0, "module", f"h.{seq % 12}", "Linear", 0, "forward"))
            writer.tensor(Tensor(seq, "output", "out", "float32", values.shape, (1,), "cpu", False, *found), values)
            writer.step_done()


def best(command: list[str]) -> float:
    """The least seconds that a command takes, of some rounds."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found.append(time.perf_counter() - started)
        if done.returncode != 1:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return min(found)


def row(kept: str, ranks: int, folder: Path) -> list[str]:
    """One line of the table: in one process, as it is by default, and with a process for each core at any rate."""
    command = [sys.executable, "-m", "astray", "compare", str(folder / "a"), str(folder / "b")]
    seconds = [best([*command, *options]) for options in (["--processes=1"], [], [f"--processes={cores()}"])]
    return [kept, str(ranks), *(f"{one:.2f}" for one in seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--bytes", type=float, default=1e9)
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for kept in ("stats", "tensors"):
            with tempfile.TemporaryDirectory() as folder:
                for rank in range(ranks):
                    for name, changed in (("a", False), ("b", True)):
                        if kept == "stats":
                            write_run(Path(folder) / name, options.rows, 0.5 * changed, rank, ranks)
                        else:
                            tensors = int(options.bytes / ranks / ELEMENTS / 4)
                            write_values(Path(folder) / name, tensors, rank, ranks, 1.001 if changed else 1.0)
                rows.append(row(kept, ranks, Path(folder)))
    print(provenance({"astray": astray.__version__}))
    print("\n" + markdown(["kept", "ranks", "one process", "by default", f"{cores()} processes"], rows))


if __name__ == "__main__":
    main()
